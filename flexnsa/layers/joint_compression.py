"""Compression of keys and of values in the same launches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.layers.compression import LinearCompressor, MLPCompressor, as_phi, check_input, map_blocks
from flexnsa.layers.projection import multiply


def compress_both(phi_k: object, phi_v: object, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compress the blocks of keys and of values, which start every ``d``, by batched products.

    None where both compressors have to be called: those of different sizes, those that do more than compute with their
    weights, and on a CPU, which gains nothing.
    """
    if not isinstance(phi_k, LinearCompressor | MLPCompressor) or not isinstance(phi_v, type(phi_k)):
        return None
    config, weights_k, weights_v = phi_k.project.config, as_phi(phi_k), as_phi(phi_v)
    if not k.is_cuda or weights_k is None or weights_v is None or phi_v.project.config != config:
        return None
    pairs = list(zip(weights_k.parameters, weights_v.parameters, strict=True))
    if (k.shape, k.dtype) != (v.shape, v.dtype) or any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return None
    for x in (k, v):
        check_input(x, None, phi_k.shape, config, phi_k.project.weight)
    # Not torch.stack: a batched product lays out the gradient of its weights transposed, and autograd would copy each
    # part to the layout of its parameter. That of joined weights is copied once, before it is split.
    position, weight, *out = (torch.unflatten(torch.cat(pair), 0, (2, -1)) for pair in pairs)
    # Nor here: other branches read the keys, too, so Inductor would write the stack, then copy it to segments.
    both = map_blocks(torch.cat((k[None], v[None])), position, weight, config)
    for_k, for_v = (multiply(F.silu(both), out[0]) if out else both).unbind()
    return for_k, for_v
