"""Which blocks the layers of a model select, each from its own input."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, select_blocks
from flexnsa.layers.rope import apply_rope
from flexnsa.models import DecoderLM


@torch.no_grad()
def layer_inputs(model: DecoderLM, tokens: Tensor) -> list[tuple[NativeSparseAttention, Tensor]]:
    """Let the model read ``tokens (B, S)``; give its layers of NSA and what each got, ``(B, S, dim)``."""
    inputs: list[Tensor] = []
    layers = [layer for layer in model.modules() if isinstance(layer, NativeSparseAttention)]
    hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for layer in layers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return list(zip(layers, inputs, strict=True))


@torch.no_grad()
def selected_blocks(layer: NativeSparseAttention, x: Tensor, *, impl: str = "auto") -> Tensor:
    """Project, compress, turn and select as the layer does; ``(B, Hkv, S, n)``."""
    scored = "w_k_cmp" if "cmp" in layer.branches else "w_k_slc"
    q, k_cmp = (
        layer.get_submodule(name)(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for name in ("w_q", scored)
    )
    layout = layer.layout(x.shape[1])
    q, k_cmp = apply_rope(q, layout.tokens), apply_rope(layer.phi_k(k_cmp), layout.blocks)
    return select_blocks(q, k_cmp, config=layer.config, impl=impl)
