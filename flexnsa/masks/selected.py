"""The blocks that each query selected, as a BlockMask of linear size whose backward is balanced.

A *bin* is one run of ``select_block_size`` keys that is gathered as a whole. Without documents it is a block. With
them, a block that lies inside one aligned run of that length uses the bin of the run, and a block that crosses a
boundary between two runs, because its document starts anywhere, has the bin of that boundary for itself. However many
documents there are, two bins per run are enough.

FlexAttention's backward walks, for each bin, the list of query tiles that use it. As a rectangle over bins that list
is quadratic, and that of block 0, which every query selects, is one serial loop over the whole sequence. So a bin is
gathered several times: a *copy* of it serves at most ``C = select_block_size * num_selected_blocks`` queries. ``T``
queries then need at most ``bins + T // select_block_size`` copies, a static bound.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig
from flexnsa.geometry import num_blocks
from flexnsa.masks.intervals import MaskMod, by_query, stored
from flexnsa.positions import Positions


@dataclass(frozen=True, slots=True)
class SelectedMask:
    """What selected attention needs to run: which keys to gather, and who attends to them.

    Args:
        block_mask: tiles of ``rows`` query rows (one query) by ``select_block_size`` gathered keys.
        tokens: int32 ``(B, Hkv, V * select_block_size)``, the token that each gathered key is.
    """

    block_mask: BlockMask
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class _Copies:
    """The balanced transpose of ``bins (..., T, n)``; see :func:`_balance`."""

    of_pair: Tensor  # (..., T, n) the copy that serves each (query, selected block) pair
    first_pair: Tensor  # (..., V) the first pair of each copy, as an index into T * n
    num_queries: Tensor  # (..., V)
    queries: Tensor  # (..., V, C) ascending; beyond num_queries without meaning


def selected_mask(
    block_indices: Tensor, positions: Positions | None, num_keys: int, *, rows: int, config: NSAConfig
) -> SelectedMask:
    """Turn selected blocks into the mask of queries whose heads are folded into ``rows`` rows each.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1 (NSA paper, Eq. 11 and 12).
        positions: of the ``T`` queries; None for one whole sequence from token 0.
        num_keys: length of the keys and values to gather from.
        rows: rows per query, at least the size of a head group.
        config: gives the block size.
    """
    size = operator.index(config.select_block_size)  # a constant to a compiler; kernels are made for one block size
    num_queries, num_selected = block_indices.shape[-2:]
    blocks = num_blocks(num_keys, config)
    token = torch.arange(num_queries, device=block_indices.device)[None] if positions is None else positions.token
    start = 0 if positions is None else positions.start[:, None, :, None]
    # Blocks of the future show nothing. As pairs they could lie behind the last bin, which is to say outside of memory.
    valid = (block_indices >= 0) & (start + block_indices * size <= token[:, None, :, None])
    if positions is None or positions.aligned:
        num_bins = blocks
        bins, first = block_indices, block_indices * size
        causal = _causal
    else:
        num_bins = 2 * blocks
        bins, first = _bins(block_indices, positions, size)
        causal = _causal_in_document

    copies = _balance(torch.where(valid, bins, num_bins), num_bins, capacity=size * num_selected)
    first = stored(first.flatten(-2).gather(-1, copies.first_pair))
    tokens = first[..., None] + torch.arange(size, dtype=torch.int32, device=first.device)
    block_mask = BlockMask(
        seq_lengths=(num_queries * rows, first.shape[-1] * size),
        kv_num_blocks=valid.sum(-1, dtype=torch.int32),
        kv_indices=copies.of_pair,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=copies.num_queries,
        q_indices=copies.queries,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(rows, size),
        mask_mod=causal(first, positions, size, rows),
    )
    return SelectedMask(block_mask, tokens.flatten(-2).clamp(0, num_keys - 1))


def _bins(block_indices: Tensor, positions: Positions, size: int) -> tuple[Tensor, Tensor]:
    """Give the bin of each selected block, ``(B, Hkv, T, n)``, and the first token that the bin gathers."""
    token, start = positions.token[:, None, :, None], positions.start[:, None, :, None]
    block_start = start + block_indices * size
    # Keys after the query's own are masked anyway, so a block need only reach as far as the query.
    block_end = torch.minimum(block_start + size - 1, token)
    run = block_start // size
    crossing = block_end // size != run
    return 2 * run + crossing.int(), torch.where(crossing, block_start, run * size)


def _balance(bins: Tensor, num_bins: int, capacity: int) -> _Copies:
    """Split every bin into copies of at most ``capacity`` queries, in the order of the queries.

    Args:
        bins: int32 ``(B, Hkv, T, n)`` in ``[0, num_bins]``; ``num_bins`` marks a pair that selects nothing.
        num_bins: ``bins`` bins need at most ``num_bins + T * n // capacity`` copies.
        capacity: the longest list of queries that any copy gets.
    """
    num_selected = bins.shape[-1]
    pairs = bins.flatten(-2)
    num_pairs = pairs.shape[-1]
    num_copies = num_bins + num_pairs // capacity
    num_copies = -(-num_copies // 8) * 8  # makes a multiple of 128 keys, which saves the kernels their bounds checks

    # One stable sort puts the pairs of a bin side by side, queries ascending.
    order = pairs.sort(dim=-1, stable=True).indices.int()
    bin_count = _count(pairs, num_bins + 1)[..., :num_bins]
    bin_start = bin_count.cumsum(-1, dtype=torch.int32) - bin_count
    bin_copies = (bin_count + capacity - 1) // capacity
    copy_start = bin_copies.cumsum(-1, dtype=torch.int32) - bin_copies

    # The bin of a copy is the last that starts at or before it.
    copy = torch.arange(num_copies, dtype=torch.int32, device=bins.device)
    bin_of_copy = _count(copy_start, num_copies).cumsum(-1) - 1
    used_before = (copy - copy_start.gather(-1, bin_of_copy)) * capacity
    num_queries = (bin_count.gather(-1, bin_of_copy) - used_before).clamp(0, capacity)
    offset = bin_start.gather(-1, bin_of_copy) + used_before
    members = offset[..., None] + torch.arange(capacity, dtype=torch.int32, device=bins.device)
    sorted_queries = order // num_selected
    queries = sorted_queries.gather(-1, members.flatten(-2).clamp_max(num_pairs - 1).long()).unflatten(
        -1, (num_copies, capacity)
    )
    first_pair = order.gather(-1, offset.clamp_max(num_pairs - 1).long()).long()

    index = torch.arange(num_pairs, dtype=torch.int32, device=bins.device).expand_as(order)
    index_in_order = torch.empty_like(order).scatter(-1, order.long(), index)
    bin_of_pair = pairs.clamp_max(num_bins - 1).long()
    rank = index_in_order - bin_start.gather(-1, bin_of_pair)
    of_pair = copy_start.gather(-1, bin_of_pair) + rank // capacity
    # Pairs that select nothing stand behind the last bin; keep them in range all the same.
    of_pair = of_pair.clamp(0, num_copies - 1).unflatten(-1, bins.shape[-2:])
    return _Copies(of_pair, first_pair, num_queries, queries)


def _count(values: Tensor, length: int) -> Tensor:
    """Count how often each of ``0 .. length - 1`` occurs along the last dimension."""
    zeros = torch.zeros(*values.shape[:-1], length, dtype=torch.int32, device=values.device)
    # Ones that are computed: Triton's interpreter does not spread a constant over the addresses of an atomic addition.
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
        # A run may hold several documents, and before the block the end of the one before it. At most one block of a
        # document begins in a run and was given its bin: that at the first boundary in or after the run's first token.
        block_start = document + (run - document + size - 1).clamp_min(0) // size * size
        return (block_start <= key) & (key <= query)

    return mask_mod
