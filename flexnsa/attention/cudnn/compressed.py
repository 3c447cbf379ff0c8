"""The compressed branch of whole sequences as plain causal attention, which the fastest kernels of all compute.

Compressed tokens become visible one by one, each to a run of ``d`` more queries: the run that begins at token ``l - 1``
sees one of them, the next run two. So the first queries of all runs attend causally, and so do the second ones: these
are ``d`` attentions to the same keys.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.cudnn import all_keys, causal
from flexnsa.attention.operators import gradients, outputs, with_rows
from flexnsa.attention.seam import Call, Compressed, given
from flexnsa.custom_ops import opaque_operator

LEAST_LENGTH = 32768
"""Shorter sequences have so few compressed tokens that FlexAttention, in one kernel, is as fast."""
DIMS = (64, 128)
"""Of heads, for which cuDNN's kernels on a Hopper were measured."""


def fits(q: Tensor, v_cmp: Tensor, call: Call) -> bool:
    """Tell whether cuDNN is the faster, and there is nothing that only FlexAttention knows: mods, documents, a cache.

    It adds the gradients of q up in any order, so it is not for those who demand deterministic algorithms.
    """
    return (
        call.score_mod is None
        and call.positions is None
        and q.shape[2] >= max(LEAST_LENGTH, call.config.compress_block_size - 1 + call.config.compress_stride)
        and q.shape[-1] == v_cmp.shape[-1]
        and q.shape[-1] in DIMS
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.device.type == "cuda"
        and torch.cuda.get_device_capability(q.device)[0] >= 9
        and not torch.are_deterministic_algorithms_enabled()
    )


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that are complete (NSA paper, section 3.3.1), from a whole sequence.

    Args:
        q: ``(B, Hq, S, D)``; ``S`` is at least ``l - 1 + d``.
        k_cmp: ``(B, Hkv, N, D)``.
        v_cmp: ``(B, Hkv, N, D)``.
        call: see :class:`flexnsa.attention.seam.Call`; no mods, no positions.

    Returns:
        The output in the memory order of q, and the log-sum-exp, which is differentiable too.
    """
    size, stride = (operator.index(x) for x in (call.config.compress_block_size, call.config.compress_stride))
    return Compressed(*_interleaved_attention(q, k_cmp, v_cmp, call.scale, size, stride))


class _Runs(NamedTuple):
    """Where the whole runs of queries are: from token ``first`` to ``end``, ``stride`` tokens each."""

    first: int
    end: int
    stride: int

    @classmethod
    def of(cls, q: Tensor, size: int, stride: int) -> _Runs:
        first = size - 1
        return cls(first, first + (q.shape[2] - first) // stride * stride, stride)

    def places(self, x: Tensor, row: int) -> Tensor:
        """View one row of ``(B, H, S, ...)`` by the queries' place in their run, ``(stride, H, runs, ...)``."""
        return torch.unflatten(x[row, :, self.first : self.end], 1, (-1, self.stride)).movedim(2, 0)

    def keys(self, x: Tensor, row: int) -> Tensor:
        """View what the last whole run sees of one row of ``(B, H, N, D)``."""
        return x[row : row + 1, :, : (self.end - self.first) // self.stride]


@opaque_operator("interleaved_attention")
def _interleaved_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, size: int, stride: int
) -> tuple[Tensor, Tensor]:
    runs = _Runs.of(q, size, stride)
    out, lse = outputs(q, v.shape[-1])
    q = with_rows(q)
    out[:, :, : runs.first] = 0
    lse[:, :, : runs.first] = -torch.inf
    for row in range(len(q)):
        part = causal.forward(runs.places(q, row), runs.keys(k, row), runs.keys(v, row), scale=scale)
        runs.places(out, row).copy_(part[0])
        runs.places(lse, row).copy_(part[1])
    if runs.end < q.shape[2]:
        out[:, :, runs.end :], lse[:, :, runs.end :] = all_keys.forward(q[:, :, runs.end :], k, v, scale=scale)
    return out, lse


@opaque_operator("interleaved_attention_backward")
def _interleaved_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    size: int,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor]:
    runs = _Runs.of(q, size, stride)
    grads = dq, _, _ = gradients(grad_out, grad_lse, q, k, v)
    dq[:, :, : runs.first] = 0
    q = with_rows(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    of_queries = (grad_out, grad_lse, q, out, lse)
    for row in range(len(q)):
        own = (None if x is None else runs.places(x, row) for x in of_queries)
        part_grad_out, part_grad_lse, queries, part_out, part_lse = own
        part = causal.backward(
            given(part_grad_out),
            part_grad_lse,
            given(queries),
            runs.keys(k, row),
            runs.keys(v, row),
            given(part_out),
            given(part_lse).contiguous(),
            scale=scale,
        )
        runs.places(dq, row).copy_(part[0])
        runs.keys(dk, row).add_(part[1])
        runs.keys(dv, row).add_(part[2])
    if runs.end < q.shape[2]:
        last = (None if x is None else x[:, :, runs.end :] for x in of_queries)
        part_grad_out, part_grad_lse, queries, part_out, part_lse = last
        part = all_keys.backward(
            given(part_grad_out), part_grad_lse, given(queries), k, v, given(part_out), given(part_lse), scale=scale
        )
        dq[:, :, runs.end :] = part[0]
        dk += part[1]
        dv += part[2]
    for grad, total in zip(grads[1:], (dk, dv), strict=True):
        grad.copy_(total)
    return grads


@_interleaved_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return outputs(q, v.shape[-1])


_interleaved_attention_backward.register_fake(gradients)
_interleaved_attention.register_backward(_interleaved_attention_backward)
