"""Selected attention, backward: forward once more, on the same lists, with transposed tiles.

``S^T = K Q^T`` and ``dP^T = V dO^T``, so that the products for dk and dv read them from registers. A replica stores dq
for each of its pairs, and a second kernel sums it over the ``n`` slots. It adds dk and dv to float32 sums directly if
its key tile has no other replica; otherwise it stores them, and a third kernel adds the replicas in a fixed order.
Chunks run one after the other. So every sum has a fixed order, and no addition is atomic.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, padded
from flexnsa.attention.tiles.intervals import hopper_tiles
from flexnsa.attention.tiles.selected import columns, of_group
from flexnsa.attention.triton.gradient_parts import sum_parts
from flexnsa.attention.triton.hopper import ROWS, SLOTS, runs_on_hopper
from flexnsa.attention.triton.kernels.selected_backward import backward_parts
from flexnsa.attention.triton.kernels.selected_sums import sum_shared, sum_slots
from flexnsa.attention.triton.operators import strides_of_groups
from flexnsa.attention.triton.selected_lists import Lists, Selection
from flexnsa.attention.triton.selected_sizes import SUM_ROWS, is_wide, max_replicas, max_shared

SHARED_ROWS = 8
"""Keys of a program that sums replicas: many programs, because each waits for memory."""


class OtherGradients(NamedTuple):
    """The gradients of q from the other branches, ``(B, Hq, T, Dk)``; None without a window."""

    cmp: Tensor
    win: Tensor | None = None


class WindowQueries(NamedTuple):
    """The gradient of q from the compressed branch, and keys, values and stats of the window.

    The window's gradient of q is computed in the kernel that adds all of them up.
    """

    cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    stats: Tensor


def backward_bytes(q: Tensor, k: Tensor, v: Tensor, n: int, chunk: int, capacity: int, block_size: int) -> int:
    """Return the bytes that one kv head needs: partial dq of a chunk, shared replicas, and sums of dk and dv."""
    pairs = min(chunk, q.shape[2]) * n
    dk, dv, group = k.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
    keys = k.shape[2] + max_shared(pairs, capacity) * block_size
    return pairs * group * dk * q.element_size() + keys * (dk + dv) * 4


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    lists: Lists,
    stats: Tensor,
    grad_out: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *,
    scale: float,
    precision: str,
    tiles: Tiles,
    others: OtherGradients | WindowQueries | None,
    window: int,
) -> None:
    """Compute the gradients of q, k and v; to that of q, add those from the ``others``."""
    (batch, q_heads, num_queries, d_k), (kv_heads, num_keys), d_v = q.shape, k.shape[1:3], v.shape[-1]
    group, n, size = q_heads // kv_heads, selection.block_indices.shape[-1], selection.block_size
    chunk = min(lists.chunk, num_queries)
    new = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    heads = batch * kv_heads
    rows = heads * num_keys
    dk, dv = torch.split(new(rows * (d_k + d_v)).zero_(), [rows * d_k, rows * d_v])
    num_shared = max_shared(chunk * n, lists.capacity)
    dk_shared, dv_shared = (new(heads, num_shared, size, d) for d in (d_k, d_v))
    part = torch.empty(heads, chunk, n, group, d_k, dtype=q.dtype, device=q.device)

    num_replicas = max_replicas(selection.num_key_tiles, chunk * n, lists.capacity)
    low, high = columns(d_k, halve=True)
    has_positions = selection.token is not None
    shape: dict[str, object] = {"n": n, "G": group, "DK": d_k, "SIZE": size, "HAS_POSITIONS": has_positions}
    parities = (0, 1) if has_positions else (0,)
    wide = is_wide(q, group, chunk) or is_wide(grad_out, group, chunk)
    on_hopper = runs_on_hopper(q, k, v, grad_out, block_size=size, group=group, placed=has_positions, wide=wide)
    queries = (selection.block_indices, *selection.positions())
    for index in range(lists.replicas.shape[2]):
        sizes = (kv_heads, num_queries, num_keys, lists.chunk, index)
        tables = (*lists.replicas.shape[2:5:2], num_shared)
        sums = (dk, dv, dk_shared, dv_shared)
        read = *strides_of_groups(q, kv_heads), *k.stride()[:3], *v.stride()[:3], *strides_of_groups(grad_out, kv_heads)
        tensors = (lists.order, lists.replicas, part, *sums, *read, *sizes, *tables)
        if on_hopper:
            from flexnsa.attention.triton.kernels.hopper.selected_backward import hopper_backward_parts

            hopper_backward_parts[(num_replicas, heads)](
                q, k, v, grad_out, stats, *tensors, scale, scale * LOG2_E,
                n=n, G=group, DK=d_k, DV=d_v, SIZE=size, BM=ROWS, BN=ROWS, DQ=64, num_warps=4,
            )  # fmt: skip
        else:
            for parity in parities:
                backward_parts[(num_replicas, heads)](
                    q, k, v, grad_out, stats, *queries, *tensors, parity, scale, scale * LOG2_E,
                    **shape, DV=d_v, LOW=low, HIGH=high, BDV=padded(d_v), BN=padded(size), PRECISION=precision,
                    WIDE=wide, **of_group(tiles, group), **tiles.options(),
                )  # fmt: skip
        for parity in parities:
            sum_shared[(num_replicas * (padded(size) // SHARED_ROWS), heads)](
                *queries, lists.order, lists.replicas, *sums, *sizes, *tables, parity,
                n=n, DK=d_k, DV=d_v, SIZE=size, HAS_POSITIONS=has_positions, BN=padded(size),
                BDK=padded(d_k), BDV=padded(d_v), ROWS=SHARED_ROWS, num_warps=4,
            )  # fmt: skip
        if isinstance(others, WindowQueries):
            from flexnsa.attention.triton.kernels.hopper.window_sums import hopper_sum_slots

            in_chunk = min(chunk, num_queries - index * lists.chunk)
            of_queries, _ = hopper_tiles(d_k, d_v, windowed=True)
            _, *of_window = others
            strides = q, others.k_win, others.v_win
            hopper_sum_slots[(cdiv(in_chunk, of_queries.queries) * group, heads)](
                part, selection.block_indices, q, *of_window, grad_out, others.cmp, grad_q,
                *itertools.chain(*(x.stride()[:3] for x in strides)), others.stats.stride(-1), *grad_out.stride()[:3],
                *grad_q.stride()[:3], *sizes, scale,
                n=n, G=group, DK=d_k, DV=d_v, SIZE=size, WINDOW=window, SLOTS=SLOTS,
                BM=of_queries.queries, BN=of_queries.keys, **of_queries.options("BUFFERS"),
            )  # fmt: skip
        else:
            cmp, win = others or (grad_q, None)
            added = cmp, grad_q if win is None else win
            sum_slots[(cdiv(chunk * group, SUM_ROWS), heads)](
                part, *queries, *added, grad_q, *strides_of_groups(grad_q, kv_heads), *sizes, **shape,
                BDK=padded(d_k), BR=SUM_ROWS, ALONE=others is None, HAS_WINDOW=win is not None, num_warps=4,
            )  # fmt: skip
    sum_parts((dk.view(k.shape), dv.view(v.shape)), grad_k, grad_v, scale=scale)
