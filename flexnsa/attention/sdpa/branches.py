"""Plain PyTorch, eager and differentiable, in linear memory: the implementation that trains on CPUs.

Dense branches compute their intervals in chunks of queries, the selected branch block by block. On an accelerator each
call copies a few loop bounds to the host; ``flex`` copies none.

Causality holds for finite values: an infinite value or a NaN also reaches earlier queries of its chunk or block, since
0 times it is NaN. PyTorch's SDPA, FlexAttention and the oracle behave likewise.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.attention.plan import Plan
from flexnsa.attention.sdpa import score_mod
from flexnsa.attention.sdpa.chunks import IntervalInputs
from flexnsa.attention.sdpa.interval import interval_attention
from flexnsa.attention.sdpa.selected import selected_attention
from flexnsa.attention.sdpa.selected_few import SelectedInputs, gathered_attention
from flexnsa.attention.selection import select_in_chunks, select_with_mod
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.positions import positions_of
from flexnsa.masks.user_mods import compressed_positions, token_positions
from flexnsa.masks.window import window_intervals

COMPRESSED_CHUNK, WINDOW_CHUNK = 256, 128
"""Queries of a chunk: enough for products at full speed, few enough for their scores to stay in the CPU's cache."""


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that lie wholly in the past (section 3.3.1)."""
    positions = positions_of(q, call.positions)
    visible = compressed_intervals(positions, call.config)
    if call.score_mod is not None:
        key_positions = functools.partial(compressed_positions, config=call.config)
        return Compressed(*score_mod.attend_to_intervals(q, k_cmp, v_cmp, visible, positions, key_positions, call))
    inputs = IntervalInputs(q, k_cmp, v_cmp, visible.lo, visible.hi, call.scale, COMPRESSED_CHUNK)
    return Compressed(*interval_attention(inputs))


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens of the document (section 3.3.3)."""
    positions = positions_of(q, call.window_positions)
    visible = window_intervals(positions, call.config)
    if call.score_mod is not None:
        return score_mod.attend_to_intervals(q, k, v, visible, positions, token_positions, call)
    inputs = IntervalInputs(q, k, v, visible.lo, visible.hi, call.scale, WINDOW_CHUNK)
    return BranchOutput(*interval_attention(inputs))


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the past tokens of the selected blocks (section 3.3.2)."""
    if call.score_mod is not None:
        return score_mod.attend_to_blocks(q, k, v, block_indices, call)
    token, start, _ = positions_of(q, call.positions).tensors
    inputs = SelectedInputs(q, k, v, block_indices, token, start, call.scale, call.config.select_block_size)
    # Gathering is no operator: a compiler would trace it, and make a second graph for few queries.
    gathers = not torch.compiler.is_compiling() and Plan.of(q, k).are_gathered
    return BranchOutput(*(gathered_attention if gathers else selected_attention)(inputs))


def select(
    q: Tensor,
    k_cmp: Tensor,
    call: Call,
    lse: Tensor | None,
    importance: Tensor | None,  # noqa: ARG001  (only made where the keys are a cache)
) -> Tensor:
    """Choose the ``n`` best blocks of each query, a chunk of queries at a time (Eq. 8 to 10)."""
    return (select_in_chunks if call.score_mod is None else select_with_mod)(q, k_cmp, lse, call)
