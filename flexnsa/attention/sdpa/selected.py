"""Attention to selected blocks, block by block: one matrix product of a block and the queries that selected it.

Gathering the keys of every query would move ``n * l'`` rows per query; gathering the queries of every block moves
``n``. The scores of a query are taken relative to a reference, one of its own scores, so that its partial outputs from
many blocks can simply be added. A score far above the reference raises it, like FlashAttention's running maximum.
Backward needs only q, k, v, out, lse and the indices. The loop depends on data, so it is an opaque operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.sdpa.chunks import IntervalInputs
from flexnsa.attention.sdpa.interval import attend_to_intervals, differentiate_intervals, takes
from flexnsa.attention.sdpa.selected_few import SelectedInputs
from flexnsa.attention.threads import grouped, repeated, run_heads_in_threads
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.results import empty_contiguous_gradients, empty_contiguous_outputs

MAX_ROWS = 512
"""Queries of one product: enough to run at full speed, few enough for the scores to stay in cache."""
HEADROOM = 64.0
"""How far a score may exceed the reference, base 2: rarely reached, and far below the overflow of fp32."""
WHOLE_PAST_CHUNK = 128
"""Queries of a chunk where all blocks are selected, so that no key is gathered."""
PARTIAL_SUMS = 4
"""Number of partial sums over the rows of a tile."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that selected one block; the first ``ragged`` may be inside the block and see only a part of it."""

    keys: slice
    rows: Tensor
    ragged: int


def _tiles(block_indices: Tensor, token: Tensor, start: Tensor, num_keys: int, block_size: int) -> Iterator[_Tile]:
    """Sort a head's (block, query) pairs ``(T, n)`` by block; queries stay in order within a block."""
    first = block_indices * block_size + start[:, None]
    first = first.masked_fill((block_indices < 0) | (first > token[:, None]), num_keys)  # padding and the future last
    first, order = first.flatten().sort(stable=True)
    counted = cast("tuple[Tensor, Tensor]", first.unique_consecutive(return_counts=True))  # pyright: ignore[reportUnknownMemberType]
    blocks = cast("list[list[int]]", torch.stack(counted, 1).tolist())  # pyright: ignore[reportUnknownMemberType]
    rows = order.div_(block_indices.shape[-1], rounding_mode="floor")
    stop = 0
    for key, count in blocks:
        at, stop = stop, stop + count
        if key >= num_keys:
            break
        keys = slice(key, min(key + block_size, num_keys))
        for offset in range(0, count, MAX_ROWS):
            tile_rows = rows[at + offset : min(at + offset + MAX_ROWS, stop)]
            # Queries ascend, so those inside the block come first, at most one per token.
            yield _Tile(keys, tile_rows, min(max(0, block_size - offset), len(tile_rows)))


class _Rows:
    """Vectors of a group's query heads as rows to gather, ``(T, G, D)``, with a workspace for a tile.

    ``extra`` is an extra column: a product with vectors that end in 1 adds it to the dot product.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, extra: Tensor | None = None) -> None:
        group, length, dim = x.shape
        self.all = torch.empty(length, group, dim + (extra is not None), dtype=dtype, device=x.device)
        self.all[..., :dim] = x.transpose(0, 1)
        if extra is not None:
            self.all[..., dim] = extra.T
        self.workspace = self.all.new_empty(MAX_ROWS, *self.all.shape[1:])

    def workspace_of(self, tile: _Tile) -> Tensor:
        """Return the tile's part of the workspace, one row per query head ``(m * G, D)``."""
        return self.workspace[: len(tile.rows)].flatten(0, 1)

    def gather(self, tile: _Tile) -> Tensor:
        """Copy the tile's rows to the workspace."""
        torch.index_select(self.all, 0, tile.rows, out=self.workspace[: len(tile.rows)])
        return self.workspace_of(tile)

    def add(self, tile: _Tile) -> None:
        """Add the workspace to the tile's rows; a query occurs at most once in a tile."""
        self.all.flatten(1).index_add_(0, tile.rows, self.workspace[: len(tile.rows)].flatten(1))


