"""How well a model predicts text at each position, and how well with other blocks than those it selects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.phases import random_blocks
from benchmarks.harness.setting import Setting
from benchmarks.learning.selection import gates_of, of_compressed_branch, scoring_inputs, selected_blocks
from flexnsa import NativeSparseAttention, block_shares, native_sparse_attention
from flexnsa.attention.selection import top_blocks
from flexnsa.layers.layouts import LayoutSizes, RowLayout
from flexnsa.layers.rope import apply_rope
from flexnsa.lm import Batch, DecoderLM
from flexnsa.lm.model.decoder import DecoderLayer
from flexnsa.masks.positions import Positions

Choose = Callable[[NativeSparseAttention, Tensor], Tensor]
"""``(layer, x (B, S, dim))`` to the blocks that each query reads, int32 ``(B, Hkv, S, n)``."""
CHOICES = ("own", "best", "initial", "random", "forced")
"""Names of those of :func:`choices`."""


@torch.no_grad()
def bits_of_bytes(model: DecoderLM, batch: Batch, rows: int, precision: torch.autocast) -> Tensor:
    """Return the bits that each target costs, fp32 ``(B, S)`` on the CPU; so many rows are read at once."""
    device, bits = model.embedding.weight.device, list[Tensor]()
    for part in batch.split(rows):
        with precision:
            logits = model(part.tokens.to(device))
        nats = F.cross_entropy(logits.float().flatten(0, 1), part.targets.to(device).flatten(), reduction="none")
        bits.append((nats / math.log(2)).view_as(part.tokens).cpu())
    return torch.cat(bits)


class Reading(nn.Module):
    """A layer of NSA that reads the blocks that it is told to."""

    def __init__(self, layer: NativeSparseAttention, choose: Choose) -> None:
        super().__init__()
        self.layer, self.choose = layer, choose

    @property
    def layout_sizes(self) -> LayoutSizes:
        """Share layouts with layers that the layer shares its own with."""
        return self.layer.layout_sizes

    def row_layout(self, x: Tensor, document_ids: Tensor | None) -> RowLayout:
        """Lay out rows as the layer does."""
        return self.layer.row_layout(x, document_ids)

    def forward(self, x: Tensor, *, layout: RowLayout, **options: Any) -> Tensor:
        """Attend as the layer does, but for the blocks."""
        layer = self.layer
        q, k_cmp = scoring_inputs(layer, x)
        keys = {name: self._project(name, x) for name in ("k_slc", "v_slc", "v_cmp", "k_win", "v_win")}
        out = native_sparse_attention(
            q,
            apply_rope(keys["k_slc"], layout.tokens),
            keys["v_slc"],
            gates_of(layer, x),
            k_cmp=k_cmp,
            v_cmp=layer.phi_v(keys["v_cmp"]),
            k_win=apply_rope(keys["k_win"], layout.tokens),
            v_win=keys["v_win"],
            config=of_compressed_branch(layer.config),
            block_indices=self.choose(layer, x),
            impl=layer.impl,
            **options,
        )
        return layer.w_o(out.transpose(1, 2).flatten(2))

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self.layer.get_submodule(f"w_{name}")(x).unflatten(-1, (self.layer.num_kv_heads, -1)).transpose(1, 2)


@contextmanager
def blocks_chosen(model: DecoderLM, choices: list[Choose]) -> Iterator[None]:
    """Have each layer of a model of NSA read the blocks of its choice."""
    layers = [cast("DecoderLayer", layer) for layer in model.layers]
    attentions = [layer.attention for layer in layers]
    for layer, attention, choose in zip(layers, attentions, choices, strict=True):
        assert isinstance(attention, NativeSparseAttention)
        layer.attention = cast("NativeSparseAttention", Reading(attention, choose))
    try:
        yield
    finally:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.attention = attention


def choices(model: DecoderLM, initial: DecoderLM) -> dict[str, list[Choose]]:
    """Return the ways to choose that are compared, each for all layers.

    ``own``: what the layers select. ``best``: those of most softmax over all past keys. ``initial``: what they would,
    were the weights that score blocks those from before training. ``random``: as many blocks, drawn again for each
    query and head. ``forced``: the first and the last blocks alone. All read the forced blocks.
    """
    beginnings = [module for module in initial.modules() if isinstance(module, NativeSparseAttention)]
    count = len(model.layers)
    return {
        "own": [selected_blocks] * count,
        "best": [best_blocks] * count,
        "initial": [lambda _, x, layer=layer: selected_blocks(layer, x) for layer in beginnings],
        "random": [drawn_blocks] * count,
        "forced": [forced_blocks] * count,
    }


def best_blocks(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """Return the blocks that hold most of the selected branch's softmax over all past keys."""
    q, k = (
        layer.get_submodule(name)(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for name in ("w_q", "w_k_slc")
    )
    tokens = layer.layout(x.shape[1]).tokens
    shares = block_shares(apply_rope(q, tokens), apply_rope(k, tokens), config=of_compressed_branch(layer.config))
    return top_blocks(shares, Positions.of_sequence(x.shape[1], x.device), config=layer.config)


def drawn_blocks(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """Draw blocks for each query and head, in addition to the forced ones, evenly from the past."""
    setting = Setting(num_kv_heads=layer.num_kv_heads, config=layer.config, device=str(x.device))
    return torch.cat([random_blocks(setting, x.shape[1]) for _ in x])


def forced_blocks(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """Return the forced blocks and no others."""
    config, length = layer.config, x.shape[1]
    few = replace(config, num_selected_blocks=config.num_init_blocks + config.num_local_blocks)
    scores = torch.zeros(1, 1, length, -(-length // config.select_block_size), device=x.device)
    blocks = top_blocks(scores, Positions.of_sequence(length, x.device), config=few)
    blocks = F.pad(blocks, (0, config.num_selected_blocks - blocks.shape[-1]), value=-1)
    return blocks.expand(len(x), layer.num_kv_heads, -1, -1).contiguous()
