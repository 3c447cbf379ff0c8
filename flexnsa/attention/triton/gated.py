"""The gated sum of the branches, with one backward pass for all.

A branch on its own gets the gradient of its output, which is that of the sum times its gate: three scaled copies to
write and to read. Here all branches read the gradient of the sum, and the gates go into their probabilities.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Compressed, GatedSum, Keys, given
from flexnsa.attention.operators import empty_gradients, empty_outputs, with_rows
from flexnsa.attention.triton.hopper import joins_window
from flexnsa.attention.triton.intervals import (
    IntervalInputs,
    attend_to_intervals,
    gradient_of_queries,
    gradients_of_keys,
    is_preferred,
)
from flexnsa.attention.triton.operators import check_call, with_positive_scale
from flexnsa.attention.triton.selected import (
    attend_to_blocks,
    empty_selected,
    selected_gradients,
    selection_of,
    sizes_of,
)
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
    from flexnsa.attention.triton.kernels.selected_fwd import GatedBranches

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


def gradients(
    grad_out: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    out_cmp: Tensor,
    lse_cmp: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    first_key: Tensor | None,
    window_token: Tensor | None,
    window_start: Tensor | None,
    out: Tensor,  # noqa: ARG001
    out_slc: Tensor,
    lse_slc: Tensor,
    out_win: Tensor,
    lse_win: Tensor,
    order: Tensor,
    replicas: Tensor,
    scale: float,
    *numbers: *tuple[int, int, int, int, int, int, bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, keys, values and gates; compiled code frees the outputs between the two operators."""
    outs, lses = (out_cmp, out_slc, out_win), (lse_cmp, lse_slc, lse_win)
    grad_gates, cmp, slc, win = _gated_stats(grad_out, gates, *outs, *lses, scale, k_slc.shape[1])
    keys, positions = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win), (token, start, first_key, window_token, window_start)
    lists = block_indices, *positions, order, replicas
    grads = _gated_gradients(grad_out, q, *keys, cmp, slc, win, *lists, scale, *numbers[:6])
    return *(grads if k_win is not None else (*grads[:5], None, None)), grad_gates


@opaque_operator("gated_stats_triton", launches_kernels=True)
def _gated_stats(
    grad_out: Tensor,
    gates: Tensor,
    out_cmp: Tensor,
    out_slc: Tensor,
    out_win: Tensor,
    lse_cmp: Tensor,
    lse_slc: Tensor,
    lse_win: Tensor,
    scale: float,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the gates, and the stats of each branch; empty ones for no window."""
    from flexnsa.attention.triton.kernels.output_rows import stats_of_gated

    outs, lses = (out_cmp, out_slc, out_win)[: len(gates)], (lse_cmp, lse_slc, lse_win)[: len(gates)]
    return stats_of_gated(grad_out, outs, lses, gates, scale, kv_heads)


@opaque_operator("gated_gradients_triton", launches_kernels=True)
def _gated_gradients(
    grad_out: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    stats_cmp: Tensor,
    stats_slc: Tensor,
    stats_win: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    first_key: Tensor | None,
    window_token: Tensor | None,
    window_start: Tensor | None,
    order: Tensor,
    replicas: Tensor,
    scale: float,
    length: int,
    stride: int,
    window: int,
    block_size: int,
    chunk: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q and of the keys and values of each branch; empty ones for no window."""
    from flexnsa.attention.triton.kernels.selected_bwd import OtherGradients, WindowQueries
    from flexnsa.attention.triton.kernels.selected_lists import Lists

    grad_out, q, k_cmp, v_cmp, k_slc, v_slc = (with_rows(x) for x in (grad_out, q, k_cmp, v_cmp, k_slc, v_slc))
    where, windows = (token, start, first_key), (window_token, window_start, window_start)
    of_cmp = IntervalInputs(stats_cmp, grad_out, q, k_cmp, v_cmp, *where, scale, length, stride, 0)
    dq_cmp, (dk_cmp, dv_cmp) = gradient_of_queries(of_cmp), gradients_of_keys(of_cmp)
    others, dk_win, dv_win = OtherGradients(dq_cmp), q.new_empty(0), q.new_empty(0)
    if k_win is not None and v_win is not None:
        k_win, v_win = with_rows(k_win), with_rows(v_win)
        of_win = IntervalInputs(stats_win, grad_out, q, k_win, v_win, *windows, scale, 1, 1, window)
        dk_win, dv_win = gradients_of_keys(of_win)
        read = q, k_slc, v_slc, k_win, v_win, grad_out
        placed = token is not None or window_token is not None
        if joins_window(*read, block_size=block_size, chunk=chunk, placed=placed):
            others = WindowQueries(dq_cmp, k_win, v_win, stats_win)
        else:
            others = OtherGradients(dq_cmp, gradient_of_queries(of_win))
    selection = selection_of(block_indices, token, start, block_size, k_slc.shape[2])
    lists = Lists(order, replicas, chunk, capacity)
    dq, dk_slc, dv_slc = selected_gradients(
        stats_slc, grad_out, q, k_slc, v_slc, selection, lists, scale=scale, others=others, window=window
    )
    return dq, dk_cmp, dv_cmp, dk_slc, dv_slc, dk_win, dv_win


@_gated_stats.register_fake
def _(
    grad_out: Tensor,  # noqa: ARG001
    gates: Tensor,
    out_cmp: Tensor,
    *others: *tuple[*tuple[object, ...], int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import empty_gated_stats

    return gates.new_empty(gates.shape), *empty_gated_stats(out_cmp, others[-1], len(gates))


@_gated_gradients.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    *others: object,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk_cmp, dv_cmp = empty_gradients(grad_out, None, q, k_cmp, v_cmp)
    _, dk_slc, dv_slc = empty_gradients(grad_out, None, q, k_slc, v_slc)
    dk_win, dv_win = q.new_empty(0), q.new_empty(0)
    if k_win is not None and v_win is not None:
        _, dk_win, dv_win = empty_gradients(grad_out, None, q, k_win, v_win)
    return dq, dk_cmp, dv_cmp, dk_slc, dv_slc, dk_win, dv_win


_gated_attention.register_backward(gradients, differentiable=1)
