"""The backward pass of the gated sum: the stats of all branches in one kernel, then their gradients."""

from __future__ import annotations

from torch import Tensor

from flexnsa.attention.operators import empty_gradients, with_rows
from flexnsa.attention.triton.hopper import joins_window
from flexnsa.attention.triton.intervals import IntervalInputs, gradient_of_queries, gradients_of_keys
from flexnsa.attention.triton.selected import selected_gradients, selection_of
from flexnsa.operators import opaque_operator


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
    from flexnsa.attention.triton.output_rows import gated_stats

    outs, lses = (out_cmp, out_slc, out_win)[: len(gates)], (lse_cmp, lse_slc, lse_win)[: len(gates)]
    return gated_stats(grad_out, outs, lses, gates, scale, kv_heads)


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
    from flexnsa.attention.triton.selected_backward import OtherGradients, WindowQueries
    from flexnsa.attention.triton.selected_lists import Lists

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
    from flexnsa.attention.triton.output_rows import empty_gated_stats

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