def _ending_in_one(x: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Multiply the vectors ``(S, D)`` by a factor and append a 1 to each."""
    out = torch.ones(len(x), x.shape[-1] + 1, dtype=dtype, device=x.device)
    out[:, :-1].copy_(x).mul_(factor)
    return out


def _scores(q: Tensor, k: Tensor, tile: _Tile, token: Tensor, workspace: Tensor) -> Tensor:
    """Compute the tile's scores ``(m * G, keys)`` in the workspace, ``-inf`` in the future."""
    width = tile.keys.stop - tile.keys.start
    scores = workspace[: len(q) * width].view(len(q), width)
    torch.mm(q, k[tile.keys].T, out=scores)
    if tile.ragged:
        key = torch.arange(tile.keys.start, tile.keys.stop, device=q.device)
        future = key > token[tile.rows[: tile.ragged], None]
        scores.view(len(tile.rows), -1, width)[: tile.ragged].masked_fill_(future[:, None], -torch.inf)
    return scores


def _references(q: Tensor, k: Tensor, block_indices: Tensor, start: Tensor, block_size: int) -> Tensor:
    """Return the score of each query ``(G, T, D)`` for the first key of its first block, ``(G, T)``."""
    first = (block_indices[:, 0] * block_size + start).clamp(0, len(k) - 1)
    return torch.einsum("gtd,td->gt", q.to(k.dtype), k[first, : q.shape[-1]])


def _raise_references(scores: Tensor, tile: _Tile, queries: _Rows, out: _Rows) -> None:
    """Raise the references of the tile's rows to their largest score, and rescale their partial outputs."""
    rise = scores.amax(-1, keepdim=True).clamp_min_(0)
    scores.sub_(rise)
    rise = rise.view(len(tile.rows), -1)
    queries.all[tile.rows, :, -1] -= rise
    out.all[tile.rows] *= rise.neg().exp2_()[..., None]


def _add_over_rows(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right``, in partial sums if the rows divide evenly: one long fp32 sum is less accurate."""
    if len(left) % PARTIAL_SUMS:
        total.addmm_(left.T, right)
    else:
        left, right = (torch.unflatten(x, 0, (PARTIAL_SUMS, -1)) for x in (left, right))
        total.add_(torch.bmm(left.mT, right).sum(0))


def _whole_past(inputs: SelectedInputs) -> IntervalInputs | None:
    """Return what attends to intervals if each query selected all blocks of its past, and its kernel takes the keys."""
    q, k, v, block_indices, token, start, scale, block_size = inputs
    if not takes(k):
        return None
    current = (token - start)[..., None] // block_size
    block = torch.arange(block_indices.shape[-1], dtype=block_indices.dtype)
    whole = block.where(block <= current, -1)[:, None].expand_as(block_indices)
    every = bool((current < len(block)).all()) and torch.equal(block_indices, whole)
    return IntervalInputs(q, k, v, start.clamp_min(0), token + 1, scale, WHOLE_PAST_CHUNK) if every else None


@opaque_operator("selected_attention")
def selected_attention(inputs: SelectedInputs) -> tuple[Tensor, Tensor]:
    """Attend to the past tokens of the selected blocks.

    Returns:
        ``out (B, Hq, T, Dv)`` in the dtype of q and ``lse (B, Hq, T)``, fp32 or wider; 0 and ``-inf`` without a key.
    """
    if (past := _whole_past(inputs)) is not None:
        return attend_to_intervals(past)
    q, k, v, block_indices, token, start, scale, block_size = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=dtype)

    def attend(*views: Tensor) -> None:
        q, out, lse, k, v, block_indices, token, start = (x[0, 0] for x in views)
        keys, values = _ending_in_one(k, dtype, scale * LOG2_E), _ending_in_one(v, dtype)
        queries = _Rows(q, dtype, -_references(q, keys, block_indices, start, block_size))
        parts = _Rows(q.new_zeros(1).expand(*q.shape[:2], v.shape[-1] + 1), dtype)
        workspace = keys.new_empty(MAX_ROWS * len(q) * block_size)
        for tile in _tiles(block_indices, token, start, len(k), block_size):
            probs = _scores(queries.gather(tile), keys, tile, token, workspace)
            if probs.amax() > HEADROOM:
                _raise_references(probs, tile, queries, parts)
            torch.mm(probs.exp2_(), values[tile.keys], out=parts.workspace_of(tile))
            parts.add(tile)
        weighted, total = torch.split(parts.all.transpose(0, 1), [v.shape[-1], 1], dim=-1)
        torch.div(weighted, total.clamp_min(torch.finfo(dtype).tiny), out=out)
        lse.copy_((total.squeeze(-1).double().log2() - queries.all[..., -1].T) / LOG2_E)

    views = (*grouped(k, q, out, lse), k, v, block_indices, *repeated(k, token, start))
    run_heads_in_threads(attend, views, size=1)
    return out, lse


@opaque_operator("selected_attention_backward")
def _selected_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, inputs: SelectedInputs, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if (past := _whole_past(inputs)) is not None:
        return differentiate_intervals(grad_out, grad_lse, past, out, lse)
    q, k, v, block_indices, token, start, scale, block_size = inputs
    dtype = lse.dtype
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def differentiate(*views: Tensor) -> None:
        q, grad_q, out, grad_out, lse, grad_lse, k, grad_k, v, grad_v, block_indices, token, start = (
            x[0, 0] for x in views
        )
        keys, values = _ending_in_one(k, dtype, scale * LOG2_E), _ending_in_one(v, dtype)
        queries = _Rows(q, dtype, lse.double() * -LOG2_E)
        grad_outs = _Rows(grad_out, dtype, grad_lse - (grad_out.to(dtype) * out).sum(-1))
        grad_queries = _Rows(keys.new_zeros(1).expand(q.shape), dtype)
        grad_keys, grad_values = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        workspace, grad_workspace = keys.new_empty(2, MAX_ROWS * len(q) * block_size)
        for tile in _tiles(block_indices, token, start, len(k), block_size):
            q_rows, grad_rows = queries.gather(tile), grad_outs.gather(tile)
            probs = _scores(q_rows, keys, tile, token, workspace).exp2_()
            _add_over_rows(grad_values[tile.keys], probs, grad_rows[:, :-1])
            grad_scores = grad_workspace[: probs.numel()].view_as(probs)
            torch.mm(grad_rows, values[tile.keys].T, out=grad_scores)
            grad_scores.mul_(probs)
            _add_over_rows(grad_keys[tile.keys], grad_scores, q_rows[:, :-1])
            torch.mm(grad_scores, keys[tile.keys, :-1], out=grad_queries.workspace_of(tile))
            grad_queries.add(tile)
        grad_q.copy_(grad_queries.all.div_(LOG2_E).transpose(0, 1))
        grad_k.copy_(grad_keys.mul_(scale))
        grad_v.copy_(grad_values)

    by_group = grouped(k, q, grad_q, out, grad_out, lse, grad_lse)
    run_heads_in_threads(
        differentiate, (*by_group, k, grad_k, v, grad_v, block_indices, *repeated(k, token, start)), size=1
    )
    return grad_q, grad_k, grad_v


selected_attention.register_fake(empty_contiguous_outputs)
_selected_attention_backward.register_fake(empty_contiguous_gradients)
selected_attention.register_backward(_selected_attention_backward)
