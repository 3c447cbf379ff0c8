"""The compressed branch of whole sequences as plain causal attention, which the fastest kernels of all compute.

Compressed tokens become visible one by one, each to a run of ``d`` more queries: the run that begins at token ``l - 1``
sees one of them, the next run two. So the first queries of all runs attend causally, and so do the second ones: these
are ``d`` attentions to the same keys.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.cudnn import plain
from flexnsa.attention.operators import outputs
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


class _Part(NamedTuple):
    """Queries that plain attention takes at once: whole runs of one row, or in all rows the run that is not whole.

    Args:
        rows: of the batch.
        tokens: of the sequence.
        num_keys: compressed tokens that the last query sees.
        causal: whether it is whole runs.
    """

    rows: slice
    tokens: slice
    num_keys: int
    causal: bool

    def queries(self, x: Tensor, stride: int) -> Tensor:
        """View ``(B, H, S, ...)`` as rows of queries to the same keys, ``(rows, H, T, ...)``."""
        x = x[self.rows, :, self.tokens]
        return torch.unflatten(x[0], 1, (-1, stride)).movedim(2, 0) if self.causal else x

    def keys(self, x: Tensor) -> Tensor:
        """View the keys ``(B, H, N, D)`` that these queries see."""
        return x[self.rows, :, : self.num_keys]


def _parts(q: Tensor, size: int, stride: int) -> Iterator[_Part]:
    first, seq_len = size - 1, q.shape[2]
    runs = (seq_len - first) // stride
    end = first + runs * stride
    for row in range(len(q)):
        yield _Part(slice(row, row + 1), slice(first, end), runs, causal=True)
    if end < seq_len:
        yield _Part(slice(None), slice(end, None), runs + 1, causal=False)


@opaque_operator("interleaved_attention")
def _interleaved_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, size: int, stride: int
) -> tuple[Tensor, Tensor]:
    out, lse = outputs(q, v.shape[-1])
    out[:, :, : size - 1] = 0
    lse[:, :, : size - 1] = -torch.inf
    for part in _parts(q, size, stride):
        queries, keys, values = part.queries(q, stride), part.keys(k), part.keys(v)
        part_out, part_lse = plain.forward(queries, keys, values, scale=scale, causal=part.causal)
        part.queries(out, stride).copy_(part_out)
        part.queries(lse, stride).copy_(part_lse)
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
    dq = torch.empty_like(q)
    dq[:, :, : size - 1] = 0
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for part in _parts(q, size, stride):
        of_queries = (None if x is None else part.queries(x, stride) for x in (grad_out, grad_lse, q, out, lse))
        part_grad_out, part_grad_lse, queries, part_out, part_lse = of_queries
        grads = plain.backward(
            given(part_grad_out),
            part_grad_lse,
            given(queries),
            part.keys(k),
            part.keys(v),
            given(part_out),
            given(part_lse).contiguous(),
            scale=scale,
            causal=part.causal,
        )
        part.queries(dq, stride).copy_(grads[0])
        for total, grad in ((dk, grads[1]), (dv, grads[2])):
            part.keys(total).add_(grad)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_interleaved_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return outputs(q, v.shape[-1])


@_interleaved_attention_backward.register_fake
def _(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


_interleaved_attention.register_backward(_interleaved_attention_backward)
