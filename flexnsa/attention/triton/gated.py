"""The gated sum of the branches, with one backward pass for all.

A branch on its own gets the gradient of its output, which is that of the sum times its gate: three scaled copies to
write and to read. Here all branches read the gradient of the sum, and the gates go into their probabilities. Where the
selected branch has weight 1, backward takes the sum in place of its output, which is never stored.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Compressed, GatedSum, Keys, given
from flexnsa.attention.plan import Plan, can_copy, gathers_keys, needs_int64
from flexnsa.attention.triton.arguments import Factors, check_call, factors_of, with_positive_scale
from flexnsa.attention.triton.intervals import (
    IntervalInputs,
    attend_to_intervals,
    gradient_of_queries,
    gradients_of_keys,
)
from flexnsa.attention.triton.selected import (
    SelectedInputs,
    attend_to_blocks,
    empty_selected,
    selected_gradients,
    sizes_of,
)
from flexnsa.masks.positions import positions_of, tensors_of
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.results import empty_gradients, empty_outputs, with_rows


def gated_sum(q: Tensor, keys: Keys, call: Call) -> GatedSum | None:
    """Return what computes the sum, or None where another kernel is better for one of the branches."""
    plan = Plan.of(q, given(keys.k_cmp), keys.v_cmp)
    return _attend if plan.compressed_in_triton and not gathers_keys(call.config.num_selected_blocks) else None


def _attend(
    q: Tensor,
    keys: Keys,
    gates: Mapping[str, Tensor],
    block_indices: Tensor,
    compressed: Compressed,
    call: Call,
    by_token: bool,
    recompute: Sequence[str],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sum, see ``flexnsa.attention.interface.GatedSum``; what is not computed is empty.

    Raises:
        ValueError: there is a score_mod that is no soft cap, or the batch has too many heads in all.
    """
    check_call(call, "q", q)
    config, k_slc, v_slc = call.config, given(keys.k_slc), given(keys.v_slc)
    sizes = sizes_of(q, k_slc, v_slc, block_indices, config)
    q, factors = with_positive_scale(q, factors_of(call))
    of_window = None if call.window_positions is call.positions else positions_of(q, call.window_positions)
    inputs = GatedInputs(
        q,
        *(given(keys.k_cmp), given(keys.v_cmp), k_slc, v_slc, keys.k_win, keys.v_win),
        *(gates["cmp"], gates.get("win"), gates.get("slc")),
        compressed.out,
        given(compressed.lse),
        block_indices,
        *tensors_of(call.positions),
        *tensors_of(of_window)[:2],
        factors,
        operator.index(config.compress_block_size),
        operator.index(config.compress_stride),
        operator.index(config.window_size),
        *sizes,
        by_token,
        *("cmp" in recompute, "win" in recompute),
    )
    out, out_slc, _, out_win, *_ = _gated_attention(inputs)
    return out, out_slc, out_win


