"""Tensor parallelism: heads and hidden units are sharded over ranks; each rank sees all tokens (arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.compression import Compressor
from flexnsa.parallel.layers_of import attention_layers, check_layer, check_not_shared
from flexnsa.parallel.shared_losses import OverHeads

M = TypeVar("M", bound=nn.Module)


def parallelize_model(model: M, mesh: DeviceMesh) -> M:
    """Shard the layers of a model over a mesh of one dimension, in place; embedding, norms and head stay whole.

    This shards its NSA layers, and each module named ``mlp`` that has ``up`` and ``down``.

    Raises:
        TypeError: ``model`` is not a module, or has no NSA layer.
        ValueError: as in :func:`parallelize_attention`; the model is unchanged.
    """
    layers = attention_layers(model)
    for layer in layers:
        _check(layer, mesh)
    for layer in layers:
        parallelize_attention(layer, mesh)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "mlp" and hasattr(module, "up") and hasattr(module, "down"):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def parallelize_attention(layer: NativeSparseAttention, mesh: DeviceMesh) -> NativeSparseAttention:
    """Shard the heads of a layer over a mesh of one dimension, in place.

    Each rank has whole groups: key and value heads, the query heads that read them, and their gates. So blocks are
    selected on the rank that reads them. Only the outputs are summed over ranks, in forward, and the gradients of the
    inputs, in backward. Compressors stay whole on every rank. A rank computes their gradients of its own heads only;
    these are summed over ranks before they are added to ``.grad``. Heads of an indexer are sharded along, and the total
    of a :class:`flexnsa.SelectionLoss` is that of all heads.

    Raises:
        TypeError: not an NSA layer.
        ValueError: the ranks cannot share the key and value heads evenly, or do so already, or ``mesh`` has more than
            one dimension.
    """
    _check(layer, mesh)
    parallelize_module(layer, mesh, _plan(layer))
    size = mesh.size()
    layer.num_heads //= size
    layer.num_kv_heads //= size
    layer.gate.num_heads //= size
    if layer.indexer is not None:
        layer.indexer.num_kv_heads //= size
        layer.indexer.num_index_heads //= size
    layer.losses_over += (OverHeads(mesh.get_group().group_name),)
    layer.register_forward_pre_hook(_check_no_mods, with_kwargs=True)
    for compressor in layer.modules():
        if isinstance(compressor, Compressor):
            compressor.shape = (layer.num_kv_heads, compressor.shape[1])
            for parameter in compressor.parameters():
                parameter.register_hook(lambda gradient: wait_tensor(all_reduce(gradient, "sum", mesh)))
    return layer


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    :func:`torch.nn.utils.clip_grad_norm_` raises for a model of which only some parameters are sharded.
    """
    parameters = list(model.parameters())
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    kinds = [sharded, [parameter for parameter in parameters if not isinstance(parameter, DTensor)]]
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    norm = torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in norms]).norm()
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def _plan(layer: NativeSparseAttention) -> dict[str, ParallelStyle]:
    """Shard heads and gates by output, ``w_o`` by input; a projection that branches share occurs once.

    The input of a change of low rank, which is sharded by output too, is whole on every rank, and so is its gradient.
    """
    branches = {f"w_{kind}_{tag}" for kind in "kv" for tag in layer.branches}
    heads = ["w_q", "gate.linear", *(name for name, _ in layer.named_children() if name in branches)]
    heads += [] if layer.indexer is None else ["indexer.change_q.up", "indexer.change_k.up"]
    return {"w_o": RowwiseParallel(), **{name: ColwiseParallel() for name in heads}}


def _check(layer: NativeSparseAttention, mesh: DeviceMesh) -> None:
    check_layer(layer)
    check_not_shared(layer, OverHeads, "heads")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; take a part of it, mesh['tp']")
    if layer.num_kv_heads % mesh.size():
        raise ValueError(f"mesh: expected a divisor of num_kv_heads={layer.num_kv_heads}, got {mesh.size()} ranks")


def _check_no_mods(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Check that there is no mod: it would be called with indices of the rank's own heads."""
    for name in ("score_mod", "mask_mod"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: expected None of a layer whose heads are spread over ranks, got one")
