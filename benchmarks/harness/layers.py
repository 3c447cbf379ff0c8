"""Whole attention layers, projections, compression and gates included: ours, and another package's where installed."""

from __future__ import annotations

import importlib
import importlib.util

from torch import nn

from benchmarks.harness.setting import Setting
from benchmarks.harness.workloads import Maker, Workload
from flexnsa import NativeSparseAttention

PEER = "native-sparse-attention-pytorch"


def nsa_layer(setting: Setting, length: int) -> Workload:
    layer = NativeSparseAttention(*setting.heads, config=setting.config, impl=setting.impl)
    return _workload("NSA layer", layer, setting, length)


def peer_layer(setting: Setting, length: int) -> Workload:
    """The PyPI package's, with the same width, heads, block sizes, window, number of blocks and size of compressors.

    What remains different is its own: one key and value for all branches where ours has three, a norm of the input, and
    the query's own block read in addition to the ``n`` instead of as one of them.
    """
    package = importlib.import_module(PEER.replace("-", "_"))
    config, dim = setting.config, setting.head_dim
    compressor = nn.Sequential(
        nn.Flatten(3),  # (B, Hkv, N, l, D)
        nn.Linear(config.compress_block_size * dim, 4 * dim, bias=False),
        nn.SiLU(),
        nn.Linear(4 * dim, dim, bias=False),
    )
    layer = package.SparseAttention(
        dim=setting.heads[0],
        dim_head=dim,
        heads=setting.num_heads,
        kv_heads=setting.num_kv_heads,
        sliding_window_size=config.window_size,
        compress_block_size=config.compress_block_size,
        compress_block_sliding_stride=config.compress_stride,
        selection_block_size=config.select_block_size,
        num_selected_blocks=config.num_selected_blocks,
        causal=True,
        compress_mlp=compressor,
    )
    return _workload(PEER, layer, setting, length)


def _workload(name: str, layer: nn.Module, setting: Setting, length: int) -> Workload:
    layer = layer.to(setting.device, setting.dtype)
    x = setting.random(1, length, setting.heads[0]).requires_grad_()
    # Not every parameter of a layer need take part.
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    return Workload(name, setting.compile(layer), (x,), (x, *weights))


LAYERS: dict[str, Maker] = {"NSA layer": nsa_layer}
if importlib.util.find_spec(PEER.replace("-", "_")):
    LAYERS[PEER] = peer_layer
