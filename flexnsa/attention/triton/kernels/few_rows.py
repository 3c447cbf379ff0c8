# pyright: standard
"""A product of a few rows with several weights, which are read in place."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit


@jit(do_not_specialize=["num_rows"])
def few_rows(
    x_ptr, out_ptr, w0, w1, w2, w3, w4, w5, w6, w7, num_rows, total,
    FIRST: tl.constexpr, SIZE: tl.constexpr, COLUMN: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by a tile of columns of one weight ``(out_features, K)``.

    Weight ``i`` has the programs from ``FIRST[i]`` on, and ``SIZE[i]`` columns of the product, from ``COLUMN[i]`` on.
    """
    tile = tl.program_id(0)
    w_ptr, first, size, column = w0, 0, SIZE[0], COLUMN[0]
    others = (w1, w2, w3, w4, w5, w6, w7)
    for i in tl.static_range(1, 8):  # pyright: ignore[reportGeneralTypeIssues]
        if tile >= FIRST[i]:
            w_ptr, first, size, column = others[i - 1], FIRST[i], SIZE[i], COLUMN[i]
    n = (tile - first) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, K, BK):
        inside = (k0 + k < K)[None, :]
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * K + k0 + k[None, :], mask=(m < num_rows)[:, None] & inside, other=0.0
        )
        w = tl.load(w_ptr + n[:, None].to(tl.int64) * K + k0 + k[None, :], mask=(n < size)[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    at = m[:, None].to(tl.int64) * total + column + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < size)[None, :])
