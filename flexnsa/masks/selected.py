"""The mask of the selected branch: a BlockMask of linear size whose backward is balanced.

A *key tile* is ``select_block_size`` consecutive keys that are gathered together. Without documents it is a block.
With documents a block may start anywhere. Cut the keys into aligned runs of ``select_block_size``: a block inside one
run uses the key tile of that run, and a block that crosses from one run to the next uses a second key tile, which
belongs to that boundary. However many documents there are, two key tiles per run are enough.

FlexAttention's backward loops, for each key tile, over the list of queries that selected it. A rectangle of such lists
would be quadratic, and the list of block 0, which every query selects, one serial loop over the sequence. So a key tile
is gathered several times: each *replica* serves at most ``C = select_block_size * num_selected_blocks`` queries. ``T``
queries need at most ``key tiles + T // select_block_size`` replicas, a static bound.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig, num_blocks
from flexnsa.masks.intervals import MaskMod, by_query, stored
from flexnsa.masks.positions import Positions


@dataclass(frozen=True, slots=True)
class SelectedMask:
    """The keys that selected attention gathers, and the mask of the queries over them.

    Args:
        block_mask: tiles of one query (``rows`` kernel rows) by ``select_block_size`` gathered keys.
        tokens: int32 ``(B, Hkv, V * select_block_size)``, the token of each gathered key.
    """

    block_mask: BlockMask
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The balanced transpose of ``tiles (..., T, n)``; see :func:`_balance`."""

    of_pair: Tensor  # (..., T, n) the replica that serves each (query, selected block) pair
    first_pair: Tensor  # (..., V) the first pair of each replica, as an index into T * n
    num_queries: Tensor  # (..., V)
    queries: Tensor  # (..., V, C) ascending; undefined from num_queries on


def selected_mask(
    block_indices: Tensor, positions: Positions | None, num_keys: int, *, rows: int, config: NSAConfig
) -> SelectedMask:
    """Build the mask of selected blocks for queries whose heads are folded into ``rows`` kernel rows each.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1 (NSA paper, Eq. 11 and 12).
        positions: of the ``T`` queries; None for one whole sequence from token 0.
        num_keys: length of the keys and values to gather from.
        rows: kernel rows per query, at least the size of a head group.
        config: provides the block size.
    """
    size = operator.index(config.select_block_size)  # a constant in a graph: a kernel is compiled for one block size
    num_queries, num_selected = block_indices.shape[-2:]
    blocks = num_blocks(num_keys, config)
    token = torch.arange(num_queries, device=block_indices.device)[None] if positions is None else positions.token
    start = 0 if positions is None else positions.start[:, None, :, None]
    # Blocks in the future show no key. They must go: their key tile could be out of bounds.
    valid = (block_indices >= 0) & (start + block_indices * size <= token[:, None, :, None])
    if positions is None or positions.aligned:
        num_tiles = blocks
        tiles, first = block_indices, block_indices * size
        causal = _causal
    else:
        num_tiles = 2 * blocks
        tiles, first = _key_tiles(block_indices, positions, size)
        causal = _causal_in_document

    replicas = _balance(torch.where(valid, tiles, num_tiles), num_tiles, capacity=size * num_selected)
    first = stored(first.flatten(-2).gather(-1, replicas.first_pair))
    tokens = first[..., None] + torch.arange(size, dtype=torch.int32, device=first.device)
    full = None, None  # no tile is seen in full
    kv_lists = valid.sum(-1, dtype=torch.int32), replicas.of_pair, *full
    q_lists = replicas.num_queries, replicas.queries, *full
    lengths, mask_mod = (num_queries * rows, first.shape[-1] * size), causal(first, positions, size, rows)
    block_mask = BlockMask(lengths, *kv_lists, *q_lists, (rows, size), mask_mod)
    return SelectedMask(block_mask, tokens.flatten(-2).clamp(0, num_keys - 1))


def _key_tiles(block_indices: Tensor, positions: Positions, size: int) -> tuple[Tensor, Tensor]:
    """Return the key tile of each selected block, ``(B, Hkv, T, n)``, and the first token of the tile."""
    token, start = positions.token[:, None, :, None], positions.start[:, None, :, None]
    block_start = start + block_indices * size
    # Keys after the query's own are masked anyway, so a block may end at the query.
    block_end = torch.minimum(block_start + size - 1, token)
    run = block_start // size
    crossing = block_end // size != run
    return 2 * run + crossing.int(), torch.where(crossing, block_start, run * size)


