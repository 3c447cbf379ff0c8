"""The attention layers of a model, whatever the model is."""

from __future__ import annotations

from torch import nn

from flexnsa.checks.scorers import check_masses
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.primitives import check_type


def attention_layers(model: nn.Module) -> list[NativeSparseAttention]:
    """Return the NSA layers of a model.

    Raises:
        TypeError: ``model`` is not a module, has no NSA layer, or has a module ``attention`` that is not one.
    """
    check_type("model", model, nn.Module)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "attention":
            check_layer(module)
    layers = [module for module in model.modules() if isinstance(module, NativeSparseAttention)]
    if not layers:
        raise TypeError(f"model: expected layers of NativeSparseAttention, got none in {type(model).__name__}")
    return layers


def check_layer(layer: nn.Module) -> None:
    """Check that a module is an NSA layer."""
    if not isinstance(layer, NativeSparseAttention):
        raise TypeError(f"layer: expected NativeSparseAttention, got {type(layer).__name__}")


def check_not_shared(layer: NativeSparseAttention, group: type, parts: str) -> None:
    """Check that ranks can share the ``parts`` of a layer and do not yet: its loss would be summed over them twice."""
    check_masses(layer.config, "of a layer that ranks share")
    if any(isinstance(each, group) for each in layer.losses_over):
        raise ValueError(f"layer: expected one that has all of its {parts}, got one that is parallelized already")
