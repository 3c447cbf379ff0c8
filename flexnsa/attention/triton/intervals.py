"""The window as one opaque operator."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from flexnsa.attention.operators import empty_gradients, empty_outputs, with_rows
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.seam import BranchOutput, Call
from flexnsa.attention.triton.operators import check_call, position_arguments, precision, require_device
from flexnsa.operators import opaque_operator


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens, the query's own included (NSA paper, section 3.3.3).

    Repeated calls return equal bits, gradients included. The queries' tokens must never decrease.

    Args:
        q: float32, bfloat16 or float16 ``(B, Hq, T, Dk)`` on a CUDA device.
        k: ``(B, Hkv, S, Dk)``; ``Hkv`` divides ``Hq``.
        v: ``(B, Hkv, S, Dv)``.
        call: see :class:`flexnsa.attention.seam.Call`.

    Returns:
        The output in the memory order of q, and the log-sum-exp, which is differentiable too.

    Raises:
        ValueError: there is a score_mod, or the batch has too many heads in all.
    """
    check_call(call, "q", q)
    positions = call.window_positions
    token, start = (None, None) if positions is None else (positions.token, positions.start)
    return BranchOutput(*_window_attention(q, k, v, token, start, call.scale, operator.index(call.config.window_size)))


@opaque_operator("window_attention_triton", compiles_ahead=True)
def _window_attention(
    q: Tensor, k: Tensor, v: Tensor, token: Tensor | None, start: Tensor | None, scale: float, window_size: int
) -> tuple[Tensor, Tensor]:
    from flexnsa.attention.tiles.device import cdiv, device_of
    from flexnsa.attention.tiles.window import window_forward_tiles
    from flexnsa.attention.triton.kernels import window as kernels

    require_device(q)
    out, lse = empty_outputs(q, v.shape[-1])
    q, k, v = (with_rows(x) for x in (q, k, v))
    tiles = window_forward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1])
    batch, heads, length, _ = q.shape
    kernels.forward[(cdiv(length, tiles.queries), batch * heads)](
        q, k, v, *position_arguments(token, start, q), out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        heads, length, k.shape[2], scale * LOG2_E,
        **_shape(q, k, v, token, window_size), **tiles.options(),
    )  # fmt: skip
    return out, lse


@opaque_operator("window_attention_triton_backward", compiles_ahead=True)
def _window_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flexnsa.attention.tiles.device import cdiv, device_of
    from flexnsa.attention.tiles.window import window_backward_tiles
    from flexnsa.attention.triton.kernels import window as kernels

    dq, dk, dv = empty_gradients(grad_out, grad_lse, q, k, v)
    q, k, v, out, grad_out = (with_rows(x) for x in (q, k, v, out, grad_out))
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    sizes = (device_of(q), q.dtype, q.shape[-1], v.shape[-1])
    of_queries, of_keys = window_backward_tiles(*sizes, placed=token is not None)
    positions, shape = position_arguments(token, start, q), _shape(q, k, v, token, window_size)
    (batch, heads, length, _), (kv_heads, num_keys) = q.shape, k.shape[1:3]
    read = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    kernels.backward_queries[(cdiv(length, of_queries.queries), batch * heads)](
        q, k, v, *positions, out, lse, grad_out, lse if grad_lse is None else grad_lse, delta, dq,
        *read, *out.stride()[:3], *grad_out.stride()[:3], *dq.stride()[:3], heads, length, num_keys, scale,
        **shape, HAS_GRAD_LSE=grad_lse is not None, **of_queries.options(),
    )  # fmt: skip
    kernels.backward_keys[(cdiv(num_keys, of_keys.keys), batch * kv_heads)](
        q, k, v, *positions, lse, grad_out, delta, dk, dv,
        *read, *grad_out.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], kv_heads, length, num_keys, scale,
        **shape, **of_keys.options(),
    )  # fmt: skip
    return dq, dk, dv


def _shape(q: Tensor, k: Tensor, v: Tensor, token: Tensor | None, window_size: int) -> dict[str, object]:
    from flexnsa.attention.tiles.device import padded

    dk, dv = q.shape[-1], v.shape[-1]
    sizes: dict[str, object] = {"G": q.shape[1] // k.shape[1], "DK": dk, "DV": dv, "WINDOW": window_size}
    return sizes | {"HAS_POSITIONS": token is not None, "BDK": padded(dk), "BDV": padded(dv), "PRECISION": precision()}


@_window_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return empty_outputs(q, v.shape[-1])


_window_attention_backward.register_fake(empty_gradients)
_window_attention.register_backward(_window_attention_backward)
