"""Expand a BlockMask pair by pair, as slowly and plainly as its definition reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def pairs_by_rows(mask: BlockMask, *, consecutive: bool = False) -> Tensor:
    """Count how often each query meets each key it may see in the lists of key tiles: ``(B, H, Q, K)``, forward."""
    tiles = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    partial = _tile_counts(mask.kv_num_blocks, mask.kv_indices, tiles, consecutive)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _tile_counts(mask.full_kv_num_blocks, mask.full_kv_indices, tiles, consecutive)
    return _visible(mask, partial, full)


def pairs_by_columns(mask: BlockMask, *, consecutive: bool = False) -> Tensor:
    """Count the same in the lists of query tiles, which backward uses."""
    tiles = -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])
    assert mask.q_num_blocks is not None
    partial = _tile_counts(mask.q_num_blocks, mask.q_indices, tiles, consecutive)
    full = torch.zeros_like(partial)
    if mask.full_q_num_blocks is not None:
        full = _tile_counts(mask.full_q_num_blocks, mask.full_q_indices, tiles, consecutive)
    return _visible(mask, partial.mT, full.mT)


def mask_bytes(mask: BlockMask) -> int:
    """Sum the memory behind every tensor of the mask."""
    tensors = [x for x in mask.as_tuple() if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def _tile_counts(counts: Tensor, indices: Tensor | None, tiles: int, consecutive: bool) -> Tensor:
    assert indices is not None
    if consecutive:
        assert indices.shape[-1] == 1
        indices = indices + torch.arange(tiles)
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    assert (counts <= indices.shape[-1]).all(), "a list is longer than its row"
    assert (indices[listed] < tiles).all(), "a tile beyond the last"
    found = torch.zeros(*counts.shape, tiles, dtype=torch.int32)
    return found.scatter_add(-1, indices.clamp(0, tiles - 1).long(), listed.int())


def _visible(mask: BlockMask, partial: Tensor, full: Tensor) -> Tensor:
    queries, keys = mask.seq_lengths

    def spread(tiles: Tensor) -> Tensor:
        rows = tiles.repeat_interleave(mask.BLOCK_SIZE[0], -2)
        return rows.repeat_interleave(mask.BLOCK_SIZE[1], -1)[..., :queries, :keys]

    batch, heads = mask.kv_num_blocks.shape[:2]
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, queries, keys)), indexing="ij")
    return spread(partial) * mask.mask_mod(b, h, q, k).int() + spread(full)
