"""Places of a decoder in words: which layer, and which branch or other part of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.projection import weight_of

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
    """Describe a module or parameter of :class:`flexnsa.models.DecoderLM` by its name.

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
    """Give a layer that shares the projections of some branches, with fresh gates and a fresh ``w_o``."""
    sizes = layer.dim, layer.num_heads, layer.num_kv_heads, layer.head_dim
    options: dict[str, Any] = {"v_head_dim": layer.v_head_dim, "config": layer.config, "rope_base": layer.rope_base}
    part = NativeSparseAttention(*sizes, **options, branches=tags, impl=layer.impl)
    for name, module in layer.named_children():
        if hasattr(part, name) and name not in ("gate", "w_o"):
            part.add_module(name, module)
    if layer.shared_keys and "cmp" in tags:
        part.w_k_cmp = layer.w_k_slc
    return part
