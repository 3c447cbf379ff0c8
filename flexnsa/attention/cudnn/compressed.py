"""The compressed branch of whole sequences as plain causal attention, which the fastest kernels of all compute.

Compressed tokens become visible one by one, each to a run of ``d`` more queries: the run that begins at token ``l - 1``
sees one of them, the next run two. So the queries at the same place of their runs attend causally, and the ``d`` places
are ``d`` such attentions to the same keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.cudnn.shared_keys import LARGEST_DIM, shared_keys_attention
from flexnsa.attention.seam import Attended, Call, Compressed, given


def fits(q: Tensor, v_cmp: Tensor, call: Call) -> bool:
    """Tell whether there is a kernel, and nothing that only FlexAttention knows: mods, documents, a cache.

    cuDNN adds the gradients of q up in any order, so it is not for those who demand deterministic algorithms.
    """
    whole = call.score_mod is None and call.positions is None
    long = q.shape[2] >= call.config.compress_block_size - 1 + call.config.compress_stride
    dims = q.shape[-1] == v_cmp.shape[-1] <= LARGEST_DIM and q.shape[-1] % 8 == 0
    return (
        whole
        and long
        and dims
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.device.type == "cuda"
        and torch.cuda.get_device_properties(q.device).major >= 9
        and not torch.are_deterministic_algorithms_enabled()
    )


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that are complete (NSA paper, section 3.3.1), from a whole sequence.

    Args:
        q: ``(B, Hq, S, D)``; ``S`` is at least ``l - 1 + d``.
        k_cmp: ``(B, Hkv, N, D)``.
        v_cmp: ``(B, Hkv, N, D)``.
        call: see :class:`flexnsa.attention.seam.Call`; no mods, no positions.
    """
    seq_len, scale = q.shape[2], call.scale
    first, stride = call.config.compress_block_size - 1, call.config.compress_stride
    runs = (seq_len - first) // stride
    end = first + runs * stride

    places = q[:, :, first:end].unflatten(2, (runs, stride)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    k, v = k_cmp[:, :, :runs], v_cmp[:, :, :runs]
    causal = _in_order(shared_keys_attention(places, k, v, scale, causal=True), len(q))
    nothing = q[:, :, :first]
    before = Attended(torch.zeros_like(nothing), torch.full_like(nothing[..., 0], -torch.inf, dtype=torch.float32))
    parts = [before, causal]
    if end < seq_len:  # a run that is not whole sees all
        parts.append(shared_keys_attention(q[:, :, end:], k_cmp, v_cmp, scale, causal=False))
    return Compressed(torch.cat([part.out for part in parts], 2), torch.cat([given(part.lse) for part in parts], 2))


def _in_order(places: Attended, batch: int) -> Attended:
    """Put ``(B * d, H, runs, ...)`` back into the order of the tokens, ``(B, H, runs * d, ...)``."""
    out, lse = (given(x).unflatten(0, (batch, -1)) for x in places)
    return Attended(out.permute(0, 2, 3, 1, 4).flatten(2, 3), lse.permute(0, 2, 3, 1).flatten(2, 3))
