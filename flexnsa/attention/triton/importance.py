"""Importance of selection blocks from compressed keys, summed over the group in registers (NSA paper, Eq. 8-10).

Compressed token ``j * l'/d + o`` shares ``own[o]`` strides with block ``j`` and, where ``l > d``, ``passed[o]`` strides
with block ``j + 1``. A program scores a tile of queries against the keys of a tile of blocks, each key once, and stores
both sums: ``importance[j] = own[j] + passed[j - 1]``. Scoring the overlapping keys again for the next block would cost
``1 + (l - d) / l'`` times the products and exponentials; the second sum costs only four more bytes to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, device_of, padded
from flexnsa.attention.tiles.scoring import HOPPER_IMPORTANCE, importance_tiles
from flexnsa.attention.triton.hopper import runs_on_hopper
from flexnsa.attention.triton.kernels.importance import importance_kernel
from flexnsa.attention.triton.operators import position_arguments
from flexnsa.config import NSAConfig
from flexnsa.geometry import overlap_band
from flexnsa.positions import Positions, tensors_of


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
        ratio = config.select_block_size // config.compress_stride
        if -first > ratio:
            return cls(first, weights, (0,) * len(weights))
        return cls(0, weights[-first:], (0,) * (ratio + first) + weights[:-first])


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
    scale: float,
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
        scale: factor on the attention scores.
        tiles: launch parameters; None chooses by device.
    """
    (batch, q_heads, _, head_dim), (kv_heads, num_keys), band = q.shape, k_cmp.shape[1:3], scores.band
    ratio = config.select_block_size // config.compress_stride
    strides = *q.stride()[:3], *k_cmp.stride()[:3], *lse.stride()[:2]
    sizes = first_row, scores.num_rows, num_keys, scores.width, scale * LOG2_E
    shape: dict[str, object] = {"KV_HEADS": kv_heads, "GROUP": q_heads // kv_heads, "HEAD_DIM": head_dim}
    shape |= {"LENGTH": config.compress_block_size, "STRIDE": config.compress_stride, "RATIO": ratio}
    shape |= {"OWN": band.own, "PASSED": band.passed, "HAS_PASSED": any(band.passed)}
    on_hopper = None if tiles else _hopper_tiles(q, k_cmp, band, ratio, placed=positions is not None)
    tiles = tiles or on_hopper or importance_tiles(device_of(q), q.dtype, head_dim, len(band.own))
    shape |= {"BLOCK_T": tiles.queries, "BLOCK_J": tiles.keys}
    grid = (batch * kv_heads * cdiv(scores.num_rows, tiles.queries) * cdiv(scores.width, tiles.keys),)
    if on_hopper:
        from flexnsa.attention.triton.kernels.hopper.importance import hopper_importance

        hopper_importance[grid](
            q, k_cmp, lse, scores.own, scores.passed, *strides, *sizes,
            **shape, PLACES=ratio // 2, **tiles.options(),
        )  # fmt: skip
        return
    importance_kernel[grid](
        q, k_cmp, lse, *position_arguments(q, *tensors_of(positions)), scores.own, scores.passed, *strides, *sizes,
        **shape, FIRST=band.first, NUM_OFFSETS=len(band.own), HAS_POSITIONS=positions is not None,
        BLOCK_D=padded(head_dim), **tiles.options(),
    )  # fmt: skip


def _hopper_tiles(q: Tensor, k_cmp: Tensor, band: Band, ratio: int, *, placed: bool) -> Tiles | None:
    """Return the tiles of the kernel for Hopper, if it runs: where no key counts for an earlier block than its own."""
    if (band.first, len(band.own)) != (0, ratio) or not runs_on_hopper(q, k_cmp, placed=placed):
        return None
    return HOPPER_IMPORTANCE.get((q.shape[-1], ratio))
