"""Attention to intervals of keys, a chunk of queries at a time: memory linear in the sequence, forward and backward.

A chunk reads only the keys that some of its queries see, and nothing of it is saved: backward recomputes its
probabilities. On a CPU PyTorch's fused kernel attends; elsewhere, and to keys that are not finite, separate products
(:mod:`flexnsa.attention.sdpa.products`).

For the kernel, the heads of a group are rows of one matrix: products are large, and keys are neither repeated nor read
once a head. A mask as large as one chunk hides keys. That is faster than one call with ``is_causal``, which reads the
keys for each head, except for sequences of a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.plan import THREADED_QUERIES
from flexnsa.attention.sdpa.chunks import Chunk, IntervalInputs, chunks_of
from flexnsa.attention.sdpa.products import attend_by_products, differentiate_by_products
from flexnsa.attention.threads import grouped, repeated, run_heads_in_threads
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.results import empty_contiguous_gradients, empty_contiguous_outputs, with_rows

SHORT = 256
"""Tokens of a causal sequence, at most, that are one call."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def takes(k: Tensor) -> bool:
    """Return whether the kernel takes these keys: on a CPU, at least one, all finite. Its mask is added: NaN stays."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    return k.device.type == "cpu" and k.numel() > 0 and isfinite(k.sum(dtype=dtype).item())


def attend_to_intervals(inputs: IntervalInputs) -> tuple[Tensor, Tensor]:
    """Attend to the keys ``[lo, hi)`` of each query.

    Returns:
        ``out (B, Hq, T, Dv)`` in the dtype of q and ``lse (B, Hq, T)``, fp32 or wider; 0 and ``-inf`` without a key.
    """
    q, k, v, lo, hi, scale, chunk_size = inputs
    if not takes(k):
        return attend_by_products(inputs)
    dtype, width = torch.promote_types(q.dtype, torch.float32), max(q.shape[-1], v.shape[-1])
    if _is_short(q, k, lo, hi):
        out, lse = _attend(*_by_key_head(k, width, dtype, q, k, v), is_causal=True, scale=scale)
        return _contiguous(out, q.dtype, (*q.shape[:3], v.shape[-1])), lse.reshape(q.shape[:3]).contiguous()
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=dtype)

    def attend(*views: Tensor) -> None:
        q, out, lse, k, v, lo, hi = views
        keys, values = _wide(k, width, dtype), _wide(v, width, dtype)
        for chunk, seen, mask in _masked(lo, hi, chunk_size, k.shape[2], q.shape[2], dtype):
            rows = _rows(q[..., chunk.queries, :], 1, width, dtype)
            attended, log_sums = _attend(rows, keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scale)
            out_c, lse_c = out[..., chunk.queries, :], lse[..., chunk.queries]
            out_c.copy_(attended[..., : v.shape[-1]].reshape(out_c.shape))
            lse_c.copy_(log_sums.reshape(lse_c.shape))

    run_heads_in_threads(attend, (*grouped(k, q, out, lse), k, v, *repeated(k, lo, hi)), _heads_at_once(q, k))
    return out, lse.masked_fill_((lo >= hi)[:, None], -torch.inf)  # the kernel gives 0 for a query without keys


interval_attention = opaque_operator("interval_attention")(attend_to_intervals)


def differentiate_intervals(
    grad_out: Tensor, grad_lse: Tensor | None, inputs: IntervalInputs, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, lo, hi, scale, chunk_size = inputs
    if not takes(k):
        return differentiate_by_products(grad_out, grad_lse, inputs, out, lse)
    dtype, width = lse.dtype, max(q.shape[-1], v.shape[-1])
    if grad_lse is not None:
        # A value that is 1, and 0 in the output, adds a gradient to all scores of a row: that of its lse.
        grad_out, out, v_one = (
            torch.cat([x.to(dtype), extra], -1)
            for x, extra in (
                (grad_out, grad_lse[..., None]),
                (out, torch.zeros_like(lse)[..., None]),
                (v, v.new_ones(*v.shape[:3], 1, dtype=dtype)),
            )
        )
        grad_q, grad_k, grad_v = differentiate_intervals(grad_out, None, inputs._replace(v=v_one), out, lse)
        return grad_q, grad_k, grad_v[..., :-1].to(v.dtype).contiguous()
    if _is_short(q, k, lo, hi):
        whole = _by_key_head(k, width, dtype, grad_out, q, k, v, out)
        lse = lse.reshape(-1, q.shape[1] // k.shape[1], q.shape[2])
        grad_q, *of_keys = _differentiate(*whole, lse, 0.0, True, scale=scale)
        summed = (grad_q, *(x.sum(1) for x in of_keys))
        grads = (_contiguous(x, like.dtype, like.shape) for x, like in zip(summed, (q, k, v), strict=True))
        return next(grads), next(grads), next(grads)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def differentiate(*views: Tensor) -> None:
        q, out, lse, grad_out, grad_q, k, v, grad_k, grad_v, lo, hi = views
        copies = _copies(q)
        keys, values = (_wide(x, width, dtype) for x in (k, v))
        if copies > 1:
            keys, values = (x.repeat_interleave(copies, 1) for x in (keys, values))
        totals = [torch.zeros_like(x) for x in (keys, values)]
        for chunk, seen, mask in _masked(lo, hi, chunk_size, k.shape[2], q.shape[2] // copies, dtype):
            queries = chunk.queries
            grad_out_c, q_c, out_c = (_rows(x[..., queries, :], copies, width, dtype) for x in (grad_out, q, out))
            # A row without keys has masked scores only: any finite lse makes its probabilities 0.
            lse_c = lse[..., queries].reshape(q_c.shape[:3]).clamp_min(torch.finfo(dtype).min)
            k_c, v_c = (x[:, :, seen] for x in (keys, values))
            grads = _differentiate(grad_out_c, q_c, k_c, v_c, out_c, lse_c, 0.0, False, attn_mask=mask, scale=scale)
            grad_q_c = grad_q[..., queries, :]
            grad_q_c.copy_(grads[0][..., : q.shape[-1]].reshape(grad_q_c.shape))
            for total, grad in zip(totals, grads[1:], strict=True):
                total[:, :, seen].add_(grad)
        for grad, total in zip((grad_k, grad_v), totals, strict=True):
            grad.copy_(torch.unflatten(total[..., : grad.shape[-1]], 1, (-1, copies)).sum(2))

    views = (*grouped(k, q, out, lse, grad_out, grad_q), k, v, grad_k, grad_v, *repeated(k, lo, hi))
    run_heads_in_threads(differentiate, views, _heads_at_once(q, k))
    return grad_q, grad_k, grad_v


_backward = opaque_operator("interval_attention_backward")(differentiate_intervals)
interval_attention.register_fake(empty_contiguous_outputs)
_backward.register_fake(empty_contiguous_gradients)
interval_attention.register_backward(_backward)


def _is_short(q: Tensor, k: Tensor, lo: Tensor, hi: Tensor) -> bool:
    """Return whether each query of a short sequence sees all keys up to its own."""
    if not 0 < q.shape[2] == k.shape[2] <= SHORT:
        return False
    upto = torch.arange(1, q.shape[2] + 1, dtype=hi.dtype, device=hi.device)
    return not lo.any() and bool((hi == upto).all())


def _by_key_head(k: Tensor, width: int, dtype: torch.dtype, *tensors: Tensor) -> Iterator[Tensor]:
    """View each key head and its group of query heads, ``(B * Hkv, G, T, width)``: no key is copied for its group."""
    group = tensors[0].shape[1] // k.shape[1]
    for x in tensors:
        by_head = torch.unflatten(_wide(x, width, dtype), 1, (k.shape[1], -1)).flatten(0, 1)
        yield by_head.expand(-1, group, -1, -1)


def _contiguous(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Give a result ``(B * Hkv, G, T, width)`` the shape, which may be narrower, and the dtype of a tensor."""
    return x[..., : shape[-1]].reshape(shape).to(dtype).contiguous()


