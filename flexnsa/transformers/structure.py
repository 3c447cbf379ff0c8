"""What NSA needs of a dense attention layer: projections, norms, sinks and sizes, found by looking at the module."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a dense layer: projections, norms, sinks ``(Hq,)`` and an MSA's indexer if it has them, and sizes.

    ``scale`` is the factor on the scores.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: Tensor | None
    indexer: nn.Module | None
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
        is_fused = getattr(dense, FUSED, None) is not None
        q, k, v = _split(dense, head_dim) if is_fused else [getattr(dense, name) for name in SEPARATE]
        num_heads, num_kv_heads = (each.out_features // head_dim for each in (q, k))
        if v.out_features != k.out_features or num_heads % num_kv_heads:
            expected = f"{k.out_features} outputs, those of k_proj"
            raise ValueError(
                f"v_proj: expected {expected}, a divisor of q_proj's {q.out_features}, got {v.out_features}"
            )
        names = ("q_norm", "k_norm", "sinks", "indexer")
        q_norm, k_norm, sinks, indexer = (getattr(dense, name, None) for name in names)
        return cls(q, k, v, dense.o_proj, q_norm, k_norm, sinks, indexer, num_heads, num_kv_heads, head_dim, scale)


def fill_dense(dense: Any, layer: Any) -> Any:
    """Put the parts of an NSA layer of the selected branch alone into a dense layer on the meta device; return that.

    Raises:
        ValueError: the dense layer has other parameters or buffers too.
    """
    dense.train(layer.training)  # first, as the parts keep what each of them has
    q, k, v = layer.q_proj, layer.k_proj_slc, layer.v_proj_slc
    if hasattr(dense, FUSED):
        setattr(dense, FUSED, _join(q, k, v))
    else:
        dense.q_proj, dense.k_proj, dense.v_proj = q, k, v
    for name in ("o_proj", "q_norm", "k_norm", "sinks"):
        if getattr(layer, name) is not None:
            setattr(dense, name, getattr(layer, name))
    if getattr(dense, "indexer", None) is not None:
        dense.indexer._modules.update(layer.indexer.named_children())
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


def _split(dense: Any, head_dim: int) -> list[nn.Linear]:
    """Split a joint projection of queries, keys and values."""
    fused, config = getattr(dense, FUSED), dense.config
    sizes = [count * head_dim for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    if type(fused) is not nn.Linear or not is_dense(fused.weight) or fused.out_features != sum(sizes):
        raise ValueError(f"{FUSED}: expected a plain projection to {sum(sizes)} features, got {describe(fused)}")
    weights = fused.weight.detach().split(sizes)
    biases = [None] * len(sizes) if fused.bias is None else fused.bias.detach().split(sizes)
    return [_linear(fused, weight.clone(), bias) for weight, bias in zip(weights, biases, strict=True)]


def _join(*parts: nn.Linear) -> nn.Linear:
    """Undo :func:`_split`."""
    biases = None if parts[0].bias is None else torch.cat([given(part.bias).detach() for part in parts])
    return _linear(parts[0], torch.cat([part.weight.detach() for part in parts]), biases)


def _linear(like: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a projection, frozen and in training as another one."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=like.weight.requires_grad)
    return linear.train(like.training)
