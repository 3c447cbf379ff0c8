"""Which blocks the layers of a model select, each from its own input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSAConfig, block_importance, select_blocks
from flexnsa.config import INDEX_FIELDS
from flexnsa.layers.rope import apply_rope
from flexnsa.lm import DecoderLM


@torch.no_grad()
def layer_inputs(model: DecoderLM, tokens: Tensor) -> list[tuple[NativeSparseAttention, Tensor]]:
    """Let the model read ``tokens (B, S)``; give its layers of NSA and what each got, ``(B, S, dim)``."""
    inputs: list[Tensor] = []
    layers = [layer for layer in model.modules() if isinstance(layer, NativeSparseAttention)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return list(zip(layers, inputs, strict=True))


def gates_of(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """Return the weights of the layer's branches, ``(B, Hq, S, branches)``."""
    gates = layer.gate(x)
    one = torch.ones_like(next(iter(gates.values())))
    return torch.stack([gates.get(tag, one) for tag in layer.branches], -1)


@torch.no_grad()
def selected_blocks(layer: NativeSparseAttention, x: Tensor, *, impl: str = "auto") -> Tensor:
    """Project, compress, turn and select as the layer does; ``(B, Hkv, S, n)``."""
    return select_blocks(**scorer(layer, x), config=layer.config, impl=impl)


@torch.no_grad()
def unscored_blocks(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """Return the share of whole blocks before each token that score exactly 0, ``(B, S)``, mean over heads."""
    scores = block_importance(**scorer(layer, x), config=layer.config)
    before = torch.arange(x.shape[1], device=x.device) // layer.config.select_block_size
    visible = torch.arange(scores.shape[-1], device=x.device) < before[:, None]
    return ((scores == 0) & visible).sum(-1).float().mean(1) / before.clamp_min(1)


def scorer(layer: NativeSparseAttention, x: Tensor) -> dict[str, Any]:
    """Return what scores the blocks: queries and compressed keys, or those of an indexer."""
    q, k_cmp = scoring_inputs(layer, x)
    if layer.indexer is None:
        return {"q": q, "k_cmp": k_cmp}
    index, layout = layer.project(x).index, layer.layout(x.shape[1])
    assert index is not None
    k_index = apply_rope(layer.indexer.phi(index.k), layout.blocks["index"].tables)
    return {"q": q, "k_cmp": None, "q_index": apply_rope(index.q, layout.tokens), "k_index": k_index}


def of_compressed_branch(config: NSAConfig) -> NSAConfig:
    """Return the sizes without those of an indexer."""
    return replace(config, **dict.fromkeys(INDEX_FIELDS))


def scoring_inputs(layer: NativeSparseAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Project and compress; queries and compressed keys, both turned."""
    keys = "w_k_cmp" if hasattr(layer, "w_k_cmp") else "w_k_slc"
    q, k_cmp = (
        layer.get_submodule(name)(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for name in ("w_q", keys)
    )
    layout = layer.layout(x.shape[1])
    return apply_rope(q, layout.tokens), apply_rope(layer.phi_k(k_cmp), layout.blocks["cmp"].tables)
