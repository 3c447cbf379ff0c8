"""Selected attention, forward: a program per key tile, which loops over the queries that selected it.

A program has one replica of a key tile (:mod:`flexnsa.attention.triton.selected_lists`). Its keys and values stay on
chip, and the rows of its queries, all heads of the group, stream past them. For each pair it stores a *partial output*,
that of the query over these keys only, with its log-sum-exp. A second kernel joins the ``n`` partial outputs of each
query. Memory traffic does not depend on the size of the group, and every product has enough rows for tensor cores.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, padded
from flexnsa.attention.tiles.selected import columns, of_group
from flexnsa.attention.triton.hopper import ROWS, SLOTS, runs_on_hopper
from flexnsa.attention.triton.kernels.selected_forward import combine, forward_parts
from flexnsa.attention.triton.operators import strides_of_groups
from flexnsa.attention.triton.selected_lists import Lists, Selection
from flexnsa.attention.triton.selected_sizes import SUM_ROWS, is_wide, max_replicas

PIECE, PIECE_ROWS = 64, 768
"""Queries of a program on Hopper. A small group has more queries: at least so many (query, head) rows.

A replica may have several programs, because they add nothing up. Instead of one for 512 queries that takes 9 to 20 %
less time at 8k, and 8 % at 64k (H100)."""
HOPPER_REGISTERS = {64: 128, 128: 168}
"""Limit of registers of a thread, by head dimension. With it four and three programs fit a multiprocessor, without it
three and two."""


class GatedBranches(NamedTuple):
    """The gated sum of the branches, and what is added to the selected one.

    Args:
        total: the sum ``(B, Hq, T, Dv)``, to be filled.
        gates: ``(B, Hq, T, branches)``: compressed, selected, window. In memory ``(branches, B, Hq, T)`` is contiguous.
        cmp: output of the compressed branch, in memory as that of the selected branch.
        win: likewise of the window, to be filled if it is computed together with the sum; None without one.
        win_lse: likewise, ``(B, Hq, T)``.
        k_win: keys of the window ``(B, Hkv, S, Dk)``.
        v_win: its values ``(B, Hkv, S, Dv)``.
    """

    total: Tensor
    gates: Tensor
    cmp: Tensor
    win: Tensor | None = None
    win_lse: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None


def forward_bytes(q: Tensor, k: Tensor, v: Tensor, n: int, chunk: int) -> int:
    """Return the bytes of partial outputs of one kv head for a chunk."""
    group = q.shape[1] // k.shape[1]
    return min(chunk, q.shape[2]) * n * group * (v.shape[-1] * q.element_size() + 4)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    lists: Lists,
    out: Tensor,
    lse: Tensor,
    gated: GatedBranches | None,
    *,
    scale: float,
    precision: str,
    tiles: Tiles,
    window: int | None,
) -> None:
    """Compute ``out (B, Hq, T, Dv)`` and the natural ``lse`` (float32, ``(B, Hq, T)``), chunk by chunk of queries.

    A ``window`` of so many keys is attended to in the kernel that adds up the branches.
    """
    (batch, q_heads, num_queries, dk), (kv_heads, num_keys), dv = q.shape, k.shape[1:3], v.shape[-1]
    group, n = q_heads // kv_heads, selection.block_indices.shape[-1]
    chunk = min(lists.chunk, num_queries)
    part_out = torch.empty(batch * kv_heads, chunk, n, group, dv, dtype=q.dtype, device=q.device)
    part_lse = torch.empty(batch * kv_heads, chunk, n, group, dtype=torch.float32, device=q.device)
    num_replicas = max_replicas(selection.num_key_tiles, chunk * n, lists.capacity)
    low, high = columns(dk, halve=False)
    shape: dict[str, object] = {"n": n, "G": group, "DV": dv, "SIZE": selection.block_size, "BDV": padded(dv)}
    has_positions, wide = selection.token is not None, is_wide(q, group, chunk)
    shape |= {"HAS_POSITIONS": has_positions}
    rows = (q, k, v)
    on_hopper = runs_on_hopper(*rows, block_size=selection.block_size, group=group, placed=has_positions, wide=wide)
    queries = (selection.block_indices, *selection.positions())
    total, gates, cmp, win, win_lse, k_win, v_win = gated or GatedBranches(out, lse, out)
    sums = cmp, out if win is None else win, gates, total, *strides_of_groups(total, kv_heads), gates.stride(-1)
    for index in range(lists.replicas.shape[2]):
        sizes = (kv_heads, num_queries, num_keys, lists.chunk, index)
        tensors = lists.order, lists.replicas, part_out, part_lse
        read = *strides_of_groups(q, kv_heads), *k.stride()[:3], *v.stride()[:3]
        tables = *lists.replicas.shape[2:5:2], scale * LOG2_E
        if on_hopper:
            from flexnsa.attention.triton.kernels.hopper.selected_forward import hopper_forward_parts

            registers = HOPPER_REGISTERS[64 if max(dk, dv) <= 64 else 128]
            piece = max(PIECE, PIECE_ROWS // group)
            pieces = cdiv(lists.capacity, piece)
            hopper_forward_parts[(num_replicas * pieces, batch * kv_heads)](
                q, k, v, *tensors, *read, *sizes, *tables,
                n=n, G=group, DK=dk, DV=dv, SIZE=selection.block_size, BM=ROWS, BN=ROWS,
                PIECE=piece, PIECES=pieces, num_warps=4, maxnreg=registers,
            )  # fmt: skip
        else:
            forward_parts[(num_replicas, batch * kv_heads)](
                q, k, v, *queries, *tensors, *read, *sizes, *tables,
                **shape, DK=dk, LOW=low, HIGH=high, BN=padded(selection.block_size), PRECISION=precision,
                WIDE=wide, **of_group(tiles, group), **tiles.options(),
            )  # fmt: skip
        if window is None:
            combine[(cdiv(chunk * group, SUM_ROWS), batch * kv_heads)](
                part_out, part_lse, *queries, out, lse, *strides_of_groups(out, kv_heads), *sums, *sizes,
                **shape, BR=SUM_ROWS, ALONE=gated is None, HAS_WINDOW=win is not None, num_warps=4,
            )  # fmt: skip
        else:
            from flexnsa.attention.triton.kernels.hopper.window_sums import hopper_combine

            strides = (x.stride()[:3] for x in (q, given(k_win), given(v_win), out, total))
            hopper_combine[(cdiv(min(chunk, num_queries - index * lists.chunk), ROWS) * group, batch * kv_heads)](
                part_out, part_lse, selection.block_indices, q, k_win, v_win, cmp, win, win_lse, out, lse, gates, total,
                *itertools.chain(*strides), gates.stride(-1), *sizes, scale * LOG2_E,
                n=n, G=group, DK=dk, DV=dv, SIZE=selection.block_size, WINDOW=window,
                SLOTS=SLOTS, BM=ROWS, BN=ROWS, num_warps=4,
            )  # fmt: skip
