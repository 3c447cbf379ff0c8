"""Which layers of a model NSA acts on: those with full causal attention, as the config's ``layer_types`` say."""

from __future__ import annotations

from typing import Any

from flexnsa.checks.primitives import describe

FULL = ("full_attention", "hybrid")
"""Layers that attend to all tokens before; hybrid ones have a recurrent layer beside that."""
LOCAL = ("sliding_attention", "chunked_attention")
"""Layers that attend to some of the last tokens. They are left to the attention that the model has without NSA."""
WITHOUT = ("linear_attention", "conv", "moe", "mlp")
"""Layers without attention."""


def layer_type(module: Any) -> str:
    """Return the type of an attention module's layer; full attention where the config does not tell layers apart."""
    types, index = layer_types(module.config), getattr(module, "layer_idx", None)
    return FULL[0] if index is None or index >= len(types) else types[index]


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer; none where the config does not tell layers apart."""
    return list(getattr(config, "layer_types", None) or ())


def check_layer_types(config: Any, purpose: str) -> None:
    """Check that NSA knows all types of a model's layers, and that some layers have full attention.

    Raises:
        ValueError: it does not, or none has; ``purpose`` says what for.
    """
    types = layer_types(config)
    unknown = [kind for kind in types if kind not in FULL + LOCAL + WITHOUT]
    if unknown or (types and not {*types} & {*FULL}):
        expected = f"some of {', '.join(FULL + LOCAL + WITHOUT)}" if unknown else f"some {FULL[0]!r}"
        raise ValueError(f"layer_types: expected {expected} {purpose}, got {describe(sorted({*(unknown or types)}))}")
