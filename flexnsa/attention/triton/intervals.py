"""The compressed branch and the window as one opaque operator: attention to an interval of keys for each query."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.attention.plan import Plan, can_copy
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.triton import arguments
from flexnsa.masks.positions import Positions, tensors_of
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.results import empty_outputs, fake_gradients, with_rows

if TYPE_CHECKING:
    from flexnsa.attention.tiles.device import Tiles
    from flexnsa.attention.triton.kernels.kernel import Kernel


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that are complete, as :func:`window`."""
    config = call.config
    sizes = operator.index(config.compress_block_size), operator.index(config.compress_stride), 0
    return Compressed(*_attend(q, k_cmp, v_cmp, call, call.positions, sizes))


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens on a CUDA device, in float32, bfloat16 or float16.

    Repeated calls return equal bits, gradients included. The queries' tokens must never decrease. The output is in the
    memory order of q, and the log-sum-exp is differentiable too.

    Raises:
        ValueError: there is a score_mod that is no soft cap, or the batch has too many heads in all.
    """
    positions = call.window_positions
    # A key is a token, and the first key of a document its first token.
    of_keys = positions and Positions(positions.token, positions.start, positions.start)
    return _attend(q, k, v, call, of_keys, (1, 1, operator.index(call.config.window_size)))


class IntervalInputs(NamedTuple):
    """Queries ``(B, Hq, T, Dk)``, keys and values ``(B, Hkv, S, D)``, and which keys a query sees.

    Keys have ``length`` tokens, one every ``stride``; with a ``window`` a query sees the last so many keys alone. The
    positions are int ``(B or 1, T)``, or None for one whole sequence from token 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    token: Tensor | None
    start: Tensor | None
    first_key: Tensor | None
    factors: arguments.Factors
    length: int
    stride: int
    window: int

    def with_rows(self) -> IntervalInputs:
        """Make rows contiguous."""
        return self._replace(q=with_rows(self.q), k=with_rows(self.k), v=with_rows(self.v))

    def run_in_gluon(self, of_queries: Tensor) -> bool:
        """Return whether Gluon kernels run; they also read or write ``of_queries (B, Hq, T, Dv)``."""
        return Plan.of(*self[:3]).in_gluon and can_copy(self.q, self.k, self.v, of_queries)

    def arguments(self, *, in_gluon: bool) -> tuple[tuple[Tensor | int, ...], dict[str, object]]:
        """Return what describes the positions and the shape of a launch."""
        from flexnsa.attention.tiles.device import padded

        q, k, v, *positions = self[:6]
        dk, dv = q.shape[-1], v.shape[-1]
        shape: dict[str, object] = {"G": q.shape[1] // k.shape[1], "DK": dk, "DV": dv}
        shape |= {"LENGTH": self.length, "STRIDE": self.stride, "WINDOW": self.window, "INNER": self.factors[1]}
        shape |= {"HAS_POSITIONS": self.token is not None}
        if not in_gluon:
            shape |= {"BDK": padded(dk), "BDV": padded(dv), "PRECISION": arguments.precision()}
        return arguments.position_arguments(q, *positions), shape


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, positions: Positions | None, sizes: tuple[int, int, int]
) -> BranchOutput:
    arguments.check_call(call, "q", q)
    q, factors = arguments.with_positive_scale(q, arguments.factors_of(call))
    return BranchOutput(*_interval_attention(IntervalInputs(q, k, v, *tensors_of(positions), factors, *sizes)))


def attend_to_intervals(inputs: IntervalInputs) -> tuple[Tensor, Tensor]:
    """Attend from each query to the keys that it sees; return the outputs, and the log-sum-exps."""
    from flexnsa.attention.tiles.device import cdiv, device_of
    from flexnsa.attention.tiles.intervals import HOPPER_FORWARD, forward_tiles

    arguments.require_device(inputs.q)
    out, lse = empty_outputs(inputs.q, inputs.v.shape[-1])
    inputs = inputs.with_rows()
    q, k, v = inputs[:3]
    in_gluon = inputs.run_in_gluon(out)
    tiles = HOPPER_FORWARD
    if not in_gluon:
        tiles = forward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], windowed=inputs.window > 0)
    forward, _, _ = _kernels(in_gluon=in_gluon)
    positions, shape = inputs.arguments(in_gluon=in_gluon)
    batch, heads, num_queries, _ = q.shape
    forward[(cdiv(num_queries, tiles.queries), batch * heads)](
        q, k, v, *positions, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        heads, num_queries, k.shape[2], inputs.factors[0] * LOG2_E, **shape,
        BM=tiles.queries, BN=tiles.keys, **tiles.options(),
    )  # fmt: skip
    return out, lse


_interval_attention = opaque_operator("interval_attention_triton", launches_kernels=True)(attend_to_intervals)


@opaque_operator("interval_attention_triton_backward", launches_kernels=True)
def _interval_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, inputs: IntervalInputs, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import stats_of_rows

    stats = stats_of_rows(grad_out, out, lse, grad_lse, inputs.factors[0], inputs.k.shape[1], gathered=False)
    inputs, grad_out = inputs.with_rows(), with_rows(grad_out)
    return gradient_of_queries(inputs, stats, grad_out), *gradients_of_keys(inputs, stats, grad_out)


