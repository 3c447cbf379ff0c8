"""How much of what the best blocks hold a converted model selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.functional.selection_loss import selection_recall
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.projection import weight_of
from flexnsa.primitives import check_integers, describe
from flexnsa.transformers.attention import ConvertedAttention


@torch.no_grad()
def recall(model: Any, input_ids: Tensor) -> Tensor:
    """Compare the blocks that a converted model selects with the best ones; see :func:`flexnsa.selection_recall`.

    Args:
        model: with the selected branch.
        input_ids: int ``(B, S)``, not padded.

    Returns:
        fp32 ``(L, Hkv)``, without the blocks that every choice has; NaN where there is none to choose.

    Raises:
        TypeError: ``input_ids`` is no tensor.
        ValueError: the model is not a converted one, or selects no blocks; or ``input_ids`` is no batch of sequences.
    """
    layers = [module for module in model.modules() if isinstance(module, ConvertedAttention)]
    if not layers or "slc" not in layers[0].options.branches:
        raise ValueError(f"model: expected a converted one with the branch slc, got {describe(type(model).__name__)}")
    check_integers("input_ids", input_ids, ("B", "S"), like=weight_of(layers[0].q_proj), as_of="the model")
    recalls: list[Tensor] = []

    def compare(layer: ConvertedAttention, _: Any, options: dict[str, Any]) -> None:
        x = options["hidden_states"]
        layout = layer.row_layout(x, None)
        _, read = layer.attend(x, layer.project(x, rows=True), layout, RowKeys(), (None, None), cached=False)
        keys, blocks = given(read.keys.k_slc), given(read.block_indices)
        recalls.append(selection_recall(read.q, keys, blocks, config=layer.options.sizes, scale=layer.scaling))

    hooks = [layer.register_forward_pre_hook(compare, with_kwargs=True) for layer in layers]
    try:
        model(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(recalls)
