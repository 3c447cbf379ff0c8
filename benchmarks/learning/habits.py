"""What the layers of a trained model do with text: which blocks they select, and how wide their attention is.

Measures are of queries that have more than ``n`` blocks to choose from, and of what they choose freely: forced blocks
count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.reading import drawn_blocks
from benchmarks.learning.selection import (
    gates_of,
    layer_inputs,
    of_compressed_branch,
    scoring_inputs,
    selected_blocks,
    unscored_blocks,
)
from flexnsa import NativeSparseAttention, NSAConfig, block_importance
from flexnsa.lm import DecoderLM
from flexnsa.lm.diagnosis.selection import trace_selection

STEPS_APART = (1, 4, 16, 64, 256, 1024)
"""Tokens between two queries whose blocks are compared."""
MEANS = ("chosen", "random", "entropy_if_even")
"""Measures that are recorded as means over layers."""
Measured = dict[str, Any]


@torch.no_grad()
def habits(model: DecoderLM, tokens: Tensor, precision: torch.autocast) -> Measured:
    """Measure the layers of NSA on ``tokens (B, S)``; all values are means over sequences.

    Returns:
        By layer ``entropy`` of the compressed attention in bits, ``unscored`` blocks, and of the chosen blocks
        ``captured`` and ``shared`` with the query before; ``gates`` by branch, then layer. Means over layers: the rest
        of :func:`block_habits` of ``chosen`` blocks, all of it of ``random`` ones, and ``entropy_if_even``. What no
        query of the sequences measures is left out.
    """
    with precision:
        layers = [_mean([_row_habits(layer, row[None]) for row in x]) for layer, x in layer_inputs(model, tokens)]
    chosen = [layer["chosen"] for layer in layers]
    by_layer = {name: [layer[name] for layer in layers] for name in ("entropy", "unscored")}
    by_layer |= {"captured": [each.pop("captured") for each in chosen]}
    by_layer |= {"shared": [each["shared"].pop(1) for each in chosen if each["shared"]]}
    by_layer |= {"gates": torch.stack([layer["gates"] for layer in layers], 1)}
    return _plain(by_layer | {name: _mean([layer[name] for layer in layers]) for name in MEANS})


@torch.no_grad()
def mean_gates(model: DecoderLM, tokens: Tensor, precision: torch.autocast) -> list[list[float]]:
    with precision:
        return [
            [round(gate, 3) for gate in gates_of(layer, x).float().mean((0, 1, 2)).tolist()]
            for layer, x in layer_inputs(model, tokens)
        ]


def mean_selection(model: DecoderLM, tokens: Tensor, precision: torch.autocast) -> list[list[list[float]]]:
    """Return the recall of the chosen blocks and the attention that they miss, each by layer and key head."""
    with precision:
        traced = sorted(trace_selection(model, tokens), key=lambda head: (head.layer, head.head))
    heads = model.config.num_kv_heads
    return [
        [[round(value, 4) for value in values[start : start + heads]] for start in range(0, len(values), heads)]
        for values in ([head.recall for head in traced], [head.missed for head in traced])
    ]


def _row_habits(layer: NativeSparseAttention, x: Tensor) -> Measured:
    config, first = of_compressed_branch(layer.config), first_that_chooses(layer.config)
    q, k_cmp = (part.float() for part in scoring_inputs(layer, x))
    gates, unscored = gates_of(layer, x).float().mean((0, 1, 2)), unscored_blocks(layer, x)[:, first:].mean()
    chosen, drawn = selected_blocks(layer, x), drawn_blocks(layer, x)
    with torch.autocast(x.device.type, enabled=False):
        importance = block_importance(q, k_cmp, config=config)
        return {
            "chosen": block_habits(chosen, importance, config),
            "random": block_habits(drawn, importance, config),
            "unscored": unscored,
            "entropy": head_entropies(q, k_cmp, config).mean(),
            "entropy_if_even": _visible(x.shape[1], config, x.device)[first:].sum(-1).double().log2().mean(),
            "gates": gates,
        }


def first_that_chooses(config: NSAConfig) -> int:
    """Return the first token with more than ``n`` blocks to choose from."""
    return config.num_selected_blocks * config.select_block_size


def block_habits(blocks: Tensor, importance: Tensor, config: NSAConfig) -> Measured:
    """Measure ``blocks (B, Hkv, S, n)`` against the scores of all, ``importance (B, Hkv, S, M)``.

    Returns:
        ``shared``: by steps apart, which share of a query's blocks an earlier query has chosen too. ``back``: which
        share of the blocks lies at least 1, 2, 4, ... blocks before the query's own. ``captured``: which share of the
        compressed attention that free blocks get goes to those chosen.
    """
    first, (length, count) = first_that_chooses(config), importance.shape[-2:]
    token, block = torch.arange(length, device=blocks.device), torch.arange(count, device=blocks.device)
    back = token[:, None] // config.select_block_size - block
    free = (back >= config.num_local_blocks) & (block >= config.num_init_blocks)
    chosen = torch.zeros((*blocks.shape[:-1], count + 1), dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(-1, torch.where(blocks < 0, count, blocks).long(), True)[..., :-1] & free
    late = chosen[:, :, first:]
    total = late.sum()
    shared = {
        steps: (late[:, :, steps:] & late[:, :, :-steps]).sum() / late[:, :, steps:].sum()
        for steps in STEPS_APART
        if steps < late.shape[2]
    }
    octaves = [2**octave for octave in range((count - 1).bit_length())]
    all_free, got = importance * free, importance * chosen
    return {
        "shared": shared,
        "back": {least: (late & (back[first:] >= least)).sum() / total for least in octaves},
        "captured": (got[:, :, first:].sum(-1) / all_free[:, :, first:].sum(-1).clamp_min(1e-9)).mean(),
    }


def head_entropies(q: Tensor, k_cmp: Tensor, config: NSAConfig) -> Tensor:
    """Return the entropy of each head's compressed attention in bits, ``(Hq,)``, mean over queries."""
    groups = q.shape[1] // k_cmp.shape[1]
    scores = q @ k_cmp.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    first = first_that_chooses(config)
    hidden = ~_visible(q.shape[2], config, q.device)
    log_p = scores.masked_fill(hidden, -torch.inf)[:, :, first:].log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(hidden[first:], 0)).sum(-1).mean((0, 2)) / math.log(2)


def _visible(length: int, config: NSAConfig, device: torch.device) -> Tensor:
    """Return which compressed tokens a query sees, ``(S, N)``."""
    last = torch.arange(0, length - config.compress_block_size + 1, config.compress_stride, device=device)
    last += config.compress_block_size - 1
    return last <= torch.arange(length, device=device)[:, None]


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    return torch.stack([value.double().cpu() for value in values]).mean(0)


def _plain(value: Any) -> Any:
    """Turn nested tensors into numbers of four decimals."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value.round(decimals=4).tolist()
