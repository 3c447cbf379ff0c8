"""The gated sum of the branches, with one backward pass for all.

A branch on its own gets the gradient of its output, which is that of the sum times its gate: three scaled copies to
write and to read. Here all branches read the gradient of the sum, and the gates go into their probabilities.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Compressed, GatedSum, Keys, given
from flexnsa.attention.operators import empty_outputs, with_rows
from flexnsa.attention.triton.gated_backward import gradients
from flexnsa.attention.triton.hopper import joins_window
from flexnsa.attention.triton.intervals import attend_to_intervals, is_preferred
from flexnsa.attention.triton.operators import check_call, with_positive_scale
from flexnsa.attention.triton.selected import attend_to_blocks, empty_selected, selection_of, sizes_of
from flexnsa.operators import opaque_operator

JOINED_DIM = 64
"""Largest heads for which one kernel attends to the window and joins partial outputs: with heads of 128 that took 3 to
8 % longer than two (H100)."""


def gated_sum(q: Tensor, keys: Keys, call: Call) -> GatedSum | None:
    """Return what computes the sum, or None where FlexAttention is faster for one of the branches."""
    return _attend if is_preferred(q, given(keys.k_cmp), given(keys.v_cmp), call) else None


def _attend(
    q: Tensor,
    keys: Keys,
    gates: Tensor,
    block_indices: Tensor,
    compressed: Compressed,
    call: Call,
    by_token: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to selected blocks and, if it has keys, to the window, and add up the branches (NSA paper, Eq. 5).

    Args:
        q: float32, bfloat16 or float16 ``(B, Hq, T, Dk)`` on a CUDA device.
        keys: of the branches; None for the window where there is none.
        gates: ``(branches, B, Hq, T)``, of the compressed, the selected and the window branch; none is negative.
        block_indices: int32 ``(B, Hkv, T, n)``.
        compressed: output of that branch, computed without gradients.
        call: see :class:`flexnsa.attention.interface.Call`.
        by_token: whether the heads of a token are to lie side by side in memory.

    Returns:
        The sum ``(B, Hq, T, Dv)``, in the memory order of q unless ``by_token``; and the outputs of the selected branch
        and the window, which have no gradients of their own. Without a window its output is empty.

    Raises:
        ValueError: there is a score_mod, or the batch has too many heads in all.
    """
    check_call(call, "q", q)
    config, k_slc, v_slc = call.config, given(keys.k_slc), given(keys.v_slc)
    sizes = sizes_of(q, k_slc, v_slc, block_indices, config)
    q, scale = with_positive_scale(q, call.scale)
    where, windows = call.positions, call.window_positions
    out, out_slc, _, out_win, _, _, _ = _gated_attention(
        q,
        given(keys.k_cmp),
        given(keys.v_cmp),
        k_slc,
        v_slc,
        keys.k_win,
        keys.v_win,
        gates,
        compressed.out,
        given(compressed.lse),
        block_indices,
        *((None, None, None) if where is None else where.tensors),
        *((None, None) if windows is None else (windows.token, windows.start)),
        scale,
        operator.index(config.compress_block_size),
        operator.index(config.compress_stride),
        operator.index(config.window_size),
        *sizes,
        by_token,
    )
    return out, out_slc, out_win


@opaque_operator("gated_attention_triton", launches_kernels=True)
def _gated_attention(
    q: Tensor,
    k_cmp: Tensor,  # noqa: ARG001
    v_cmp: Tensor,  # noqa: ARG001
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    out_cmp: Tensor,
    lse_cmp: Tensor,  # noqa: ARG001
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    first_key: Tensor | None,  # noqa: ARG001
    window_token: Tensor | None,
    window_start: Tensor | None,
    scale: float,
    length: int,  # noqa: ARG001
    stride: int,  # noqa: ARG001
    window: int,
    block_size: int,
    chunk: int,
    capacity: int,
    by_token: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, out and lse of the selected branch and of the window, and both tensors of the lists."""
    from flexnsa.attention.triton.selected_forward import GatedBranches

    q, k_slc, v_slc = with_rows(q), with_rows(k_slc), with_rows(v_slc)
    selection = selection_of(block_indices, token, start, block_size, k_slc.shape[2])
    out_slc, lse_slc = empty_outputs(q, v_slc.shape[-1])
    total = _empty_sum(out_slc, by_token)
    out_cmp = out_cmp if out_cmp.stride() == out_slc.stride() else torch.empty_like(out_slc).copy_(out_cmp)
    gated = GatedBranches(total, gates.contiguous().permute(1, 2, 3, 0), out_cmp)
    joined = False
    if k_win is None or v_win is None:
        out_win, lse_win = _empty_window(q, None)
    else:
        k_win, v_win = with_rows(k_win), with_rows(v_win)
        read = q, k_slc, v_slc, k_win, v_win, out_slc
        placed = token is not None or window_token is not None
        joined = max(q.shape[-1], v_win.shape[-1]) <= JOINED_DIM
        joined = joined and joins_window(*read, block_size=block_size, chunk=chunk, placed=placed)
        if joined:
            out_win, lse_win = _empty_window(q, v_win)
        else:
            where = window_token, window_start, window_start
            out_win, lse_win = attend_to_intervals(q, k_win, v_win, *where, scale, 1, 1, window)
        gated = gated._replace(win=out_win, win_lse=lse_win, k_win=k_win, v_win=v_win)
    lists = attend_to_blocks(
        q, k_slc, v_slc, selection, out_slc, lse_slc, gated,
        scale=scale, chunk=chunk, capacity=capacity, window=window if joined else None,
    )  # fmt: skip
    return total, out_slc, lse_slc, out_win, lse_win, lists.order, lists.replicas


def _empty_window(q: Tensor, v_win: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of the window; empty ones without values."""
    return (q.new_empty(0), q.new_empty(0, dtype=torch.float32)) if v_win is None else empty_outputs(q, v_win.shape[-1])


def _empty_sum(out: Tensor, by_token: bool) -> Tensor:
    """Allocate the gated sum of outputs like ``out``."""
    if by_token:
        return out.new_empty(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)
    return torch.empty_like(out)


@_gated_attention.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,  # noqa: ARG001
    v_cmp: Tensor,  # noqa: ARG001
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,  # noqa: ARG001
    v_win: Tensor | None,
    gates: Tensor,  # noqa: ARG001
    out_cmp: Tensor,  # noqa: ARG001
    lse_cmp: Tensor,  # noqa: ARG001
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    *others: *tuple[*tuple[object, ...], int, int, int, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, block_size, chunk, capacity, by_token = others
    sizes = block_size, chunk, capacity
    out, lse, order, replicas = empty_selected(q, k_slc, v_slc, block_indices, token, start, 1.0, *sizes)
    return _empty_sum(out, by_token), out, lse, *_empty_window(q, v_win), order, replicas


_gated_attention.register_backward(gradients, differentiable=1)