def gradient_of_queries(inputs: IntervalInputs, stats: Tensor, grad_out: Tensor) -> Tensor:
    """Return the gradient of q, in its memory order.

    Args:
        inputs: of forward, with contiguous rows.
        stats: as :mod:`flexnsa.attention.triton.kernels.output_rows` describes.
        grad_out: ``(B, Hq, T, Dv)``, with contiguous rows.
    """
    from flexnsa.attention.tiles.device import cdiv

    q, k, v = inputs[:3]
    dq = torch.empty_like(q)
    in_gluon = inputs.run_in_gluon(grad_out)
    tiles, _ = _backward_tiles(inputs, in_gluon=in_gluon)
    _, kernel, _ = _kernels(in_gluon=in_gluon)
    positions, shape = inputs.arguments(in_gluon=in_gluon)
    batch, heads, num_queries, _ = q.shape
    kernel[(cdiv(num_queries, tiles.queries), batch * heads)](
        q, k, v, *positions, stats, grad_out, dq, *_strides(stats, grad_out, q, k, v), *dq.stride()[:3],
        heads, num_queries, k.shape[2], inputs.factors[0], **shape, **_options(tiles, in_gluon=in_gluon),
    )  # fmt: skip
    return dq


def gradients_of_keys(inputs: IntervalInputs, stats: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, in their memory order; arguments as of :func:`gradient_of_queries`."""
    from flexnsa.attention.tiles.device import cdiv, multiprocessors
    from flexnsa.attention.tiles.intervals import heads_of_program
    from flexnsa.attention.triton.kernels.intervals import add_parts

    q, k, v = inputs[:3]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    in_gluon = inputs.run_in_gluon(grad_out)
    _, tiles = _backward_tiles(inputs, in_gluon=in_gluon)
    _, _, kernel = _kernels(in_gluon=in_gluon)
    positions, shape = inputs.arguments(in_gluon=in_gluon)
    (batch, heads, num_queries, _), num_keys = q.shape, k.shape[2]
    key_tiles, group = cdiv(num_keys, tiles.keys), heads // k.shape[1]
    summed = heads_of_program(group, key_tiles * batch * heads, tiles.num_warps, multiprocessors(q))
    # Sums over fewer heads than a group are float32; another kernel adds them.
    parts = [
        x if summed == group else q.new_empty(batch, heads // summed, num_keys, x.shape[-1], dtype=torch.float32)
        for x in (dk, dv)
    ]
    # With heads of 128 the copies of the kernel for Hopper begin late.
    late = {"LATE": max(q.shape[-1], v.shape[-1]) > 64} if in_gluon else {}
    kernel[(key_tiles, batch * heads // summed)](
        q, k, v, *positions, stats, grad_out, *parts, *_strides(stats, grad_out, q, k, v),
        *parts[0].stride()[:3], *parts[1].stride()[:3], heads // summed, num_queries, num_keys, inputs.factors[0],
        **shape, **late, HEADS=summed, **_options(tiles, in_gluon=in_gluon),
    )  # fmt: skip
    if summed < group:
        add_parts(parts, dk, dv)
    return dk, dv


def _strides(stats: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the strides of what the gradients are computed from."""
    return *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], stats.stride(-1), *grad_out.stride()[:3]


def _backward_tiles(inputs: IntervalInputs, *, in_gluon: bool) -> tuple[Tiles, Tiles]:
    """Return the tiles for the gradient of queries and for the gradients of keys."""
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.intervals import backward_tiles, hopper_tiles

    q, windowed, placed = inputs.q, inputs.window > 0, inputs.token is not None
    dims = q.shape[-1], inputs.v.shape[-1]
    if in_gluon:
        return hopper_tiles(*dims, windowed=windowed)
    return backward_tiles(device_of(q), q.dtype, *dims, windowed=windowed, placed=placed)


def _options(tiles: Tiles, *, in_gluon: bool) -> dict[str, int]:
    """Return the launch options of a backward kernel; one for Hopper has buffers of its own for stages."""
    return {"BM": tiles.queries, "BN": tiles.keys, **tiles.options("BUFFERS" if in_gluon else "num_stages")}


def _kernels(*, in_gluon: bool) -> tuple[Kernel, Kernel, Kernel]:
    """Return what computes the output, the gradient of queries, and the gradients of keys and values."""
    if in_gluon:
        from flexnsa.attention.triton.kernels.hopper import intervals_bwd, intervals_fwd

        backward = intervals_bwd.hopper_backward_queries, intervals_bwd.hopper_backward_keys
        return intervals_fwd.hopper_forward, *backward
    from flexnsa.attention.triton.kernels import intervals as kernels

    return kernels.forward, kernels.backward_queries, kernels.backward_keys


@_interval_attention.register_fake
def _(inputs: IntervalInputs) -> tuple[Tensor, Tensor]:
    return empty_outputs(inputs.q, inputs.v.shape[-1])


_interval_attention_backward.register_fake(fake_gradients)
_interval_attention.register_backward(_interval_attention_backward)
