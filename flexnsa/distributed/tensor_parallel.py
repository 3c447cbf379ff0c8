"""Layers whose heads and hidden units are spread over ranks, each of which sees all tokens (arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.compression import LinearCompressor, MeanCompressor, MLPCompressor
from flexnsa.models import DecoderLM
from flexnsa.models.decoder import DecoderLayer


def parallelize_model(model: DecoderLM, mesh: DeviceMesh) -> DecoderLM:
    """Spread the layers of a model over a mesh of one dimension, in place; embedding, norms and head stay whole.

    Raises:
        TypeError: the model's attention is not NSA.
        ValueError: as of :func:`parallelize_attention`; no layer has been touched.
    """
    layers = [cast("DecoderLayer", layer) for layer in model.layers]
    for layer in layers:
        _check(layer.attention, mesh)
    for layer in layers:
        parallelize_attention(cast("NativeSparseAttention", layer.attention), mesh)
        parallelize_module(layer.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def parallelize_attention(layer: NativeSparseAttention, mesh: DeviceMesh) -> NativeSparseAttention:
    """Spread the heads of a layer over a mesh of one dimension, in place.

    Each rank takes whole groups: key and value heads, the query heads that read them, and their gates. So blocks are
    selected where they are read, and nothing is told but the sum of the outputs, forward, and that of the inputs'
    gradients, backward. Compressors stay whole on every rank. Each has their gradients of its own heads alone, which
    are summed before they are added to ``.grad``.

    Raises:
        TypeError: not such a layer.
        ValueError: the ranks cannot share the key and value heads evenly, or ``mesh`` has more than one dimension.
    """
    _check(layer, mesh)
    parallelize_module(layer, mesh, _plan(layer))
    size = mesh.size()
    layer.num_heads //= size
    layer.num_kv_heads //= size
    layer.gate.num_heads //= size
    layer.register_forward_pre_hook(_refuse_mods, with_kwargs=True)
    for compressor in layer.children():
        if isinstance(compressor, MeanCompressor | LinearCompressor | MLPCompressor):
            compressor.shape = (layer.num_kv_heads, compressor.shape[1])
            for parameter in compressor.parameters():
                parameter.register_hook(lambda gradient: _sum(gradient, mesh))
    return layer


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; give the norm before.

    As :func:`torch.nn.utils.clip_grad_norm_`, which refuses a model that is partly whole and partly spread.
    """
    parameters = list(model.parameters())
    spread = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    kinds = [spread, [parameter for parameter in parameters if not isinstance(parameter, DTensor)]]
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    norm = torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in norms]).norm()
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def _plan(layer: NativeSparseAttention) -> dict[str, ParallelStyle]:
    """Spread the rows of heads and gates, and the columns that map heads back; a map that branches share, once."""
    branches = {f"w_{kind}_{tag}" for kind in "kv" for tag in layer.branches}
    heads = ["w_q", "gate.linear", *(name for name, _ in layer.named_children() if name in branches)]
    return {"w_o": RowwiseParallel(), **{name: ColwiseParallel() for name in heads}}


def _check(layer: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(layer, NativeSparseAttention):
        raise TypeError(f"layer: expected NativeSparseAttention, got {type(layer).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; take a part of it, mesh['tp']")
    if layer.num_kv_heads % mesh.size():
        raise ValueError(f"mesh: expected a divisor of num_kv_heads={layer.num_kv_heads}, got {mesh.size()} ranks")


def _refuse_mods(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Demand no mods: they would be told the number of a head among those of its rank."""
    for name in ("score_mod", "mask_mod"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: expected None of a layer whose heads are spread over ranks, got one")


def _sum(gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    return wait_tensor(all_reduce(gradient, "sum", mesh))
