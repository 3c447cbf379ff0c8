"""Top-n blocks of each query, the same on every device; scores exist for one chunk of queries at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.scoring import block_scores, group_probabilities
from flexnsa.attention.threads import grouped, heads_at_once, repeated, side_by_side
from flexnsa.config import NSAConfig
from flexnsa.custom_ops import opaque_operator
from flexnsa.geometry import blocks_within, num_blocks, num_compressed
from flexnsa.positions import Positions
from flexnsa.validation import check_has_values, check_positive_int, check_tensor, check_type

Probabilities = Callable[[Tensor, Tensor, Tensor | None, Positions], Tensor]
"""Of ``q, k_cmp, lse`` and the positions: ``p_cmp`` summed over the heads of a group, ``(B, Hkv, T, N)``."""

CHUNK = 256
"""Queries scored at a time: peak memory is ``B * Hq * CHUNK * N`` scores."""


def top_blocks(scores: Tensor, positions: Positions, *, config: NSAConfig) -> Tensor:
    """Choose ``n`` blocks: the forced ones, then the highest scores, a tie to the lower index (section 3.3.2).

    Args:
        scores: fp32 ``(B, Hkv, T, M)``, non-negative.
        positions: of the ``T`` queries; candidates are the blocks up to and including the query's own.
        config: gives ``n`` and the forced blocks.

    Returns:
        int32 ``(B, Hkv, T, n)``, ascending, padded with -1 on the right.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    current = ((positions.token - positions.start) // config.select_block_size)[:, None, :, None]
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)

    # Non-negative floats order like their bits, so (bits, reversed index) is one integer without ties.
    bits = scores.masked_fill(forced, torch.inf).view(torch.int32).to(torch.int64)
    keys = ((bits << 32) | (num_blocks - 1 - block)).masked_fill(block > current, -1)

    best = keys.topk(min(config.num_selected_blocks, num_blocks), dim=-1, sorted=False).values
    chosen = (num_blocks - 1 - (best & 0xFFFFFFFF)).masked_fill(best < 0, num_blocks).to(torch.int32).sort(-1).values
    chosen = chosen.masked_fill(chosen == num_blocks, -1)
    return F.pad(chosen, (0, config.num_selected_blocks - chosen.shape[-1]), value=-1)


def check_block_indices(block_indices: Tensor, *, config: NSAConfig, seq_len: int) -> None:
    """Demand that every row is ascending, unique, within the sequence and padded with -1 on the right.

    Attention does so by itself on a CPU. Elsewhere to look would cost a synchronisation: there, call this for
    block_indices of your own. A block that begins after its query, or after the end of its document, is allowed: it
    shows no key. Attention given wrong values that it did not look at means nothing, but reads no memory but the keys.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, or a row that is not in order; the message shows the first one.
    """
    check_type("config", config, NSAConfig)
    check_positive_int("seq_len", seq_len)
    check_tensor("block_indices", block_indices, ("B", "Hkv", "T", config.num_selected_blocks), dtype=torch.int32)
    check_has_values("block_indices", block_indices)
    last = num_blocks(seq_len, config)
    keys = block_indices.masked_fill(block_indices == -1, last)  # padding sorts behind every block
    ascends = (keys[..., 1:] > keys[..., :-1]) | (keys[..., 1:] == last)
    wrong = ((keys < 0) | (keys > last)).any(-1) | ~ascends.all(-1) | (block_indices == last).any(-1)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"block_indices: expected rows of ascending blocks below {last}, each once, then -1, "
            f"got {block_indices[at].tolist()} at {list(at)}"
        )


def select_in_chunks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, positions: Positions, *, config: NSAConfig, scale: float
) -> Tensor:
    """Score and choose the blocks of every query, int32 ``(B, Hkv, T, n)``, without a gradient.

    One opaque operator to the compiler: its loop neither unrolls nor breaks the graph, and a checkpointing policy can
    save its result instead of selecting anew.
    """
    q, k_cmp, lse = q.detach(), k_cmp.detach(), None if lse is None else lse.detach()
    rows = (positions.token, positions.start, positions.cmp_start)
    return _select_in_chunks(q, k_cmp, lse, *rows, astuple(config), scale)


def select_openly(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    positions: Positions,
    *,
    config: NSAConfig,
    probabilities: Probabilities,
    chunk: int = CHUNK,
) -> Tensor:
    """As :func:`select_in_chunks`, by a function of the caller's, and in the open.

    For scores with a mod: an operator takes no functions. A compiler unrolls the loop.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``.
        lse: of the compressed branch with the same mod, or None.
        positions: of the queries.
        config: block sizes.
        probabilities: :func:`flexnsa.attention.scoring.group_probabilities` with all but its tensors given.
        chunk: queries scored at a time.
    """
    q, k_cmp, lse = q.detach(), k_cmp.detach(), None if lse is None else lse.detach()
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _select(q, k_cmp, lse, positions, config, probabilities, chunk)


@opaque_operator("select_in_chunks")
def _select_in_chunks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    token: Tensor,
    start: Tensor,
    cmp_start: Tensor,
    sizes: Sequence[int],
    scale: float,
) -> Tensor:
    config = NSAConfig(**{field.name: size for field, size in zip(fields(NSAConfig), sizes, strict=True)})
    chosen = token.new_empty(*k_cmp.shape[:2], q.shape[2], config.num_selected_blocks)
    probabilities = functools.partial(group_probabilities, config=config, scale=scale)

    def select(q: Tensor, k_cmp: Tensor, chosen: Tensor, *others: Tensor) -> None:
        rows, lse = Positions(*(x[:, 0] for x in others[:3])), [x.flatten(1, 2) for x in others[3:]]
        chosen.copy_(_select(q.flatten(1, 2), k_cmp, lse[0] if lse else None, rows, config, probabilities, CHUNK))

    per_token, per_head = (
        repeated(k_cmp, token, start, cmp_start),
        grouped(k_cmp, *(x for x in (q, lse) if x is not None)),
    )
    views = (next(per_head), k_cmp, chosen, *per_token, *per_head)
    side_by_side(select, views, heads_at_once(q, k_cmp, CHUNK))
    return chosen


@_select_in_chunks.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor | None, token: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001
    return token.new_empty(q.shape[0], k_cmp.shape[1], q.shape[2], rest[2][3])


def _select(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    positions: Positions,
    config: NSAConfig,
    probabilities: Probabilities,
    chunk: int,
) -> Tensor:
    chosen = []
    for at in range(0, q.shape[2], chunk):
        rows = slice(at, at + chunk)
        here = positions.at(rows)
        k_past = k_cmp[:, :, : _keys_until(here, k_cmp.shape[2], config)]
        probs = probabilities(q[:, :, rows], k_past, None if lse is None else lse[:, :, rows], here)
        width = blocks_within(k_past.shape[2], config)
        chosen.append(top_blocks(block_scores(probs, here, num_blocks=width, config=config), here, config=config))
    return torch.cat(chosen, dim=2)


def _keys_until(positions: Positions, num_keys: int, config: NSAConfig) -> int:
    """Bound the compressed keys that are in no query's future, by a look at the queries where one costs nothing."""
    if torch.compiler.is_compiling() or positions.token.is_cuda:
        return num_keys
    return num_compressed(int(positions.token.max()) + 1, config)
