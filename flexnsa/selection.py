"""Top-n blocks of each query, the same on every device; scores exist for one chunk of queries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.geometry import blocks_within, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.operators import opaque_operator
from flexnsa.scoring import block_scores, group_probabilities

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


def select_in_chunks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, positions: Positions, *, config: NSAConfig, scale: float
) -> Tensor:
    """Score and choose the blocks of every query, int32 ``(B, Hkv, T, n)``, without a gradient.

    One opaque operator to the compiler: its loop neither unrolls nor breaks the graph, and a checkpointing policy can
    save its result instead of selecting anew.
    """
    rows = (positions.token, positions.start, positions.cmp_start)
    return _select_in_chunks(
        q.detach(), k_cmp.detach(), None if lse is None else lse.detach(), *rows, astuple(config), scale
    )


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
    chosen = token.new_empty(q.shape[0], k_cmp.shape[1], q.shape[2], config.num_selected_blocks)
    for at in range(0, q.shape[2], CHUNK):
        rows = slice(at, at + CHUNK)
        last = int(token[:, rows].max()) + 1  # nothing beyond the last query of the chunk is worth a score
        positions = Positions(token[:, rows], start[:, rows], cmp_start[:, rows])
        k_past = k_cmp[:, :, : num_compressed(last, config)]
        probs = group_probabilities(
            q[:, :, rows], k_past, None if lse is None else lse[:, :, rows], positions, config=config, scale=scale
        )
        num_blocks = blocks_within(k_past.shape[2], config)
        chosen[:, :, rows] = top_blocks(
            block_scores(probs, positions, num_blocks=num_blocks, config=config), positions, config=config
        )
    return chosen


@_select_in_chunks.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor | None, token: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001
    return token.new_empty(q.shape[0], k_cmp.shape[1], q.shape[2], rest[2][3])