def _balance(tiles: Tensor, num_tiles: int, capacity: int) -> _Replicas:
    """Split every key tile into replicas of at most ``capacity`` queries, in the order of the queries.

    Args:
        tiles: int32 ``(B, Hkv, T, n)`` in ``[0, num_tiles]``; ``num_tiles`` marks a pair that selects nothing.
        num_tiles: number of key tiles; they need at most ``num_tiles + T * n // capacity`` replicas.
        capacity: length of a replica's list of queries.
    """
    num_selected = tiles.shape[-1]
    pairs = tiles.flatten(-2)
    num_pairs = pairs.shape[-1]
    num_replicas = num_tiles + num_pairs // capacity
    num_replicas = -(-num_replicas // 8) * 8  # a multiple of 128 keys, so that kernels need no bounds checks

    # After a stable sort the pairs of a key tile are neighbours, and their queries ascend.
    order = pairs.sort(dim=-1, stable=True).indices.int()
    tile_count = _count(pairs, num_tiles + 1)[..., :num_tiles]
    tile_start = tile_count.cumsum(-1, dtype=torch.int32) - tile_count
    tile_replicas = (tile_count + capacity - 1) // capacity
    replica_start = tile_replicas.cumsum(-1, dtype=torch.int32) - tile_replicas

    # The key tile of a replica is the last one that starts at or before it.
    replica = torch.arange(num_replicas, dtype=torch.int32, device=tiles.device)
    tile_of_replica = _count(replica_start, num_replicas).cumsum(-1) - 1
    used_before = (replica - replica_start.gather(-1, tile_of_replica)) * capacity
    num_queries = (tile_count.gather(-1, tile_of_replica) - used_before).clamp(0, capacity)
    offset = tile_start.gather(-1, tile_of_replica) + used_before
    members = offset[..., None] + torch.arange(capacity, dtype=torch.int32, device=tiles.device)
    sorted_queries = order // num_selected
    queries = sorted_queries.gather(-1, members.flatten(-2).clamp_max(num_pairs - 1).long()).unflatten(
        -1, (num_replicas, capacity)
    )
    first_pair = order.gather(-1, offset.clamp_max(num_pairs - 1).long()).long()

    index = torch.arange(num_pairs, dtype=torch.int32, device=tiles.device).expand_as(order)
    index_in_order = torch.empty_like(order).scatter(-1, order.long(), index)
    tile_of_pair = pairs.clamp_max(num_tiles - 1).long()
    rank = index_in_order - tile_start.gather(-1, tile_of_pair)
    of_pair = replica_start.gather(-1, tile_of_pair) + rank // capacity
    # Pairs that select nothing sort after the last key tile; clamp them into range.
    of_pair = of_pair.clamp(0, num_replicas - 1).unflatten(-1, tiles.shape[-2:])
    return _Replicas(of_pair, first_pair, num_queries, queries)


def _count(values: Tensor, length: int) -> Tensor:
    """Return how often each of ``0 .. length - 1`` occurs along the last dimension."""
    zeros = torch.zeros(*values.shape[:-1], length, dtype=torch.int32, device=values.device)
    # Computed ones: Triton's interpreter does not broadcast a constant over the addresses of an atomic addition.
    ones = (values >= 0).int()
    return zeros.scatter_add(-1, values.long(), ones)


def _causal(first: Tensor, positions: Positions | None, size: int, rows: int) -> MaskMod:
    token = None if positions is None else by_query(positions.token)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = q_idx // rows
        return first[b, h, kv_idx // size] + kv_idx % size <= (query if token is None else token(b, query))

    return mask_mod


def _causal_in_document(first: Tensor, positions: Positions | None, size: int, rows: int) -> MaskMod:
    assert positions is not None
    token, start = by_query(positions.token), by_query(positions.start)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query, document = token(b, q_idx // rows), start(b, q_idx // rows)
        run = first[b, h, kv_idx // size]
        key = run + kv_idx % size
        # A run may contain several documents, and before the block the end of the previous document. At most one block
        # of a document starts in a run, the first at or after the run's first token: the run's key tile is that block.
        block_start = document + (run - document + size - 1).clamp_min(0) // size * size
        return (block_start <= key) & (key <= query)

    return mask_mod
