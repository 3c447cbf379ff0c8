"""The compressed branch and the window as one opaque operator: attention to an interval of keys for each query."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.attention.operators import empty_gradients, empty_outputs, with_rows
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.triton.hopper import runs_on_hopper, takes_heads
from flexnsa.attention.triton.operators import (
    check_call,
    position_arguments,
    precision,
    require_device,
    with_positive_scale,
)
from flexnsa.operators import opaque_operator
from flexnsa.positions import Positions, tensors_of

if TYPE_CHECKING:
    from flexnsa.attention.tiles.device import Tiles
    from flexnsa.attention.triton.kernels.kernel import Kernel


def is_preferred(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> bool:
    """Return whether :func:`compressed` is faster than FlexAttention for such tensors."""
    dims = q.shape[3], v_cmp.shape[3]
    return is_faster(k_cmp.shape[2], max(dims)) or takes_heads(q, *dims, placed=call.positions is not None)


def is_faster(num_keys: int, head_dim: int) -> bool:
    """Return whether :func:`compressed` is faster than FlexAttention even in Triton, for so many keys (H200)."""
    return head_dim <= 64 or num_keys <= 2048


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that are complete (NSA paper, section 3.3.1).

    Args:
        q: float32, bfloat16 or float16 ``(B, Hq, T, Dk)`` on a CUDA device.
        k_cmp: ``(B, Hkv, N, Dk)``; ``Hkv`` divides ``Hq``.
        v_cmp: ``(B, Hkv, N, Dv)``.
        call: see :class:`flexnsa.attention.interface.Call`.

    Returns:
        As :func:`window`.

    Raises:
        ValueError: as :func:`window`.
    """
    config = call.config
    sizes = operator.index(config.compress_block_size), operator.index(config.compress_stride), 0
    return Compressed(*_attend(q, k_cmp, v_cmp, call, call.positions, sizes))


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens, the query's own included (NSA paper, section 3.3.3).

    Repeated calls return equal bits, gradients included. The queries' tokens must never decrease.

    Args:
        q: float32, bfloat16 or float16 ``(B, Hq, T, Dk)`` on a CUDA device.
        k: ``(B, Hkv, S, Dk)``; ``Hkv`` divides ``Hq``.
        v: ``(B, Hkv, S, Dv)``.
        call: see :class:`flexnsa.attention.interface.Call`.

    Returns:
        The output in the memory order of q, and the log-sum-exp, which is differentiable too.

    Raises:
        ValueError: there is a score_mod, or the batch has too many heads in all.
    """
    positions = call.window_positions
    # A key is a token, and the first key of a document its first token.
    where = positions and Positions(positions.token, positions.start, positions.start)
    return _attend(q, k, v, call, where, (1, 1, operator.index(call.config.window_size)))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, positions: Positions | None, sizes: tuple[int, int, int]
) -> BranchOutput:
    check_call(call, "q", q)
    q, scale = with_positive_scale(q, call.scale)
    return BranchOutput(*_interval_attention(q, k, v, *tensors_of(positions), scale, *sizes))


def attend_to_intervals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    first_key: Tensor | None,
    scale: float,
    length: int,
    stride: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend to keys of ``length`` tokens, one every ``stride``; with a ``window`` to the last so many keys alone."""
    from flexnsa.attention.tiles.device import cdiv, device_of
    from flexnsa.attention.tiles.intervals import HOPPER_FORWARD, forward_tiles

    require_device(q)
    out, lse = empty_outputs(q, v.shape[-1])
    q, k, v = (with_rows(x) for x in (q, k, v))
    on_hopper = runs_on_hopper(q, k, v, out, placed=token is not None)
    tiles = HOPPER_FORWARD
    if not on_hopper:
        tiles = forward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], windowed=window > 0)
    forward, _, _ = _kernels(on_hopper=on_hopper)
    where, shape = _positions_and_shape(q, k, v, (token, start, first_key), (length, stride, window), on_hopper)
    batch, heads, num_queries, _ = q.shape
    forward[(cdiv(num_queries, tiles.queries), batch * heads)](
        q, k, v, *where, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        heads, num_queries, k.shape[2], scale * LOG2_E, **shape, BM=tiles.queries, BN=tiles.keys, **tiles.options(),
    )  # fmt: skip
    return out, lse


_interval_attention = opaque_operator("interval_attention_triton", launches_kernels=True)(attend_to_intervals)


@opaque_operator("interval_attention_triton_backward", launches_kernels=True)
def _interval_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    first_key: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    length: int,
    stride: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import stats_of_rows

    stats = stats_of_rows(grad_out, out, lse, grad_lse, scale, k.shape[1], gathered=False)
    grad_out, q, k, v = with_rows(grad_out), with_rows(q), with_rows(k), with_rows(v)
    inputs = IntervalInputs(stats, grad_out, q, k, v, token, start, first_key, scale, length, stride, window)
    return gradient_of_queries(inputs), *gradients_of_keys(inputs)


class IntervalInputs(NamedTuple):
    """What gradients are computed from; ``stats`` as :mod:`flexnsa.attention.triton.kernels.output_rows` describes.

    The rows of ``grad_out``, q, k and v are contiguous. The positions and sizes are those of the forward pass.
    """

    stats: Tensor
    grad_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    token: Tensor | None
    start: Tensor | None
    first_key: Tensor | None
    scale: float
    length: int
    stride: int
    window: int


