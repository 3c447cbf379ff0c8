# pyright: standard, reportArgumentType=false
"""The gradients of keys and values from their float32 parts; see :mod:`flexnsa.attention.triton.gradient_parts`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.intervals import load_rows, store_rows
from flexnsa.attention.triton.typed import jit


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
