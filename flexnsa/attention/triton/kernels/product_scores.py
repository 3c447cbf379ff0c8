# pyright: standard
"""Scores of blocks by products of index queries and index keys, see :mod:`flexnsa.attention.product_scores`.

A program has a tile of queries, for one choice of blocks, and goes through the keys of a few tiles of blocks.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, device_of, padded
from flexnsa.attention.tiles.scoring import product_tiles
from flexnsa.attention.triton.arguments import position_arguments
from flexnsa.attention.triton.kernels.importance import Scores
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import count_visible, load_positions, place_in_scores
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions, tensors_of


def product_scores(
    q: Tensor, k: Tensor, positions: Positions | None, scores: Scores, first_row: int, *, config: NSAConfig
) -> None:
    """Fill ``scores.own (B * choices, rows, width)`` for the queries ``first_row .. first_row + scores.num_rows``.

    Args:
        q: index queries ``(B, H, T, D)``, last dimension contiguous; each chooses blocks, or all choose together.
        k: index keys ``(B, 1, N, D)``, last dimension contiguous, same dtype.
        positions: of all queries; None for one whole sequence from token 0.
        scores: to fill; blocks without a visible key are not written.
        first_row: the first query of ``scores``.
        config: the sizes, with an ``index_score``.
    """
    (batch, heads, _, head_dim), num_keys, step = q.shape, k.shape[2], config.strides_per_block
    together = 1 if config.index_score == "max" else heads
    tiles = product_tiles(device_of(q), q.dtype, head_dim)
    keys_at_once = min(padded(step, 1), tiles.keys)
    blocks = tiles.keys // keys_at_once
    programs = batch * heads // together * cdiv(scores.num_rows, tiles.queries), cdiv(scores.width, blocks)
    # A program reads up to 32 tiles of keys, one after the other, if at least 1024 programs are left (H200).
    key_tiles = min(32, max(1, programs[0] * programs[1] // 1024))
    product_scores_kernel[(programs[0] * cdiv(programs[1], key_tiles),)](
        q, k, *position_arguments(q, *tensors_of(positions)), scores.own, *q.stride()[:3], k.stride(0), k.stride(2),
        first_row, scores.num_rows, num_keys, scores.width, key_tiles,
        CHOICES=heads // together, HEADS=together, ADDED=config.index_score == "relu", HEAD_DIM=head_dim,
        LENGTH=config.compress_block_size, STRIDE=config.compress_stride, STEP=step,
        HAS_POSITIONS=positions is not None, BT=tiles.queries, BJ=blocks, BW=keys_at_once, BD=padded(head_dim),
        **tiles.options(),
    )  # fmt: skip


@jit
def score_tile(
    q_ptrs, k_ptrs, q_stride_h, k_stride_n, first_block, document, visible, num_keys,
    HEADS: tl.constexpr, ADDED: tl.constexpr, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr,
    BJ: tl.constexpr, BW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the scores of ``BJ`` blocks; every row sees all of their keys unless ``MASKED``."""
    dim = tl.arange(0, q_ptrs.shape[1])[None, :]
    # With BW narrower than a block its keys come in pieces.
    lane = tl.arange(0, BJ * BW)
    scores = tl.zeros((BT, BJ), tl.float32)
    for head in range(HEADS):
        q = tl.load(q_ptrs + head * q_stride_h, mask=dim < HEAD_DIM, other=0.0)
        best = tl.full((BT, BJ), float("-inf"), tl.float32)
        for piece in range(0, STEP, BW):
            offset = piece + lane % BW
            key = (first_block + lane // BW) * STEP + offset
            inside = offset < STEP
            if MASKED:
                inside &= document + key < num_keys
            ptrs = k_ptrs + (document + key).to(tl.int64)[:, None] * k_stride_n
            k = tl.load(ptrs, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0)
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            if MASKED:
                product = tl.where(inside[None, :] & (key[None, :] < visible[:, None]), product, float("-inf"))
            elif STEP % BW:
                product = tl.where(inside[None, :], product, float("-inf"))
            best = tl.maximum(best, tl.max(tl.reshape(product, (BT, BJ, BW)), axis=2))
        scores = scores + tl.maximum(best, 0.0) if ADDED else best
    return scores


@jit(do_not_specialize=["first_row", "num_rows", "num_keys", "width", "key_tiles"])
def product_scores_kernel(
    q_ptr, k_ptr, token_ptr, start_ptr, first_key_ptr, position_stride_b, score_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_n, first_row, num_rows, num_keys, width,
    key_tiles,
    CHOICES: tl.constexpr, HEADS: tl.constexpr, ADDED: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr,
    STRIDE: tl.constexpr, STEP: tl.constexpr, HAS_POSITIONS: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr,
    BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Score blocks of ``STEP`` keys: by the best key of one head or, if ``ADDED``, the sum of positive ones of all."""
    row0, first_block, choice = place_in_scores(num_rows, width, BT, BJ * key_tiles)
    local_row = row0 + tl.arange(0, BT)
    batch = choice // CHOICES

    # Rows past the end repeat the last one, so that only the stores need a mask.
    row = first_row + tl.minimum(local_row, num_rows - 1)
    at = batch * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, first_row + num_rows, HAS_POSITIONS)
    visible = count_visible(token - start, LENGTH, STRIDE)
    num_tiles = tl.minimum(key_tiles, tl.cdiv(tl.max(visible) - first_block * STEP, BJ * STEP))

    dim = tl.arange(0, BD)[None, :]
    q_ptrs = q_ptr + batch * q_stride_b + choice % CHOICES * HEADS * q_stride_h
    q_ptrs += row.to(tl.int64)[:, None] * q_stride_t + dim
    k_ptrs = k_ptr + batch * k_stride_b + dim
    cell = (choice * num_rows + local_row[:, None]) * tl.multiple_of(width, 16)
    first_key = tl.load(first_key_ptr + at + row) if HAS_POSITIONS else row * 0
    document = tl.min(first_key)
    last_document = tl.max(first_key)
    # Block grids restart at each document, so loop over the documents of the query tile, usually one.
    while document <= last_document:
        visible_here = tl.where(first_key == document, visible, 0)
        num_whole = tl.maximum(tl.min(visible_here) - first_block * STEP, 0) // (BJ * STEP)
        for masked in tl.static_range(2):
            first = num_whole if masked else 0
            last = num_tiles if masked else tl.minimum(num_whole, num_tiles)
            for tile in range(first, last):
                first_of_tile = first_block + tile * BJ
                scores = score_tile(
                    q_ptrs, k_ptrs, q_stride_h, k_stride_n, first_of_tile, document, visible_here, num_keys,
                    HEADS, ADDED, HEAD_DIM, STEP, BT, BJ, BW, masked,
                )  # fmt: skip
                block = first_of_tile + tl.arange(0, BJ)[None, :]
                seen = (block * STEP < visible_here[:, None]) & (block < width)
                tl.store(score_ptr + cell + block, scores, mask=seen & (local_row < num_rows)[:, None])
        document = tl.min(tl.where(first_key > document, first_key, 2147483647))
