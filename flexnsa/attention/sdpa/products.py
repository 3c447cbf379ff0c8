"""Attention to intervals of keys by separate products and exponentials, on any device.

A chunk masks only the keys that not all of its queries see. Backward recomputes its probabilities from q, k and lse, as
FlashAttention does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.sdpa.chunks import ALIGNED, Chunk, IntervalInputs, chunks_of
from flexnsa.attention.threads import grouped, heads_at_once, repeated, run_heads_in_threads


def _fold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Fold the queries of a group into rows: ``(B, Hkv, G, c, D)`` to ``(B * Hkv, G * c, D)``."""
    return x.to(dtype).flatten(2, 3).flatten(0, 1)


def _padded(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Copy keys or values to ``(B * Hkv, length, D)``, padded with zeros."""
    out = torch.zeros(*x.shape[:2], length, x.shape[3], dtype=dtype, device=x.device)
    out[:, :, : x.shape[2]] = x
    return out.flatten(0, 1)


def _scores(q: Tensor, k: Tensor, lo: Tensor, hi: Tensor, chunk: Chunk, workspace: Tensor) -> Tensor:
    """Compute the chunk's scores ``(B * Hkv, G * c, last - first)`` in the workspace, ``-inf`` where masked."""
    shape = (q.shape[0], q.shape[1], chunk.last - chunk.first)
    scores = workspace[: shape[0] * shape[1] * shape[2]].view(shape)
    torch.bmm(q, k[:, chunk.first : chunk.last].mT, out=scores)
    lo, hi = (x[..., chunk.start : chunk.stop].flatten(0, 1)[:, None, :, None] for x in (lo, hi))
    per_row = torch.unflatten(scores, 1, (-1, chunk.stop - chunk.start))  # (B * Hkv, G, c, keys)
    for part in chunk.ragged():
        key = torch.arange(chunk.first + part.start, chunk.first + part.stop, dtype=lo.dtype, device=lo.device)
        per_row[..., part].masked_fill_((key < lo) | (key >= hi), -torch.inf)
    return scores


def _workspace(q: Tensor, chunks: list[Chunk], dtype: torch.dtype) -> Tensor:
    """Allocate memory for the scores of the largest chunk; allocating for each chunk would take most of the time."""
    largest = max((c.stop - c.start) * max(0, c.last - c.first) for c in chunks)
    return q.new_empty(q.shape[:3].numel() * largest, dtype=dtype)


def attend_by_products(inputs: IntervalInputs) -> tuple[Tensor, Tensor]:
    """As :func:`flexnsa.attention.sdpa.interval.attend_to_intervals`."""
    q, k, v, lo, hi, scale, chunk_size = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)

    def attend(*views: Tensor) -> None:
        q, out, lse, k, v, lo, hi = views
        chunks = chunks_of(lo, hi, chunk_size)
        past = max((chunk.last for chunk in chunks), default=0)  # of a cache most keys may be in the future
        k_acc, v_acc = _padded(k[:, :, :past], past, dtype).mul_(scale * LOG2_E), _padded(v[:, :, :past], past, dtype)
        workspace = _workspace(q, chunks, dtype)
        for chunk in chunks:
            if chunk.first >= chunk.last:
                continue
            queries = slice(chunk.start, chunk.stop)
            probs = _scores(_fold(q[..., queries, :], dtype), k_acc, lo, hi, chunk, workspace)
            top = probs.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
            total = probs.sub_(top).exp2_().sum(-1, keepdim=True)
            values = torch.bmm(probs, v_acc[:, chunk.first : chunk.last]).div_(total.clamp_min(torch.finfo(dtype).tiny))
            out[..., queries, :] = values.view_as(out[..., queries, :])
            lse_c = torch.where(total == 0, -torch.inf, (top + total.double().log2()) / LOG2_E)
            lse[..., queries] = lse_c.view_as(lse[..., queries])

    run_heads_in_threads(
        attend, (*grouped(k, q, out, lse), k, v, *repeated(k, lo, hi)), heads_at_once(q, k, chunk_size)
    )
    return out, lse


def differentiate_by_products(
    grad_out: Tensor, grad_lse: Tensor | None, inputs: IntervalInputs, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attend_by_products`."""
    q, k, v, lo, hi, scale, chunk_size = inputs
    dtype = lse.dtype
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    grad_q, grad_k, grad_v = q.new_zeros(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def differentiate(*views: Tensor) -> None:
        q, out, lse, grad_out, grad_lse, grad_q, k, v, grad_k, grad_v, lo, hi = views
        chunks = chunks_of(lo, hi, chunk_size)
        # lse = inf gives a row without keys probabilities of 0, not NaN.
        lse_2 = (lse.double() * LOG2_E).to(dtype).masked_fill_(lse == -torch.inf, torch.inf)
        length = -(-k.shape[2] // ALIGNED) * ALIGNED
        k_acc, v_acc = _padded(k, length, dtype).mul_(scale * LOG2_E), _padded(v, length, dtype)
        grad_k_acc, grad_v_acc = torch.zeros_like(k_acc), torch.zeros_like(v_acc)
        workspace, grad_workspace = (_workspace(q, chunks, dtype) for _ in range(2))
        for chunk in chunks:
            if chunk.first >= chunk.last:
                continue
            queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.last)
            q_c, out_c, grad_out_c = (_fold(x[..., queries, :], dtype) for x in (q, out, grad_out))
            lse_c, grad_lse_c = (_fold(x[..., queries, None], dtype) for x in (lse_2, grad_lse))
            probs = _scores(q_c, k_acc, lo, hi, chunk, workspace).sub_(lse_c).exp2_()
            grad_v_acc[:, keys].baddbmm_(probs.mT, grad_out_c)
            row_term = (grad_out_c * out_c).sum(-1, keepdim=True).sub_(grad_lse_c)
            grad_scores = grad_workspace[: probs.numel()].view_as(probs)
            torch.bmm(grad_out_c, v_acc[:, keys].mT, out=grad_scores).sub_(row_term).mul_(probs)
            grad_q_c = torch.bmm(grad_scores, k_acc[:, keys]).div_(LOG2_E)
            grad_q[..., queries, :] = grad_q_c.view_as(grad_q[..., queries, :])
            grad_k_acc[:, keys].baddbmm_(grad_scores.mT, q_c)
        grad_k.copy_(grad_k_acc[:, : k.shape[2]].mul_(scale).view_as(grad_k))
        grad_v.copy_(grad_v_acc[:, : v.shape[2]].view_as(grad_v))

    by_group = grouped(k, q, out, lse, grad_out, grad_lse, grad_q)
    views = (*by_group, k, v, grad_k, grad_v, *repeated(k, lo, hi))
    run_heads_in_threads(differentiate, views, heads_at_once(q, k, chunk_size))
    return grad_q, grad_k, grad_v
