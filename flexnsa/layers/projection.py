"""Several linear projections of one input; on a GPU as one matrix product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.attention.triton.few_rows import multiply_few_rows
from flexnsa.primitives import FLOATING, is_exporting

ROW_MULTIPLE = 64
"""The row length of the joint product is a multiple of this, so that kernels read its parts in whole cache lines."""
SEPARATE_PIECES = 9
"""From so many pieces of the joint product on, Inductor writes the gradient of each straight into its columns. Those of
fewer are one kernel, in which every element computes the gradients of all: 7.6 ms of a step of 160 (H200)."""


def project(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Apply linear projections to ``x (..., dim)``, each to ``(..., out_features)``; one that occurs twice runs once.

    On a GPU one joint product reads x once, and backward computes its gradient at once instead of summing several. The
    results are then strided views of the product. A CPU gains nothing by this. A module that does more than multiply
    (a subclass, a bias, hooks, another forward or kind of weight) is called.
    """
    each = dict.fromkeys(linears)
    if x.is_cuda and all(map(is_plain, each)):
        rows = project_together(x, [linear.weight for linear in each])
    else:
        rows = [linear(x) for linear in each]
    of_each = dict(zip(each, rows, strict=True))
    return [of_each[linear] for linear in linears]


def project_named(x: Tensor, maps: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Apply all projections of an attention layer, in two joint products."""
    # Autograd saves these values unchanged. The others are rotated, compressed or squashed first, and a joint product
    # with these would keep them in memory too.
    kept = [name for name in maps if name in ("v_slc", "v_win")]
    projected: dict[str, Tensor] = {}
    for names in filter(None, ([name for name in maps if name not in kept], kept)):
        projected |= zip(names, project(x, [maps[name] for name in names]), strict=True)
    return projected


def project_few(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Apply plain projections of one dtype to a few rows, as :func:`project`, by a kernel that copies no weights.

    It has no gradient.
    """
    each = dict.fromkeys(linears)
    product = multiply_few_rows(torch.flatten(x, 0, -2).contiguous(), [linear.weight for linear in each])
    rows = torch.split(torch.unflatten(product, 0, x.shape[:-1]), [linear.out_features for linear in each], dim=-1)
    of_each = dict(zip(each, rows, strict=True))
    return [of_each[linear] for linear in linears]


def project_together(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Multiply x by all weights ``(out_features, dim)`` in one product."""
    sizes = [len(weight) for weight in weights]
    columns = -sum(sizes) % ROW_MULTIPLE
    product = F.linear(x, torch.cat([*weights, weights[0].new_zeros(columns, weights[0].shape[1])]))
    spare = min(columns, max(1, SEPARATE_PIECES - len(sizes)))
    padding = [columns // spare + (piece < columns % spare) for piece in range(spare)]
    return list(torch.split(product, [*sizes, *padding], dim=-1))[: len(sizes)]


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows ``(B, Hkv, S, D)`` by ``weight (out, D)``; or several, both stacked, in a batched product."""
    if weight.dim() == 2:
        return by_rows(lambda rows: F.linear(rows, weight), x)
    return torch.unflatten(_rows(x, 1) @ weight.mT, 1, x.shape[1:-1])


def by_rows(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Map ``x (..., D)`` by a function of rows ``(R, D)``."""
    return torch.unflatten(linear(_rows(x, 0)), 0, x.shape[:-1])


def _rows(x: Tensor, first: int) -> Tensor:
    """Flatten ``x (..., D)`` to rows ``(R, D)``, or only the dimensions from ``first`` on.

    For an exporter by way of one dimension: from several, PyTorch makes rows on a condition, how their sizes divide
    each other, which would have to be proved for all lengths. Inductor would divide by symbolic lengths on that way.
    """
    if is_exporting():
        return x.flatten().view(*x.shape[:first], -1, x.shape[-1])
    return x.flatten(first, -2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split ``(B, S, num_heads * D)`` into ``(B, num_heads, S, D)``."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def is_plain(linear: nn.Linear) -> bool:
    """Return whether calling the module is a product with its weight, and nothing else."""
    if type(linear) is not nn.Linear or linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        return False
    return is_dense(linear.weight) and has_no_hooks(linear)


def is_dense(weight: Tensor) -> bool:
    """Return whether a kernel can read a weight's memory: it is no tensor subclass, such as a quantised one."""
    return type(weight) in (Tensor, nn.Parameter)


def weight_of(layer: nn.Module) -> Tensor:
    """Return a tensor of the dtype and device that a layer computes with: its first floating parameter, or else buffer.

    Submodules need not have a ``weight``, because users may replace them. 8-bit dtypes are for storage only. A weight
    that accelerate loads when its module runs is replaced by an empty one of its shape, on the device of that.

    Raises:
        ValueError: the layer has neither.
    """
    for tensor in chain(layer.parameters(), layer.buffers()):
        if tensor.dtype in FLOATING:
            device = _device_of_offloaded(layer) if tensor.is_meta else None
            return tensor if device is None else tensor.new_empty((), device=device).expand(tensor.shape)
    raise ValueError(f"layer: expected a floating parameter or buffer, got none in {type(layer).__name__}")


def _device_of_offloaded(layer: nn.Module) -> torch.device | None:
    """Return the device on which a layer with offloaded weights runs; None if no weight of it is."""
    hooks = (getattr(module, "_hf_hook", None) for module in layer.modules())
    devices = (getattr(each, "execution_device", None) for hook in hooks for each in getattr(hook, "hooks", [hook]))
    return next((torch.device(device) for device in devices if device is not None), None)


def computed_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of linear projections of x, autocast considered, which does not cast float64."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype in FLOATING[1:]
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def has_no_hooks(module: nn.Module) -> bool:
    """Return whether calling the module runs the ``forward`` of its class, and nothing else."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_all_modules = (getattr(nn.modules.module, f"_global{name}") for name in hooks)
    has_hooks = any(getattr(module, name) for name in hooks) or any(of_all_modules)
    is_called_as_any = type(module).__call__ is nn.Module.__call__
    return is_called_as_any and "forward" not in vars(module) and not has_hooks
