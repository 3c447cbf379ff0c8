"""The attention and its options in config.json: a model that is saved with flexnsa attention is loaded with it.

transformers does not save ``attn_implementation``, because it leaves the choice to the code that loads a model. A model
would silently be loaded with dense attention. But transformers reads the choice where a config has one. A model with
several towers, for instance for text and images, has one choice per tower: a dict by the names of their configs, as
``set_attn_implementation`` takes.

``from_pretrained``, ``from_config`` and ``pipeline`` take ``flexnsa={...}``. The options are added to those of a saved
config, and saved with it. Each tower has the options of the whole model, or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import wraps
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from flexnsa.primitives import check_type

NAME = "flexnsa"
"""The ``attn_implementation`` of this library."""
LAYERS = "flexnsa_layers"
"""That of models whose layers are NSA; these have no other, and no other models have it."""

OPTIONS = "flexnsa"
"""The argument, the attribute of a config, and the key in config.json."""

Choice = str | dict[str, Any] | None
"""One name for all towers; or a dict by tower, with "" for the rest of the model; or None for no choice."""


def keep_choice() -> None:
    """Make every config of transformers save its choice of flexnsa and its options, and take both wherever it is made.

    Options that are set in a config apply to its towers, as ``attn_implementation`` does.
    """
    configs: Any = PreTrainedConfig
    models: Any = PreTrainedModel
    configs.to_dict = _saying(configs.to_dict)
    configs.from_dict = classmethod(_of_dict(configs.from_dict.__func__))
    configs._attn_implementation = _keeping(configs._attn_implementation)
    configs.flexnsa = property(_get, _set, _delete)
    models.from_pretrained = classmethod(_of_config(models.from_pretrained.__func__))
    models._from_config = classmethod(_of_config(models._from_config.__func__))


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


def _saying(to_dict: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to_dict)
    def say(config: Any) -> dict[str, Any]:
        choice = chosen(config)
        return to_dict(config) | ({"attn_implementation": choice} if choice else {})

    return say


def _keeping(attention: property) -> property:
    """Keep flexnsa in towers that a new choice does not mention; transformers would reset the towers below them."""
    set_all: Any = attention.fset

    def choose(config: Any, choice: Choice) -> None:
        saved = None if isinstance(choice, str) else chosen(config)
        if isinstance(choice, dict) and isinstance(saved, dict):
            choice = saved | choice
        set_all(config, choice or saved)

    return property(attention.fget, choose, attention.fdel, attention.__doc__)


def _of_dict(from_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Take options, and keep the saved choice where ``attn_implementation`` is None, as without the argument."""

    @wraps(from_dict)
    def read(config_class: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation", NAME) is None:
            del kwargs["attn_implementation"]
        if OPTIONS not in kwargs:
            return from_dict(config_class, config_dict, **kwargs)
        config_dict = config_dict | {OPTIONS: _added(config_dict.get(OPTIONS), kwargs.pop(OPTIONS))}
        result = from_dict(config_class, config_dict, **kwargs)
        _check_used(result[0] if isinstance(result, tuple) else result)
        return result

    return read


def _of_config(make: Callable[..., Any]) -> Callable[..., Any]:
    """Take options beside a config, which is named, or the one argument that is not."""

    @wraps(make)
    def take(model_class: type, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], PreTrainedConfig):
            args, kwargs["config"] = (), args[0]
        if OPTIONS in kwargs and isinstance(kwargs.get("config"), PreTrainedConfig):
            kwargs["config"] = _with_options(kwargs["config"], kwargs.pop(OPTIONS), kwargs.get("attn_implementation"))
        return make(model_class, *args, **kwargs)

    return take


def _with_options(config: Any, options: Any, attention: Any) -> Any:
    """Return a copy of a config with these options, and the attention whose they are."""
    config = deepcopy(config)
    config.flexnsa = _added(getattr(config, OPTIONS, None), options)
    if attention is not None:
        config._attn_implementation = attention
    _check_used(config)
    return config


def _added(saved: Any, options: Any) -> dict[str, Any]:
    check_type(OPTIONS, options, Mapping)
    return dict(saved or {}) | dict(options)


def _check_used(config: Any) -> None:
    """Check that options are those of an attention that the model is to use."""
    if chosen(config) is None and not hasattr(config, "has_nsa_layers"):
        expected = f"attn_implementation={NAME!r} with options, or a converted model"
        attention = repr(config._attn_implementation) if config._attn_implementation else "the default attention"
        raise ValueError(f"{OPTIONS}: expected {expected}, got a {type(config).__name__} with {attention}")


def _get(config: Any) -> Any:
    try:
        return vars(config)[OPTIONS]
    except KeyError:
        raise AttributeError(f"{type(config).__name__!r} object has no attribute {OPTIONS!r}") from None


def _set(config: Any, options: Any) -> None:
    """Set the options of a model, and of all its towers that have no others."""
    before = vars(config).get(OPTIONS)
    vars(config)[OPTIONS] = options
    for tower in towers(config).values():
        if getattr(tower, OPTIONS, None) in (None, before, options):
            tower.flexnsa = options


def _delete(config: Any) -> None:
    _set(config, None)
    del vars(config)[OPTIONS]
