"""Whole attention layers, projections, compression and gates included: ours, and another package's where installed."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import nn

from benchmarks.contestants import Contestant, Maker, Setting
from flexnsa import NativeSparseAttention

PEER = "native-sparse-attention-pytorch"


def nsa_layer(setting: Setting, length: int) -> Contestant:
    """Ours, of the width of all query heads."""
    width = setting.num_heads * setting.head_dim
    layer = NativeSparseAttention(
        width, setting.num_heads, setting.num_kv_heads, setting.head_dim, config=setting.config, impl=setting.impl
    )
    return _contestant("NSA layer", layer, setting, length)


def peer_layer(setting: Setting, length: int) -> Contestant:
    """The PyPI package's, its sizes the same; it adds a norm, and selects for all queries of a group as ours does."""
    package = importlib.import_module(PEER.replace("-", "_"))
    config = setting.config
    layer = package.SparseAttention(
        dim=setting.num_heads * setting.head_dim,
        dim_head=setting.head_dim,
        heads=setting.num_heads,
        kv_heads=setting.num_kv_heads,
        sliding_window_size=config.window_size,
        compress_block_size=config.compress_block_size,
        compress_block_sliding_stride=config.compress_stride,
        selection_block_size=config.select_block_size,
        num_selected_blocks=config.num_selected_blocks,
        causal=True,
    )
    return _contestant(PEER, layer, setting, length)


def _contestant(name: str, layer: nn.Module, setting: Setting, length: int) -> Contestant:
    layer = layer.to(setting.device, setting.dtype)
    x = torch.randn(
        1,
        length,
        setting.num_heads * setting.head_dim,
        dtype=setting.dtype,
        device=setting.device,
        requires_grad=True,
    )
    # Not every parameter of a layer need take part.
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    return Contestant(name, setting.compile(layer), (x,), (x, *weights), compiled=setting.backend is not None)


LAYERS: dict[str, Maker] = {"NSA layer": nsa_layer}
if importlib.util.find_spec(PEER.replace("-", "_")):
    LAYERS[PEER] = peer_layer
