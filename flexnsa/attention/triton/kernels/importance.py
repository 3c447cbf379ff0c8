# pyright: standard
"""Importance of selection blocks from compressed keys, summed over the group in registers (NSA paper, Eq. 8-10).

Compressed token ``j * l'/d + o`` shares ``own[o]`` strides with block ``j`` and, where ``l > d``, ``passed[o]`` strides
with block ``j + 1``. A program scores a tile of queries against the keys of a tile of blocks, each key once, and stores
both sums: ``importance[j] = own[j] + passed[j - 1]``. Scoring the overlapping keys again for the next block would cost
``1 + (l - d) / l'`` times the products and exponentials; the second sum costs only four more bytes to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton.language as tl
from torch import Tensor

from flexnsa.attention.plan import Plan, can_copy
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, device_of, padded
from flexnsa.attention.tiles.scoring import HOPPER_IMPORTANCE, importance_tiles
from flexnsa.attention.triton.arguments import Factors, position_arguments
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, load_positions, place_in_scores
from flexnsa.config import NSAConfig, overlap_band
from flexnsa.masks.positions import Positions, tensors_of


@dataclass(frozen=True, slots=True)
class Band:
    """Weights of compressed tokens: key ``j * l'/d + first + o`` counts ``own[o]`` for block ``j``.

    It counts ``passed[o]`` for block ``j + 1``. If keys overlap more than two blocks (``l > l' + d``), ``passed`` is
    all zero, ``own`` is the whole band, and ``first`` its negative start.
    """

    first: int
    own: tuple[int, ...]
    passed: tuple[int, ...]

    @classmethod
    @cache
    def of(cls, config: NSAConfig) -> Band:
        """Split the overlap band of ``config``."""
        first, weights = overlap_band(config)
        ratio = config.strides_per_block
        if -first > ratio:
            return cls(first, weights, (0,) * len(weights))
        return cls(0, weights[-first:], (0,) * (ratio + first) + weights[:-first])

    def constants(self, config: NSAConfig) -> dict[str, object]:
        """Return sizes and weights as constants of a kernel."""
        weights: dict[str, object] = {"OWN": self.own, "PASSED": self.passed, "HAS_PASSED": any(self.passed)}
        sizes = {"LENGTH": config.compress_block_size, "STRIDE": config.compress_stride}
        return weights | sizes | {"RATIO": config.strides_per_block}


@dataclass(frozen=True, slots=True)
class Scores:
    """Importance of ``width`` blocks for ``num_rows`` queries; ``own`` and ``passed`` are ``(B * Hkv, rows, width)``.

    ``importance[j] = own[j] + passed[j - 1]``; entries of blocks without a visible key are not written. ``width`` is a
    multiple of 16, so that rows are aligned.
    """

    own: Tensor
    passed: Tensor
    num_rows: int
    width: int
    band: Band


def importance(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    positions: Positions | None,
    scores: Scores,
    first_row: int,
    *,
    config: NSAConfig,
    factors: Factors,
    tiles: Tiles | None = None,
) -> None:
    """Fill ``scores`` with the importance of blocks for the queries ``first_row .. first_row + scores.num_rows``.

    Args:
        q: queries ``(B, Hq, T, D)``, last dimension contiguous.
        k_cmp: compressed keys ``(B, Hkv, N, D)``, last dimension contiguous, same dtype.
        lse: natural log-sum-exp of the compressed branch, float32 ``(B, Hq, T)``, contiguous.
        positions: of all queries; None for one whole sequence from token 0.
        scores: to fill.
        first_row: the first query of ``scores``.
        config: the sizes.
        factors: of :func:`flexnsa.attention.triton.arguments.factors_of`.
        tiles: launch parameters; None chooses by device.
    """
    (batch, q_heads, _, head_dim), (kv_heads, num_keys), band = q.shape, k_cmp.shape[1:3], scores.band
    ratio, (scale, inner) = config.strides_per_block, factors
    strides = *q.stride()[:3], *k_cmp.stride()[:3], *lse.stride()[:2]
    sizes = first_row, scores.num_rows, num_keys, scores.width, scale * LOG2_E
    shape: dict[str, object] = {"KV_HEADS": kv_heads, "GROUP": q_heads // kv_heads, "HEAD_DIM": head_dim}
    shape |= band.constants(config)
    # On Hopper no key may count for an earlier block than its own
    suits = not tiles and positions is None and (band.first, len(band.own)) == (0, ratio) and can_copy(q, k_cmp)
    in_gluon = HOPPER_IMPORTANCE.get((head_dim, ratio)) if suits and Plan.of(q, k_cmp).in_gluon else None
    tiles = tiles or in_gluon or importance_tiles(device_of(q), q.dtype, head_dim, len(band.own))
    shape |= {"BLOCK_T": tiles.queries, "BLOCK_J": tiles.keys}
    grid = (batch * kv_heads * cdiv(scores.num_rows, tiles.queries) * cdiv(scores.width, tiles.keys),)
    if in_gluon:
        from flexnsa.attention.triton.kernels.hopper.importance import hopper_importance

        hopper_importance[grid](
            q, k_cmp, lse, scores.own, scores.passed, *strides, *sizes,
            **shape, PLACES=ratio // 2, INNER=inner, **tiles.options(),
        )  # fmt: skip
        return
    importance_kernel[grid](
        q, k_cmp, lse, *position_arguments(q, *tensors_of(positions)), scores.own, scores.passed, *strides, *sizes,
        **shape, FIRST=band.first, NUM_OFFSETS=len(band.own), HAS_POSITIONS=positions is not None,
        BLOCK_D=padded(head_dim), INNER=inner, **tiles.options(),
    )  # fmt: skip


@jit
def add_heads(
    own, passed, keys, key, visible, num_heads, q_ptrs, lse_ptrs, q_stride_h, lse_stride_h, scale_log2,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, NUM_OFFSETS: tl.constexpr, OWN: tl.constexpr,
    PASSED: tl.constexpr, INNER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the probabilities that the first ``num_heads`` heads of the group give to the keys."""
    dim = tl.arange(0, keys[0].shape[1])[None, :]
    for _ in range(num_heads):
        q = tl.load(q_ptrs, mask=dim < HEAD_DIM, other=0.0)
        lse_log2 = tl.load(lse_ptrs) * 1.4426950408889634
        for o in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
            score = capped(tl.dot(q, tl.trans(keys[o]), input_precision="ieee"), INNER, q.dtype)
            p = tl.exp2(tl.fma(score, scale_log2, -lse_log2[:, None]))
            if MASKED:
                shown = key[None, :] + o < visible[:, None]
                if FIRST < 0:
                    shown &= key[None, :] + o >= 0
                p = tl.where(shown, p, 0.0)
            # Explicit fma: with and without masks must round equally, or equal scores would not tie.
            own = tl.fma(p, tl.full(p.shape, OWN[o], tl.float32), own)
            if PASSED[o] > 0:
                passed = tl.fma(p, tl.full(p.shape, PASSED[o], tl.float32), passed)
        q_ptrs += q_stride_h
        lse_ptrs += lse_stride_h
    return own, passed


@jit(do_not_specialize=["first_row", "num_rows", "num_keys", "width"])
def importance_kernel(
    q_ptr, k_ptr, lse_ptr, token_ptr, start_ptr, cmp_start_ptr, position_stride_b, own_ptr, passed_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, lse_stride_b, lse_stride_h,
    first_row, num_rows, num_keys, width, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    RATIO: tl.constexpr, FIRST: tl.constexpr, NUM_OFFSETS: tl.constexpr, OWN: tl.constexpr, PASSED: tl.constexpr,
    HAS_PASSED: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Score one tile of queries against one tile of blocks of one kv head."""
    row0, first_block, batch_head = place_in_scores(num_rows, width, BLOCK_T, BLOCK_J)
    batch = batch_head // KV_HEADS
    kv_head = batch_head % KV_HEADS

    # Rows past the end repeat the last one, so that only the stores need a mask.
    local_row = row0 + tl.arange(0, BLOCK_T)
    row = first_row + tl.minimum(local_row, num_rows - 1)
    at = batch * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, first_row + num_rows, HAS_POSITIONS)
    visible = count_visible(token - start, LENGTH, STRIDE)
    key = (first_block + tl.arange(0, BLOCK_J)) * RATIO + FIRST
    if first_block * RATIO + FIRST >= tl.max(visible):
        return

    dim = tl.arange(0, BLOCK_D)[None, :]
    q_base = q_ptr + batch * q_stride_b + kv_head * GROUP * q_stride_h
    q_ptrs = q_base + row.to(tl.int64)[:, None] * q_stride_t + dim
    lse_ptrs = lse_ptr + batch * lse_stride_b + kv_head * GROUP * lse_stride_h + row
    k_ptrs = k_ptr + batch * k_stride_b + kv_head * k_stride_h + dim

    own = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
    passed = tl.zeros((BLOCK_T, BLOCK_J), tl.float32)
    cmp_start = tl.load(cmp_start_ptr + at + row) if HAS_POSITIONS else row * 0
    document = tl.min(cmp_start)
    last_document = tl.max(cmp_start)
    # Block grids restart at each document, so loop over the documents of the query tile, usually one.
    while document <= last_document:
        keys = ()
        for o in tl.static_range(NUM_OFFSETS):
            index = document + key + o
            inside = (key + o >= 0) & (index < num_keys)
            ptrs = k_ptrs + index.to(tl.int64)[:, None] * k_stride_n
            keys += (tl.load(ptrs, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0),)
        visible_here = tl.where(cmp_start == document, visible, 0)
        whole = (first_block * RATIO + FIRST >= 0) & (tl.min(visible_here) >= (first_block + BLOCK_J) * RATIO)
        num_whole = tl.where(whole, GROUP, 0)
        # One of the two loops runs. The masked one comes first; otherwise masks hold registers in the unmasked one.
        own, passed = add_heads(
            own, passed, keys, key, visible_here, GROUP - num_whole, q_ptrs, lse_ptrs, q_stride_h, lse_stride_h,
            scale_log2, HEAD_DIM, FIRST, NUM_OFFSETS, OWN, PASSED, INNER, True,
        )  # fmt: skip
        own, passed = add_heads(
            own, passed, keys, key, visible_here, num_whole, q_ptrs, lse_ptrs, q_stride_h, lse_stride_h,
            scale_log2, HEAD_DIM, FIRST, NUM_OFFSETS, OWN, PASSED, INNER, False,
        )  # fmt: skip
        document = tl.min(tl.where(cmp_start > document, cmp_start, 2147483647))

    block = first_block + tl.arange(0, BLOCK_J)[None, :]
    cell = (batch_head * num_rows + local_row[:, None]) * tl.multiple_of(width, 16) + block
    stored = (local_row[:, None] < num_rows) & (block < width)
    tl.store(own_ptr + cell, own, mask=stored)
    if HAS_PASSED:
        tl.store(passed_ptr + cell, passed, mask=stored)
