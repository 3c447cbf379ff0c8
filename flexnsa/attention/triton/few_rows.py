"""Several linear projections of a few rows in one kernel: in decoding, the cost is reading the weights once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.arguments import precision, require_device
from flexnsa.operators.opaque import opaque_operator

MOST_ROWS = 64
"""Rows per program. With more rows the weights are read again."""


@opaque_operator("few_rows_triton")
def multiply_few_rows(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply ``x (M, K)`` by up to 8 weights ``(out_features, K)``, concatenated to ``(M, sum of out_features)``.

    All tensors have one dtype and are contiguous.
    """
    from flexnsa.attention.triton.kernels.few_rows import few_rows

    require_device(x)
    out = _empty_product(x, weights)
    (rows, dim), total = x.shape, out.shape[1]
    sizes = [weight.shape[0] for weight in weights]
    block = min(padded(rows), MOST_ROWS)
    width = 32 if block == 16 else 16  # columns per program: few, to have programs for every multiprocessor
    tiles = [cdiv(size, width) for size in sizes]
    missing = 8 - len(sizes)  # of the kernel's pointers
    firsts = (*itertools.accumulate(tiles[:-1], initial=0), *[sum(tiles)] * missing)
    columns = (*itertools.accumulate(sizes[:-1], initial=0), *[0] * missing)
    few_rows[(sum(tiles), cdiv(rows, block))](
        x, out, *weights, *[weights[0]] * missing, rows, total,
        FIRST=firsts, SIZE=(*sizes, *[0] * missing), COLUMN=columns, K=dim,
        BM=block, BN=width, BK=64 if x.dtype == torch.float32 else min(256, padded(dim)), PRECISION=precision(),
        num_warps=4, num_stages=4 if block < MOST_ROWS else 3,
    )  # fmt: skip
    return out


@multiply_few_rows.register_fake
def _empty_product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
