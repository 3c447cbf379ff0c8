"""What NSA needs of a dense attention layer: projections, norms, sinks and sizes, found by looking at the module."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.attention.interface import given
from flexnsa.layers.projection import is_dense
from flexnsa.primitives import describe

SEPARATE, FUSED = ("q_proj", "k_proj", "v_proj"), "qkv_proj"
JOINT, INDEX_NORMS = "index_qk_proj", {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
"""The joint projection of a QSA's indexer; the names of our norms there."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a dense layer: projections, norms, sinks ``(Hq,)`` and modules of an indexer if it has any, sizes.

    ``out_gate`` maps the input to the logits of gates on the heads' outputs. ``scale`` is the factor on the scores.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: Tensor | None
    out_gate: nn.Linear | None
    indexer: Mapping[str, nn.Module] | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @classmethod
    def of(cls, dense: Any) -> Parts:
        """Find the parts of a layer.

        Raises:
            ValueError: it lacks one, or one does not fit the others.
        """
        names = ("o_proj", FUSED) if hasattr(dense, FUSED) else (*SEPARATE, "o_proj")
        for name in names:
            if not hasattr(getattr(dense, name, None), "out_features"):
                present = ", ".join(name for name, _ in dense.named_children())
                raise ValueError(f"{name}: expected a projection of that name in attention, got {present}")
        head_dim, scale, index = (getattr(dense, name, None) for name in ("head_dim", "scaling", "layer_idx"))
        if not isinstance(head_dim, int) or not isinstance(scale, int | float) or not isinstance(index, int):
            raise ValueError(f"head_dim: expected it, scaling and layer_idx, got a {type(dense).__name__} without one")
        if getattr(dense, FUSED, None) is not None:
            counts = dense.config.num_attention_heads, *[dense.config.num_key_value_heads] * 2
            q, k, v = _split(FUSED, getattr(dense, FUSED), [count * head_dim for count in counts])
        else:
            q, k, v = (getattr(dense, name) for name in SEPARATE)
        out_gate, width = None, getattr(dense.o_proj, "in_features", 0)
        if q.out_features == 2 * width:  # each head's gate lies behind its queries
            q, out_gate = _split("q_proj", q, [head_dim] * 2, width // head_dim)
        num_heads, num_kv_heads = (each.out_features // head_dim for each in (q, k))
        if v.out_features != k.out_features or num_heads % num_kv_heads:
            expected = f"{k.out_features} outputs, those of k_proj, a divisor of q_proj's {q.out_features}"
            raise ValueError(f"v_proj: expected {expected}, got {v.out_features}")
        names = ("q_norm", "k_norm", "sinks", "indexer")
        q_norm, k_norm, sinks, index = (getattr(dense, name, None) for name in names)
        index = None if index is None else _index_modules(index)
        kept = q_norm, k_norm, sinks, out_gate, index
        return cls(q, k, v, dense.o_proj, *kept, num_heads, num_kv_heads, head_dim, scale)


def fill_dense(dense: Any, layer: Any) -> Any:
    """Put the parts of an NSA layer of the selected branch alone into a dense layer on the meta device; return that.

    Raises:
        ValueError: the dense layer has other parameters or buffers too.
    """
    dense.train(layer.training)  # first, as the parts keep what each of them has
    q, k, v = layer.q_proj, layer.k_proj_slc, layer.v_proj_slc
    if hasattr(dense, FUSED):
        setattr(dense, FUSED, _join([q, k, v]))
    else:
        q = q if layer.out_gate is None else _join([q, layer.out_gate], layer.num_heads)
        dense.q_proj, dense.k_proj, dense.v_proj = q, k, v
    for name in ("o_proj", "q_norm", "k_norm", "sinks"):
        if getattr(layer, name) is not None:
            setattr(dense, name, getattr(layer, name))
    if getattr(dense, "indexer", None) is not None:
        index = dict(layer.indexer.named_children())
        if JOINT in dense.indexer._modules:
            joint = _join([index.pop("q_proj"), index.pop("k_proj")])
            index = {JOINT: joint} | {theirs: index[own] for own, theirs in INDEX_NORMS.items()}
        dense.indexer._modules.update(index)
    if hasattr(dense, "rotary_emb"):
        dense.rotary_emb = layer.rotary_emb.dense
    empty = [name for name, x in chain(dense.named_parameters(), dense.named_buffers()) if x.is_meta]
    if empty and not layer.q_proj.weight.is_meta:
        raise ValueError(f"model: expected one whose dense layers have projections and norms alone, got {empty}")
    return dense


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module. Its weights may be parts of a file in memory, all of which ``deepcopy`` alone would copy."""
    plain = (parameter for parameter in module.parameters() if is_dense(parameter))
    clones = {id(x): nn.Parameter(x.detach().clone(), requires_grad=x.requires_grad) for x in plain}
    return deepcopy(module, {**clones})


def normed_heads(norm: nn.Module | None, x: Tensor, num_heads: int) -> Tensor:
    """Split ``(B, T, H * D)`` into heads ``(B, H, T, D)`` that are normed, each by itself or all of them together."""
    weight = getattr(norm, "weight", None)
    together = norm is not None and weight is not None and weight.shape[-1] == x.shape[-1]
    x = norm(x) if norm is not None and together else x
    heads = torch.unflatten(x, -1, (num_heads, -1))
    heads = heads if norm is None or together else norm(heads)
    return heads.transpose(1, 2).to(x.dtype)  # under autocast a norm returns float32


def _index_modules(indexer: Any) -> Mapping[str, nn.Module]:
    """Return the modules of a model's indexer by the names that ours have."""
    modules = dict(indexer.named_children())
    if JOINT not in modules:
        return modules
    norms = {own: modules[theirs] for own, theirs in INDEX_NORMS.items()}
    width = norms["k_norm"].weight.shape[0]
    q, k = _split(JOINT, indexer.index_qk_proj, [indexer.index_qk_proj.out_features - width, width])
    return {"q_proj": q, "k_proj": k} | norms


def _split(name: str, joint: Any, sizes: list[int], groups: int = 1) -> list[nn.Linear]:
    """Split a joint projection, each of some groups of rows into parts of these sizes."""
    rows = groups * sum(sizes)
    if type(joint) is not nn.Linear or not is_dense(joint.weight) or joint.out_features != rows:
        raise ValueError(f"{name}: expected a plain projection to {rows} features, got {describe(joint)}")
    parts = [
        [part.flatten(0, 1) for part in x.detach().unflatten(0, (groups, -1)).split(sizes, 1)]
        for x in (joint.weight, joint.bias)
        if x is not None
    ]
    return [_linear(joint, *(x.clone() for x in part)) for part in zip(*parts, strict=True)]


def _join(parts: list[nn.Linear], groups: int = 1) -> nn.Linear:
    """Undo :func:`_split`."""
    rows = ([part.weight for part in parts], [given(part.bias) for part in parts if part.bias is not None])
    joint = (torch.cat([x.detach().unflatten(0, (groups, -1)) for x in each], 1) for each in rows if each)
    return _linear(parts[0], *(x.flatten(0, 1) for x in joint))


def _linear(like: nn.Linear, weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a projection, frozen and in training as another one."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=like.weight.requires_grad)
    return linear.train(like.training)
