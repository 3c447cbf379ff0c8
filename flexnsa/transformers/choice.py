"""The attention in config.json: a model that is saved with flexnsa attention is loaded with it.

transformers does not save ``attn_implementation``, because it leaves the choice to the code that loads a model. A model
would silently be loaded with dense attention. But transformers reads the choice where a config has one. A model with
several towers, for instance for text and images, has one choice per tower: a dict by the names of their configs, as
``set_attn_implementation`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

NAME = "flexnsa"
"""The ``attn_implementation`` of this library."""
LAYERS = "flexnsa_layers"
"""That of models whose layers are NSA; these have no other, and no other models have it."""

ToDict = Callable[[Any], dict[str, Any]]
FromDict = Callable[..., Any]
Choice = str | dict[str, Any] | None
"""One name for all towers; or a dict by tower, with "" for the rest of the model; or None for no choice."""


def save_choice() -> None:
    """Make every config of transformers include its choice of flexnsa in ``to_dict``, which saving uses."""
    configs: Any = PreTrainedConfig
    configs.to_dict = _saying(configs.to_dict)
    configs.from_dict = classmethod(_unless_none(configs.from_dict.__func__))
    configs._attn_implementation = _keeping(configs._attn_implementation)


def towers(config: Any) -> dict[str, Any]:
    """Return the configs of a model's towers by their names; a model of one tower has none."""
    named = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: tower for name, tower in named.items() if isinstance(tower, PreTrainedConfig)}


def chosen(config: Any) -> Choice:
    """Return the choice that selects flexnsa wherever the config does now, and nothing elsewhere."""
    attention = getattr(config, "_attn_implementation", None)
    below = {name: chosen(tower) for name, tower in towers(config).items()}
    if attention == NAME and all(choice == NAME for choice in below.values()):
        return NAME
    named = {"": attention if attention == NAME else None, **below}
    return {name: choice for name, choice in named.items() if choice} or None


def _saying(to_dict: ToDict) -> ToDict:
    @wraps(to_dict)
    def say(config: Any) -> dict[str, Any]:
        choice = chosen(config)
        return to_dict(config) | ({"attn_implementation": choice} if choice else {})

    return say


def _unless_none(from_dict: FromDict) -> FromDict:
    """Make ``from_pretrained(attn_implementation=None)`` use the saved choice, as without the argument."""

    @wraps(from_dict)
    def read(config_class: type, config_dict: dict[str, Any], **options: Any) -> Any:
        if options.get("attn_implementation", NAME) is None:
            del options["attn_implementation"]
        return from_dict(config_class, config_dict, **options)

    return read


def _keeping(attention: property) -> property:
    """Keep flexnsa in towers that a new choice does not mention; transformers would reset the towers below them."""
    set_all: Any = attention.fset

    def choose(config: Any, choice: Choice) -> None:
        kept = None if isinstance(choice, str) else chosen(config)
        if isinstance(choice, dict) and isinstance(kept, dict):
            choice = kept | choice
        set_all(config, choice or kept)

    return property(attention.fget, choose, attention.fdel, attention.__doc__)
