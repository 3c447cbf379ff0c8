"""Attention to selected blocks, block by block: each block meets the queries that chose it in one matrix product.

Gathering the ``n * l'`` keys of every query would move ``n * l'`` rows a query; gathering the queries of every block
moves ``n``. Partial results of a query are merged with a running maximum, as in FlashAttention; backward starts from
q, k, v, out, lse and the indices alone. The loop depends on data, so it stands behind an opaque operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexnsa.operators import opaque_operator

MAX_ROWS = 512
"""Queries of one product: enough to fill the cores, few enough for the scores to stay in cache."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that chose one block of one head; the first ``ragged`` may be inside the block and see a part of it."""

    head: int
    keys: slice
    rows: Tensor
    ragged: int


def _tiles(block_indices: Tensor, token: Tensor, start: Tensor, num_keys: int, block_size: int) -> Iterator[_Tile]:
    """Sort the (block, query) pairs of each head by block; queries stay in order within a block."""
    batch, heads, _, n = block_indices.shape
    for head in range(batch * heads):
        row = head // heads
        chosen, own, begin = block_indices[row, head % heads], token[row % len(token)], start[row % len(start)]
        first = chosen * block_size + begin[:, None]
        first = first.masked_fill((chosen < 0) | (first > own[:, None]), num_keys)  # padding and the future sort last
        first, order = first.flatten().sort(stable=True)
        blocks, counts = first.unique_consecutive(return_counts=True)
        rows = order.div_(n, rounding_mode="floor")
        stop = 0
        for key, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            at, stop = stop, stop + count
            if key >= num_keys:
                break
            keys = slice(key, min(key + block_size, num_keys))
            for offset in range(0, count, MAX_ROWS):
                tile_rows = rows[at + offset : min(at + offset + MAX_ROWS, stop)]
                # Queries come in order, so those inside the block are the first of its list, at most one a token.
                yield _Tile(head, keys, tile_rows, min(max(0, block_size - offset), len(tile_rows)))


