"""Layers whose branches share a map."""

from __future__ import annotations

from flexnsa import NativeSparseAttention
from flexnsa.lm import DecoderLM


def share_keys(model: DecoderLM) -> DecoderLM:
    """Have the compressed branch compress the keys of the selected one, in every layer."""
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            layer.w_k_cmp = layer.w_k_slc
    return model
