# pyright: standard, reportArgumentType=false
"""The last step of the gradients of keys and values, from float32 sums to their dtype: one launch for both."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels.intervals import load_rows, store_rows
from flexnsa.attention.triton.kernels.typed import jit

KEYS = 8
"""Keys of a program: few, as short sequences of many parts need many programs."""


def add_parts(parts: Sequence[Tensor], dk: Tensor, dv: Tensor, *, scale: float = 1.0) -> None:
    """Sum the parts of each key head in a fixed order into ``dk``, times ``scale``, and ``dv``.

    Args:
        parts: of keys and of values, float32 ``(B, Hkv * parts, S, D)``, contiguous.
        dk: ``(B, Hkv, S, Dk)``, with contiguous rows.
        dv: ``(B, Hkv, S, Dv)``, likewise.
        scale: factor of the gradients of keys.
    """
    (batch, heads, num_keys, d_k), d_v = dk.shape, dv.shape[-1]
    sum_parts[(cdiv(num_keys, KEYS), batch * heads)](
        *parts, dk, dv, *dk.stride()[:3], *dv.stride()[:3], heads, num_keys, scale,
        PARTS=parts[0].shape[1] // heads, DK=d_k, DV=d_v, BDK=padded(d_k), BDV=padded(d_v), BN=KEYS, num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "num_keys"])
def sum_parts(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, gk_sb, gk_sh, gk_st, gv_sb, gv_sh, gv_st, num_heads, num_keys, scale,
    PARTS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a tile of keys and values, one after the other."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    real = key < num_keys
    dk = tl.zeros([BN, BDK], tl.float32)
    dv = tl.zeros([BN, BDV], tl.float32)
    for part in tl.static_range(PARTS):
        first = (bh * PARTS + part) * num_keys
        dk += load_rows(dk_part_ptr + first * DK, key, DK, real, DK, BDK)
        dv += load_rows(dv_part_ptr + first * DV, key, DV, real, DV, BDV)
    store_rows(dk_ptr + b * gk_sb + h * gk_sh, key, gk_st, real, dk * scale, DK, BDK)
    store_rows(dv_ptr + b * gv_sb + h * gv_sh, key, gv_st, real, dv, DV, BDV)
