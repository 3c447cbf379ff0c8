"""How much of what the best blocks hold each key head of a model selects, on text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.selection_loss import found_and_best
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.layouts import RowKeys, RowLayout
from flexnsa.layers.rope import apply_rope
from flexnsa.lm.measure.table import Report, format_table
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.primitives import check_type


@dataclass(frozen=True, slots=True)
class HeadSelection:
    """What a key head selects, of the softmax of the selected branch over all past keys.

    Args:
        layer: index of the layer.
        head: index of the key head.
        recall: share of the chosen blocks over that of the best ones, without the forced blocks; NaN if every block
            is forced.
        recall_with_forced: the same with them.
        missed: share of the best blocks that was not chosen, a mean over all queries.
        gates: mean weight of each branch of the layer, over queries and the heads of the group.
    """

    layer: int
    head: int
    recall: float
    recall_with_forced: float
    missed: float
    gates: dict[str, float]


def trace_selection(model: DecoderLM, tokens: Tensor) -> list[HeadSelection]:
    """Compare the blocks that a model selects with the best ones, those that miss most first.

    Args:
        model: with NSA and the ``slc`` branch; it is left as it was.
        tokens: int ``(B, S)``.

    Raises:
        TypeError: the model is not a :class:`DecoderLM`.
        ValueError: it selects no blocks.
    """
    check_type("model", model, DecoderLM)
    if model.config.attention != "nsa" or "slc" not in model.config.branches:
        raise ValueError("model: expected NSA with the branch slc, got one that selects no blocks")
    traced: list[HeadSelection] = []

    def trace(layer: NativeSparseAttention, inputs: tuple[Tensor], options: Mapping[str, Any]) -> None:
        traced.extend(_trace_layer(len(traced) // layer.num_kv_heads, layer, inputs[0], options["layout"]))

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if isinstance(module, NativeSparseAttention):
                hooks.enter_context(module.register_forward_pre_hook(trace, with_kwargs=True))
        model(tokens)
    return sorted(traced, key=lambda head: head.missed, reverse=True)


def _trace_layer(index: int, layer: NativeSparseAttention, x: Tensor, layout: RowLayout) -> list[HeadSelection]:
    heads = layer.project(x)
    _, read = layer.attend(x, heads, layout, RowKeys(), (None, None), cached=False)
    q, k = apply_rope(heads.q, layout.tokens), given(read.keys.k_slc)
    (chosen, best), (chosen_with_forced, best_with_forced) = (
        found_and_best(q, k, given(read.block_indices), read.call, forced=forced) for forced in (False, True)
    )
    missed = (best - chosen) / (x.shape[0] * x.shape[1])
    of_heads = torch.stack((chosen / best, chosen_with_forced / best_with_forced, missed), dim=1).tolist()
    kv_heads = k.shape[1]
    gates = {tag: [1.0] * kv_heads for tag in layer.branches}
    for tag, gate in heads.gates.items():  # (B, Hq, S): a mean over sequences, tokens and the query heads of a key head
        gates[tag] = torch.unflatten(gate, 1, (kv_heads, -1)).float().mean((0, 2, 3)).tolist()
    return [
        HeadSelection(index, head, *numbers, gates={tag: gates[tag][head] for tag in gates})
        for head, numbers in enumerate(of_heads)
    ]


def report_selection(model: DecoderLM, tokens: Tensor) -> Report:
    """Report the head that misses most, and a line for each."""
    traced = trace_selection(model, tokens)
    worst, recalls = traced[0], [head.recall for head in traced if not isnan(head.recall)]
    sentence = "nothing to choose: every block of these sequences is forced."
    if recalls:
        sentence = (
            f"layer {worst.layer}, key head {worst.head} finds {worst.recall:.3f} of what the best blocks hold, and "
            f"misses {worst.missed:.3f} of its attention; {sum(recalls) / len(recalls):.3f} is found in the mean of "
            f"{len(recalls)} heads."
        )
    rows = [
        [f"layer {head.layer}, head {head.head}"]
        + [f"{number:.3f}" for number in (head.recall, head.recall_with_forced, head.missed, *head.gates.values())]
        for head in traced
    ]
    heads = [{name: x if x == x else None for name, x in asdict(head).items()} for head in traced]  # JSON has no NaN
    return Report(
        sentence=sentence,
        table=format_table(["", "recall", "with forced", "missed", *(f"gate {tag}" for tag in worst.gates)], rows),
        record={"seq_len": tokens.shape[1], "sequences": tokens.shape[0], "heads": heads},
    )