class GatedInputs(NamedTuple):
    """The inputs of all branches, of which gradients have those of ``q`` to ``gate_slc``; see :func:`_attend`.

    The selected branch without a gate has weight 1. Where ``window_token`` is None, queries have the same positions
    among the keys of all branches. An output that is computed ``again`` is not saved for backward.
    """

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor | None
    v_win: Tensor | None
    gate_cmp: Tensor | None
    gate_win: Tensor | None
    gate_slc: Tensor | None
    out_cmp: Tensor | None
    lse_cmp: Tensor | None
    block_indices: Tensor
    token: Tensor | None
    start: Tensor | None
    first_key: Tensor | None
    window_token: Tensor | None
    window_start: Tensor | None
    factors: Factors
    length: int
    stride: int
    window_size: int
    block_size: int
    chunk: int
    capacity: int
    by_token: bool
    again_cmp: bool
    again_win: bool

    @property
    def gates(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gates of the compressed branch, of the window and of the selected branch."""
        return given(self.gate_cmp), self.gate_win, self.gate_slc

    @property
    def compressed(self) -> IntervalInputs:
        """The inputs of the compressed branch."""
        inputs = self.q, self.k_cmp, self.v_cmp, self.token, self.start, self.first_key
        return IntervalInputs(*inputs, self.factors, self.length, self.stride, 0)

    @property
    def selected(self) -> SelectedInputs:
        """The inputs of the selected branch."""
        blocks, sizes = (self.block_indices, self.token, self.start), (self.block_size, self.chunk, self.capacity)
        return SelectedInputs(self.q, self.k_slc, self.v_slc, *blocks, self.factors, *sizes)

    @property
    def window(self) -> IntervalInputs | None:
        """The inputs of the window, if there is one: a key is a token."""
        if self.k_win is None or self.v_win is None:
            return None
        token, start = (self.token, self.start) if self.window_token is None else (self.window_token, self.window_start)
        inputs = self.q, self.k_win, self.v_win, token, start, start
        return IntervalInputs(*inputs, self.factors, 1, 1, self.window_size)

    @property
    def plan(self) -> Plan:
        """Which kernels compute the selected branch and the window."""
        return Plan.of(*self.selected[:3], block_size=self.block_size)

    def can_join(self, of_queries: Tensor) -> bool:
        """Return whether one kernel can read both branches: keys of the same tokens, and rows that it can copy."""
        (q, k, v), window = self.selected[:3], self.window
        if window is None or self.window_token is not None or k.shape[2] != window.k.shape[2]:
            return False
        int64_offsets = any(needs_int64(x, q.shape[1] // k.shape[1], self.chunk) for x in (q, of_queries))
        return not int64_offsets and can_copy(q, k, v, window.k, window.v, of_queries)

    def with_rows(self) -> GatedInputs:
        """Make rows contiguous."""
        rows = zip(self._fields[:7], self[:7], strict=True)
        return self._replace(**{name: with_rows(x) for name, x in rows if x is not None})


GatedOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The sum, out and lse of the selected branch and of the window, and both tensors of the lists."""


@opaque_operator("gated_attention_triton", launches_kernels=True)
def _gated_attention(inputs: GatedInputs) -> GatedOutputs:
    from flexnsa.attention.triton.kernels.output_rows import same_strides
    from flexnsa.attention.triton.kernels.selected_fwd import GatedBranches

    inputs = inputs.with_rows()
    out_slc, lse_slc = empty_outputs(inputs.q, inputs.v_slc.shape[-1])
    total, out_cmp = _empty_sum(out_slc, inputs.by_token), given(inputs.out_cmp)
    out_cmp = out_cmp if out_cmp.stride() == out_slc.stride() else torch.empty_like(out_slc).copy_(out_cmp)
    gated = GatedBranches(total, out_cmp, *same_strides(*inputs.gates))
    out_win, lse_win = _empty_window(inputs)
    window, joined = inputs.window, inputs.plan.joins_forward and inputs.can_join(out_slc)
    if window is not None:
        if not joined:
            out_win, lse_win = attend_to_intervals(window)
        gated = gated._replace(win=out_win, win_lse=lse_win, k_win=inputs.k_win, v_win=inputs.v_win)
    lists = attend_to_blocks(inputs.selected, out_slc, lse_slc, gated, window=inputs.window_size if joined else None)
    out_slc = inputs.q.new_empty(0) if inputs.gate_slc is None else out_slc
    return total, out_slc, lse_slc, out_win, lse_win, lists.order, lists.replicas


def _empty_window(inputs: GatedInputs) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of the window; empty ones without one."""
    q, v_win = inputs.q, inputs.v_win
    return (q.new_empty(0), q.new_empty(0, dtype=torch.float32)) if v_win is None else empty_outputs(q, v_win.shape[-1])


def _empty_sum(out: Tensor, by_token: bool) -> Tensor:
    """Allocate the gated sum of outputs like ``out``."""
    if by_token:
        return out.new_empty(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)
    return torch.empty_like(out)


@_gated_attention.register_fake
def _(inputs: GatedInputs) -> GatedOutputs:
    out, lse, order, replicas = empty_selected(inputs.selected)
    kept = out.new_empty(0) if inputs.gate_slc is None else out
    return _empty_sum(out, inputs.by_token), kept, lse, *_empty_window(inputs), order, replicas


@opaque_operator("gated_stats_triton", launches_kernels=True)
def _gated_stats(
    grad_out: Tensor, inputs: GatedInputs, out_slc: Tensor, lse_slc: Tensor, out_win: Tensor | None, lse_win: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the gates that there are, and the stats of each branch; empty ones for no window."""
    from flexnsa.attention.triton.kernels.output_rows import stats_of_gated

    # Not in operators of their own: the compiler would save the result of forward's in place of the compressed one.
    out_cmp = attend_to_intervals(inputs.compressed)[0] if inputs.out_cmp is None else inputs.out_cmp
    out_win = attend_to_intervals(given(inputs.window))[0] if out_win is None else out_win
    outs, lses = (out_cmp, out_slc, out_win), (given(inputs.lse_cmp), lse_slc, lse_win)
    return stats_of_gated(grad_out, outs, lses, inputs.gates, inputs.factors[0], inputs.k_slc.shape[1])


@_gated_stats.register_fake
def _(_grad_out: Tensor, inputs: GatedInputs, *_: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import empty_gated_stats

    return empty_gated_stats(inputs.q, inputs.k_slc.shape[1], inputs.gates)


@opaque_operator("gated_gradients_triton", launches_kernels=True)
def _gated_gradients(
    grad_out: Tensor,
    stats_cmp: Tensor,
    stats_slc: Tensor,
    stats_win: Tensor,
    inputs: GatedInputs,
    order: Tensor,
    replicas: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q and of the keys and values of each branch; empty ones for no window."""
    from flexnsa.attention.triton.kernels.selected_bwd import OtherGradients, WindowQueries

    grad_out, inputs = with_rows(grad_out), inputs.with_rows()
    cmp, window = (inputs.compressed, stats_cmp, grad_out), inputs.window
    dq_cmp, grads_cmp = gradient_of_queries(*cmp), gradients_of_keys(*cmp)
    others, grads_win = OtherGradients(dq_cmp), (inputs.q.new_empty(0), inputs.q.new_empty(0))
    if window is not None:
        grads_win = gradients_of_keys(window, stats_win, grad_out)
        if inputs.plan.joins_backward and inputs.can_join(grad_out):
            others = WindowQueries(dq_cmp, window.k, window.v, stats_win)
        else:
            others = OtherGradients(dq_cmp, gradient_of_queries(window, stats_win, grad_out))
    lists = inputs.selected, order, replicas
    dq, dk, dv = selected_gradients(*lists, stats_slc, grad_out, others, window=inputs.window_size)
    return dq, *grads_cmp, dk, dv, *grads_win


@_gated_gradients.register_fake
def _(
    _grad_out: Tensor, _cmp: Tensor, _slc: Tensor, _win: Tensor, inputs: GatedInputs, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, window = inputs.q, inputs.window
    grads_slc = empty_gradients(*inputs.selected[:3])[1:]
    grads_win = (q.new_empty(0), q.new_empty(0)) if window is None else empty_gradients(*window[:3])[1:]
    return *empty_gradients(*inputs.compressed[:3]), *grads_slc, *grads_win


def _kept(inputs: GatedInputs, outputs: GatedOutputs) -> tuple[GatedInputs, tuple[Tensor | None, ...]]:
    """Leave out the outputs that backward computes again."""
    inputs = inputs._replace(out_cmp=None) if inputs.again_cmp else inputs
    return inputs, (*outputs[:3], None if inputs.again_win else outputs[3], *outputs[4:])


def _gradients(grad_out: Tensor, inputs: GatedInputs, *outputs: *GatedOutputs) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, keys, values and gates; compiled code frees the outputs between the two operators."""
    total, out_slc, *others, order, replicas = outputs
    stats = _gated_stats(grad_out, inputs, total if inputs.gate_slc is None else out_slc, *others)
    each = iter(stats[0].unbind())
    of_gates = [gate if gate is None else next(each) for gate in inputs.gates]
    inputs = inputs._replace(gate_cmp=None, gate_win=None, gate_slc=None, out_cmp=None, lse_cmp=None)
    grads = _gated_gradients(grad_out, *stats[1:], inputs, order, replicas)
    of_window = (None, None) if inputs.k_win is None else grads[5:]
    return *grads[:5], *of_window, *of_gates


_gated_attention.register_backward(_gradients, differentiable=1, keep=_kept)
