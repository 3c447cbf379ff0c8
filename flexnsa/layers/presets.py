"""Settings of a layer by name: those that learned text best, and the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from torch import Tensor, nn

from flexnsa.checks.primitives import check_choice
from flexnsa.config import NSAConfig
from flexnsa.layers.config import LayerConfig

LAYER_PRESETS = ("text", "paper")


class Settings(TypedDict):
    """The fields of :class:`LayerConfig` that a preset sets."""

    nsa: NSAConfig
    compression: str
    gate: str
    rope_base: float
    shared_keys: bool
    begin_as_mean: bool
    index_rank: int | None


PAPER: Settings = {
    "nsa": NSAConfig(),
    "compression": "mlp",
    "gate": "sigmoid",
    "rope_base": 10_000.0,
    "shared_keys": False,
    "begin_as_mean": False,
    "index_rank": None,
}
"""The paper's settings, and what it leaves open."""


def text(num_heads: int, num_kv_heads: int, **sizes: int) -> Settings:
    """Return the settings that learned text best (docs/learning.md), with other ``sizes`` of its ``nsa``."""
    nsa = NSAConfig.for_text(num_heads, num_kv_heads, **sizes)
    return {**PAPER, "nsa": nsa, "gate": "residual", "rope_base": 1e8, "shared_keys": True, "begin_as_mean": True}


def describe_layer(
    preset: str | None,
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    branches: tuple[str, ...],
    options: Mapping[str, object],
) -> LayerConfig:
    """Describe a layer by the options that are not None, and by a preset; what branches leave no meaning is off in it.

    The default is ``text``, or ``paper`` where ``options`` have ``nsa``: a config means the same as ever.

    Raises:
        TypeError: an option is not of its kind.
        ValueError: there is no such preset, or an option does not fit the others.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    name = preset or ("paper" if "nsa" in chosen else "text")
    check_choice("preset", name, LAYER_PRESETS)
    settings = PAPER if name == "paper" else text(num_heads, num_kv_heads)
    sizes = LayerConfig(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **settings)
    return replace(sizes.with_branches(branches), **chosen)


def refuse_earlier_default(
    layer: nn.Module, state: Mapping[str, Tensor], prefix: str, _metadata: object, _strict: bool, *lists: list[str]
) -> None:
    """Refuse the state_dict of a layer that an earlier version built by default, and name the option that builds it.

    A hook for ``register_load_state_dict_pre_hook``; the last of ``lists`` takes the errors.
    """
    own = dict(layer.named_parameters())
    indexer = next((name for name in own if name.startswith("indexer.")), None)
    if indexer is None or "w_k_cmp.weight" in own or f"{prefix}w_k_cmp.weight" not in state:
        return
    if f"{prefix}{indexer}" not in state:
        lists[-1].append(
            f'{prefix}preset: expected "paper" for this state_dict, which has keys of the compressed branch and no '
            'indexer, got "text", which earlier versions did not have'
        )