def _heads_at_once(q: Tensor, k: Tensor) -> int:
    """Count the key heads of one call: all of them where they get no threads of their own."""
    threaded = q.shape[2] >= THREADED_QUERIES and torch.get_num_threads() > 1
    return 1 if threaded else k.shape[0] * k.shape[1]


def _masked(
    lo: Tensor, hi: Tensor, size: int, num_keys: int, group: int, dtype: torch.dtype
) -> Iterator[tuple[Chunk, slice, Tensor | None]]:
    """Yield chunks of queries, their keys, and the mask ``(b or 1, 1, group * c, keys)`` added to scores."""
    all_bounds = torch.stack((lo[:, 0], hi[:, 0]))
    mask = None
    # From the last one, which reads the most keys: the masks of others are often parts of its own.
    for chunk in reversed(chunks_of(lo[:, 0], hi[:, 0], size)):
        stop = max(1, min(chunk.last, num_keys))
        seen = slice(min(chunk.first, stop - 1), stop)  # at least one key, so that a chunk which sees none is 0, too
        if chunk.inner_first <= seen.start and seen.stop <= chunk.inner_last:
            yield chunk, seen, None
            continue
        bounds = all_bounds[..., chunk.queries] - chunk.inner_last
        first, last = seen.start - chunk.inner_last, seen.stop - chunk.inner_last
        if mask is None or not mask.holds(bounds, first, last):
            mask = _Mask.of(bounds, first, last, group, dtype)
        yield chunk, seen, mask.scores[..., first - mask.first : last - mask.first]


@dataclass(frozen=True, slots=True)
class _Mask:
    """A mask of keys ``[first, last)`` for ``bounds (2, B or 1, c)``, all counted from one key of the chunk."""

    bounds: Tensor
    first: int
    last: int
    scores: Tensor

    @classmethod
    def of(cls, bounds: Tensor, first: int, last: int, group: int, dtype: torch.dtype) -> _Mask:
        """Build the mask, 0 or ``-inf`` for each row of a group's queries."""
        lo, hi = bounds[..., None].unbind()
        key = torch.arange(first, last, dtype=lo.dtype, device=lo.device)
        hidden = (key < lo) | (key >= hi)
        scores = torch.zeros(hidden.shape, dtype=dtype, device=lo.device).masked_fill_(hidden, -torch.inf)
        return cls(bounds, first, last, scores.repeat(1, group, 1)[:, None])

    def holds(self, bounds: Tensor, first: int, last: int) -> bool:
        """Return whether the mask of other bounds is a part of this one."""
        inside = self.first <= first and last <= self.last
        return inside and torch.equal(self.bounds.clamp(first, last), bounds.clamp(first, last))


def _wide(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Give vectors the width that the kernel demands of all, in contiguous rows: of others it makes NaN."""
    x = with_rows(x.to(dtype))
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _rows(x: Tensor, copies: int, width: int, dtype: torch.dtype) -> Tensor:
    """Fold ``(b, h, G, c, D)`` to rows ``(b, h * copies, G / copies * c, width)``."""
    return _wide(x, width, dtype).reshape(len(x), x.shape[1] * copies, -1, width)


def _copies(q: Tensor) -> int:
    """Count the parts of a group that backward takes one by one, as it runs on no more threads than matrices."""
    group, matrices = q.shape[2], max(1, q.shape[0] * q.shape[1])
    least = torch.get_num_threads() / matrices
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and (parts >= least or parts == group))