def gradient_of_queries(inputs: IntervalInputs) -> Tensor:
    """Return the gradient of q, in its memory order."""
    from flexnsa.attention.tiles.device import cdiv

    stats, grad_out, q, k, v, token, start, first_key, scale, *sizes = inputs
    dq = torch.empty_like(q)
    on_hopper = runs_on_hopper(q, k, v, grad_out, placed=token is not None)
    tiles, _ = _backward_tiles(inputs, on_hopper=on_hopper)
    _, kernel, _ = _kernels(on_hopper=on_hopper)
    where, shape = _positions_and_shape(q, k, v, (token, start, first_key), sizes, on_hopper)
    batch, heads, num_queries, _ = q.shape
    kernel[(cdiv(num_queries, tiles.queries), batch * heads)](
        q, k, v, *where, stats, grad_out, dq, *_strides(stats, grad_out, q, k, v), *dq.stride()[:3],
        heads, num_queries, k.shape[2], scale, **shape, **_options(tiles, on_hopper=on_hopper),
    )  # fmt: skip
    return dq


def gradients_of_keys(inputs: IntervalInputs) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v, in their memory order."""
    from flexnsa.attention.tiles.device import cdiv, multiprocessors
    from flexnsa.attention.tiles.intervals import heads_of_program
    from flexnsa.attention.triton.kernels.gradient_parts import add_parts

    stats, grad_out, q, k, v, token, start, first_key, scale, *sizes = inputs
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    on_hopper = runs_on_hopper(q, k, v, grad_out, placed=token is not None)
    _, tiles = _backward_tiles(inputs, on_hopper=on_hopper)
    _, _, kernel = _kernels(on_hopper=on_hopper)
    where, shape = _positions_and_shape(q, k, v, (token, start, first_key), sizes, on_hopper)
    (batch, heads, num_queries, _), num_keys = q.shape, k.shape[2]
    key_tiles, group = cdiv(num_keys, tiles.keys), heads // k.shape[1]
    summed = heads_of_program(group, key_tiles * batch * heads, tiles.num_warps, multiprocessors(q))
    # Sums over fewer heads than a group are float32; another kernel adds them.
    parts = [
        x if summed == group else q.new_empty(batch, heads // summed, num_keys, x.shape[-1], dtype=torch.float32)
        for x in (dk, dv)
    ]
    # With heads of 128 the copies of the kernel for Hopper begin late.
    late = {"LATE": max(q.shape[-1], v.shape[-1]) > 64} if on_hopper else {}
    kernel[(key_tiles, batch * heads // summed)](
        q, k, v, *where, stats, grad_out, *parts, *_strides(stats, grad_out, q, k, v),
        *parts[0].stride()[:3], *parts[1].stride()[:3], heads // summed, num_queries, num_keys, scale,
        **shape, **late, HEADS=summed, **_options(tiles, on_hopper=on_hopper),
    )  # fmt: skip
    if summed < group:
        add_parts(parts, dk, dv)
    return dk, dv


def _strides(stats: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the strides of what the gradients are computed from."""
    return *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], stats.stride(-1), *grad_out.stride()[:3]


def _backward_tiles(inputs: IntervalInputs, *, on_hopper: bool) -> tuple[Tiles, Tiles]:
    """Return the tiles for the gradient of queries and for the gradients of keys."""
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.intervals import backward_tiles, hopper_tiles

    q, windowed, placed = inputs.q, inputs.window > 0, inputs.token is not None
    dims = q.shape[-1], inputs.v.shape[-1]
    if on_hopper:
        return hopper_tiles(*dims, windowed=windowed)
    return backward_tiles(device_of(q), q.dtype, *dims, windowed=windowed, placed=placed)


def _options(tiles: Tiles, *, on_hopper: bool) -> dict[str, int]:
    """Return the launch options of a backward kernel; one for Hopper has buffers of its own for stages."""
    return {"BM": tiles.queries, "BN": tiles.keys, **tiles.options("BUFFERS" if on_hopper else "num_stages")}


def _kernels(*, on_hopper: bool) -> tuple[Kernel, Kernel, Kernel]:
    """Return what computes the output, the gradient of queries, and the gradients of keys and values."""
    if on_hopper:
        from flexnsa.attention.triton.kernels.hopper import intervals_bwd, intervals_fwd

        backward = intervals_bwd.hopper_backward_queries, intervals_bwd.hopper_backward_keys
        return intervals_fwd.hopper_forward, *backward
    from flexnsa.attention.triton.kernels import intervals as kernels

    return kernels.forward, kernels.backward_queries, kernels.backward_keys


def _positions_and_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: tuple[Tensor | None, ...],
    sizes: Sequence[int],
    on_hopper: bool,
) -> tuple[tuple[Tensor | int, ...], dict[str, object]]:
    """Return what describes the positions of the queries and the shape of a call; some kernels take no positions."""
    from flexnsa.attention.tiles.device import padded

    (length, stride, window), dk, dv = sizes, q.shape[-1], v.shape[-1]
    shape: dict[str, object] = {"G": q.shape[1] // k.shape[1], "DK": dk, "DV": dv}
    shape |= {"LENGTH": length, "STRIDE": stride, "WINDOW": window}
    if on_hopper:
        return (), shape
    shape |= {"BDK": padded(dk), "BDV": padded(dv), "PRECISION": precision()}
    return position_arguments(q, *positions), shape | {"HAS_POSITIONS": positions[0] is not None}


@_interval_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return empty_outputs(q, v.shape[-1])


_interval_attention_backward.register_fake(empty_gradients)
_interval_attention.register_backward(_interval_attention_backward)
