"""From a layer and a few new tokens to a decoding step that is computed at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flexnsa.attention.plan import fits_one_step
from flexnsa.attention.step import IndexInputs, StepInputs
from flexnsa.cache.cache import NSACache
from flexnsa.layers.compression import as_phi
from flexnsa.layers.core import Compressors
from flexnsa.layers.gating import Gate
from flexnsa.layers.indexer import Indexer, IndexHeads
from flexnsa.layers.projection import has_no_hooks, is_plain


def takes_step(
    x: Tensor,
    cache: NSACache,
    maps: Iterable[nn.Linear],
    gate: nn.Module,
    compressors: Compressors,
    indexer: Indexer | None,
) -> bool:
    """Return whether a step can be computed at once: few tokens, and modules without hooks or a forward of their own.

    Computed branch by branch instead are layers with hooks, biases or other compressors, calls under autocast, and
    caches that count their reads.
    """
    hooked = indexer is not None and not all(map(has_no_hooks, indexer.modules()))
    if hooked or not fits_step(x, cache, compressors):
        return False
    linears = [*maps, *([] if indexer is None else indexer.maps)]
    plain = type(gate) is Gate and has_no_hooks(gate) and all(map(is_plain, linears))
    return plain and all(_is_ready(linear.weight, cache) for linear in linears)


def fits_step(x: Tensor, cache: NSACache, compressors: Compressors) -> bool:
    """Return whether a step fits its kernels, and whether these compress as the modules do."""
    tokens, dims = x.shape[1], (cache.head_dim, cache.v_head_dim)
    if (
        tokens > cache.max_rewind
        or cache.config.index_score is not None
        or not fits_one_step(tokens, x.shape[0] * cache.num_kv_heads, dims)
    ):
        return False
    if cache.reads is not None or torch.is_autocast_enabled(x.device.type):
        return False
    parameters: list[Tensor] = []
    for compressor in compressors:
        if compressor is not None:
            phi = as_phi(compressor)
            if phi is None:
                return False
            parameters += phi.parameters
    return x.dtype == cache.dtype and all(_is_ready(y, cache) for y in parameters)


def lay_out_step(
    cache: NSACache,
    lengths: Tensor | None,
    compressors: Compressors,
    *,
    q: Tensor,
    k: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    gates: Tensor,
    gate: str,
    index: IndexHeads | None,
    num_heads: int,
    scale: float,
    rope_base: float = 10_000.0,
    frequencies: Tensor | None = None,
    rope_scale: float = 1.0,
    block_indices: Tensor | None = None,
) -> StepInputs:
    """Put what a layer projected beside its cache and its compressors; the names are those of the step's inputs."""
    phi_index = as_phi(compressors.phi_index)
    of_index = None
    if index is not None and phi_index is not None:
        q_index, k_index = (each.transpose(1, 2).flatten(2) for each in index)
        of_index = IndexInputs(q_index, k_index, phi_index)
    return StepInputs(
        q=q,
        k=k,
        v=v,
        gates=gates,
        gate=gate,
        num_heads=num_heads,
        scale=scale,
        rope_base=rope_base,
        frequencies=frequencies,
        rope_scale=rope_scale,
        phi_k=as_phi(compressors.k),
        phi_v=as_phi(compressors.v),
        buffers=cache.buffers,
        lengths=cache.lengths,
        reached=cache.reached,
        new_lengths=None if lengths is None else lengths.contiguous(),
        max_seq_len=cache.max_seq_len,
        config=cache.config,
        index=of_index,
        block_indices=block_indices,
    )


def _is_ready(parameter: Tensor, cache: NSACache) -> bool:
    """Return whether a kernel can read a parameter with the cache."""
    return parameter.dtype == cache.dtype and parameter.is_contiguous()