class _Side:
    """One side of the attention laid out for row gathers: ``(B * Hkv, T, G * D)``, with a workspace for a tile."""

    def __init__(self, x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.shape = x.shape
        batch, heads, length, self.dim = x.shape
        grouped = x.to(dtype).unflatten(1, (num_kv_heads, heads // num_kv_heads)).transpose(2, 3)
        self.rows = grouped.reshape(batch * num_kv_heads, length, -1)
        self.workspace = self.rows.new_empty(MAX_ROWS, self.rows.shape[-1])

    def gather(self, tile: _Tile) -> Tensor:
        """Copy the tile's rows to the workspace, one row a query head ``(m * G, D)``."""
        rows = self.workspace[: len(tile.rows)]
        return torch.index_select(self.rows[tile.head], 0, tile.rows, out=rows).view(-1, self.dim)

    def scatter(self, tile: _Tile, values: Tensor) -> None:
        """Write rows back; a query is at most once in a tile."""
        self.rows[tile.head].index_copy_(0, tile.rows, values.view(len(tile.rows), -1))

    def add(self, tile: _Tile, values: Tensor) -> None:
        """Add to rows in place."""
        self.rows[tile.head].index_add_(0, tile.rows, values.view(len(tile.rows), -1))

    def unfold(self, dtype: torch.dtype) -> Tensor:
        """Return to the shape that came in, ``(B, H, T, D)``."""
        batch, _, length, dim = self.shape
        grouped = self.rows.view(batch, -1, length, self.rows.shape[-1] // dim, dim)
        return grouped.transpose(2, 3).reshape(self.shape).to(dtype)


def _scores(q: Tensor, k: Tensor, tile: _Tile, token: Tensor, workspace: Tensor) -> Tensor:
    """Compute the tile's scores ``(m * G, keys)`` in the workspace, ``-inf`` in the future."""
    width = tile.keys.stop - tile.keys.start
    scores = workspace[: len(q) * width].view(len(q), width)
    torch.mm(q, k[tile.head, tile.keys].T, out=scores)
    if tile.ragged:
        key = torch.arange(tile.keys.start, tile.keys.stop, device=q.device)
        future = key > token[tile.rows[: tile.ragged], None]
        scores.view(len(tile.rows), -1, width)[: tile.ragged].masked_fill_(future[:, None], -torch.inf)
    return scores


@opaque_operator("selected_attention")
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, token: Tensor, start: Tensor, scale: float, block_size: int
) -> tuple[Tensor, Tensor]:
    """Attend to the past tokens of the selected blocks.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        block_indices: int32 ``(B, Hkv, T, n)``, unique in a row, -1 where there is none.
        token: int ``(B or 1, T)``, never decreasing: each query's place among the keys.
        start: int ``(B or 1, T)``: the key at which block 0 of the query begins.
        scale: factor on the scores.
        block_size: keys a block.

    Returns:
        ``out (B, Hq, T, Dv)`` in the dtype of q and ``lse (B, Hq, T)``, fp32 or wider; 0 and ``-inf`` without a key.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, num_keys = k.shape[1:3]
    queries = _Side(q.to(dtype) * scale, heads, dtype)
    keys, values = k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    out = _Side(q.new_zeros(*q.shape[:3], v.shape[-1]), heads, dtype)
    top = _Side(q.new_full((*q.shape[:3], 1), -torch.inf, dtype=dtype), heads, dtype)
    total = _Side(torch.zeros_like(q[..., :1], dtype=dtype), heads, dtype)
    workspace = queries.workspace.new_empty(MAX_ROWS * q.shape[1] // heads * block_size)
    for tile in _tiles(block_indices, token, start, num_keys, block_size):
        probs = _scores(queries.gather(tile), keys, tile, token[tile.head // heads % len(token)], workspace)
        old_top = top.gather(tile)
        new_top = torch.maximum(old_top, probs.amax(-1, keepdim=True))
        decay = old_top.sub_(new_top).exp_()
        probs.sub_(new_top).exp_()
        out.scatter(tile, torch.addmm(out.gather(tile).mul_(decay), probs, values[tile.head, tile.keys]))
        total.scatter(tile, total.gather(tile).mul_(decay).add_(probs.sum(-1, keepdim=True)))
        top.scatter(tile, new_top)
    out.rows.unflatten(-1, (-1, out.dim)).div_(total.rows.clamp_min(torch.finfo(dtype).tiny)[..., None])
    top.rows.add_(total.rows.log_())
    return out.unfold(q.dtype), top.unfold(dtype).squeeze(-1)


@opaque_operator("selected_attention_backward")
def _selected_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    token: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = lse.dtype
    heads, num_keys = k.shape[1:3]
    keys, values = k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)
    queries, grad_outs = _Side(q.to(dtype) * scale, heads, dtype), _Side(grad_out, heads, dtype)
    row_terms = _Side((grad_out.to(dtype) * out).sum(-1, keepdim=True).sub_(grad_lse[..., None]), heads, dtype)
    lses = _Side(lse[..., None], heads, dtype)
    grad_q, grad_k, grad_v = _Side(torch.zeros_like(q), heads, dtype), torch.zeros_like(keys), torch.zeros_like(values)
    workspace, grad_workspace = queries.workspace.new_empty(2, MAX_ROWS * q.shape[1] // heads * block_size)
    for tile in _tiles(block_indices, token, start, num_keys, block_size):
        q_rows, grad_rows = queries.gather(tile), grad_outs.gather(tile)
        probs = _scores(q_rows, keys, tile, token[tile.head // heads % len(token)], workspace)
        probs.sub_(lses.gather(tile)).exp_()
        grad_v[tile.head, tile.keys].addmm_(probs.T, grad_rows)
        grad_scores = grad_workspace[: probs.numel()].view_as(probs)
        torch.mm(grad_rows, values[tile.head, tile.keys].T, out=grad_scores)
        grad_scores.sub_(row_terms.gather(tile)).mul_(probs)
        grad_k[tile.head, tile.keys].addmm_(grad_scores.T, q_rows)
        grad_q.add(tile, torch.mm(grad_scores, keys[tile.head, tile.keys]))
    return grad_q.unfold(q.dtype).mul_(scale), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


@selected_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@_selected_attention_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.block_size = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _selected_attention_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.block_size)
    return (*grads, None, None, None, None, None)


selected_attention.register_autograd(_backward, setup_context=_save)
