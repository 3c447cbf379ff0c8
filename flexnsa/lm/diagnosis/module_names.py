"""Places of a decoder: which modules can be looked at, and in words, which layer and branch or other part one is of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.projection import weight_of
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.model.head_loss import only_multiplies

_PARTS = {
    r"attention\.w_[kv]_(cmp|slc|win)\b.*": r"branch \1",
    r"attention\.phi_[kv]\b.*": "branch cmp",
    r"attention\.gate\b.*": "gate",
    r"attention\.w_q\b.*": "projection of the queries",
    r"attention\.w_o\b.*": "projection of the output",
    r"attention(\..*)?": "attention",
    r"mlp(\..*)?": "MLP",
    r"(attention|mlp)_norm\b.*": "norm",
}


def place_of(name: str) -> str:
    """Describe a module or parameter of :class:`flexnsa.lm.DecoderLM` by its name.

    Example:
        >>> place_of("layers.3.attention.w_v_slc")
        'layer 3, branch slc (attention.w_v_slc)'
    """
    if not name:
        return "head and loss"
    match = re.fullmatch(r"layers\.(\d+)(?:\.(.*))?", name)
    if match is None:
        return name
    layer, within = match.groups()
    if within is None:
        return f"layer {layer}"
    for pattern, words in _PARTS.items():
        found = re.fullmatch(pattern, within)
        if found:
            part = found.expand(words)
            return f"layer {layer}, {part}" + ("" if part == within else f" ({within})")
    return f"layer {layer}, {within}"


def modules_to_watch(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name the modules that hooks may hang on without changing what is computed.

    A head that is no more than its weight is left out: the loss never calls it, and would have to if it had a hook.
    """
    uncalled = model.head if isinstance(model, DecoderLM) and only_multiplies(model.head) else None
    return ((name, module) for name, module in model.named_modules() if module is not uncalled)


@torch.no_grad()
def failing_branch(layer: NativeSparseAttention, x: Tensor, options: Mapping[str, Any]) -> str | None:
    """Tell which branch of a layer gives something that is not finite, by running one after the other.

    Args:
        layer: as it stands; what it projects is finite.
        x: what it was called with, ``(B, S, dim)``.
        options: the keyword arguments of that call.
    """
    for tag in layer.branches:
        # Blocks are scored by the keys of the compressed branch, which has been found to be finite.
        tags = ("cmp", "slc") if tag == "slc" and "cmp" in layer.branches else (tag,)
        part = _part_of(layer, tags).to(weight_of(layer))
        if not bool(torch.isfinite(part(x, **options)).all()):
            return tag
    return None


def _part_of(layer: NativeSparseAttention, tags: tuple[str, ...]) -> NativeSparseAttention:
    """Return a layer of some branches that has the modules of ``layer``, but a fresh gate and a fresh ``w_o``."""
    part = NativeSparseAttention.of(layer.layer_config.with_branches(tags))
    for name, _ in part.named_children():
        if name not in ("gate", "w_o"):
            owner = name if hasattr(layer, name) else "w_k_slc"  # whose keys the compressed branch may share
            part.add_module(name, layer.get_submodule(owner))
    return part
