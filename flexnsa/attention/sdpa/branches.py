"""Plain PyTorch, eager and differentiable, in linear memory: the implementation that trains on CPUs.

Dense branches go through their intervals in chunks of queries, the selected branch block by block. On an accelerator
each call reads a few loop bounds on the host; ``flex`` reads none.

Causality is of finite numbers: a value that is infinite or not a number reaches the queries of its chunk or block that
come before it too, as 0 times it is not a number. So it is in PyTorch's own SDPA, in FlexAttention and in the oracle.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexnsa.attention.sdpa import score_mod
from flexnsa.attention.sdpa.gathered import gathered_attention
from flexnsa.attention.sdpa.interval import interval_attention
from flexnsa.attention.sdpa.key_major import key_major_attention
from flexnsa.attention.seam import Attended, Call, Compressed
from flexnsa.attention.selection import select_in_chunks, select_with_mod
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.user_mods import compressed_positions, token_positions
from flexnsa.masks.window import window_intervals
from flexnsa.positions import positions_of

COMPRESSED_CHUNK, WINDOW_CHUNK = 256, 64
"""Queries a chunk: enough for the products to run at full speed, few enough for their scores to stay in cache."""
GATHERED_QUERIES = 16
"""Up to so many queries, gathering their keys is faster than going block by block."""


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that lie wholly in the past (section 3.3.1)."""
    positions = positions_of(q, call.positions)
    visible = compressed_intervals(positions, call.config)
    if call.score_mod is not None:
        key_positions = functools.partial(compressed_positions, config=call.config)
        attended = score_mod.interval_attention(
            q, k_cmp, v_cmp, visible, positions, key_positions, call.score_mod, call.scale
        )
    else:
        attended = interval_attention(q, k_cmp, v_cmp, visible.lo, visible.hi, call.scale, COMPRESSED_CHUNK)
    out, lse = attended
    return Compressed(out, lse)


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """Attend to the last ``window_size`` tokens of the document (section 3.3.3)."""
    positions = positions_of(q, call.window_positions)
    visible = window_intervals(positions, call.config)
    if call.score_mod is not None:
        return score_mod.interval_attention(q, k, v, visible, positions, token_positions, call.score_mod, call.scale)
    return Attended(*interval_attention(q, k, v, visible.lo, visible.hi, call.scale, WINDOW_CHUNK))


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    """Attend to the past tokens of the selected blocks (section 3.3.2)."""
    positions, size = positions_of(q, call.positions), call.config.select_block_size
    if call.score_mod is not None:
        return score_mod.selected_attention(q, k, v, block_indices, positions, call.score_mod, call.scale, size)
    # A compiler would make a graph of either: one for few queries, and one for all the others.
    few = not torch.compiler.is_compiling() and q.shape[2] <= GATHERED_QUERIES
    attention = gathered_attention if few else key_major_attention
    return Attended(*attention(q, k, v, block_indices, positions.token, positions.start, call.scale, size))


def select(
    q: Tensor,
    k_cmp: Tensor,
    call: Call,
    lse: Tensor | None,
    importance: Tensor | None,  # noqa: ARG001  (only made where the keys are a cache)
) -> Tensor:
    """Choose the ``n`` best blocks of each query, a chunk of queries at a time (Eq. 8 to 10)."""
    return (select_in_chunks if call.score_mod is None else select_with_mod)(q, k_cmp, lse, call)
