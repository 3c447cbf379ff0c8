"""``config.flexnsa``: taken where models are loaded or made, saved, and shared by the towers of a model.

``from_pretrained``, ``from_config`` and ``pipeline`` take ``flexnsa={...}``. The options are set in the config, as
``attn_implementation`` is, and are saved with it. They are added to those that a saved config has. In a model with
several towers, each tower has the options of the whole model, or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import wraps
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from flexnsa.primitives import check_type
from flexnsa.transformers.choice import NAME, chosen, towers

OPTIONS = "flexnsa"
"""The argument, the attribute of a config, and the key in config.json."""


def take_options() -> None:
    """Make transformers take the argument wherever it makes a config or a model."""
    configs: Any = PreTrainedConfig
    models: Any = PreTrainedModel
    configs.from_dict = classmethod(_of_dict(configs.from_dict.__func__))
    models.from_pretrained = classmethod(_of_model(models.from_pretrained.__func__))
    models._from_config = classmethod(_of_config(models._from_config.__func__))


def _of_dict(from_dict: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(from_dict)
    def read(config_class: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if OPTIONS not in kwargs:
            return from_dict(config_class, config_dict, **kwargs)
        config_dict = config_dict | {OPTIONS: _added(config_dict.get(OPTIONS), kwargs.pop(OPTIONS))}
        result = from_dict(config_class, config_dict, **kwargs)
        _check_used(result[0] if isinstance(result, tuple) else result)
        return result

    return read


def _of_model(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(from_pretrained)
    def load(model_class: type, *args: Any, **kwargs: Any) -> Any:
        if OPTIONS in kwargs and isinstance(kwargs.get("config"), PreTrainedConfig):
            kwargs["config"] = _with_options(kwargs["config"], kwargs.pop(OPTIONS), kwargs.get("attn_implementation"))
        return from_pretrained(model_class, *args, **kwargs)

    return load


def _of_config(from_config: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(from_config)
    def make(model_class: type, config: Any, **kwargs: Any) -> Any:
        if OPTIONS in kwargs:
            config = _with_options(config, kwargs.pop(OPTIONS), kwargs.get("attn_implementation"))
        return from_config(model_class, config, **kwargs)

    return make


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
    """Check that options are those of an attention that the model is to use.

    Raises:
        ValueError: they are not.
    """
    if chosen(config) is None and not hasattr(config, "has_nsa_layers"):
        expected = f"attn_implementation={NAME!r} with options, or a converted model"
        raise ValueError(f"{OPTIONS}: expected {expected}, got a {type(config).__name__} with {_attention_of(config)}")


def _attention_of(config: Any) -> str:
    """Return the attention that a config asks for, in words."""
    return repr(config._attn_implementation) if config._attn_implementation else "the default attention"


def share_options() -> None:
    """Make options that are set in a config of transformers apply to its towers, as ``attn_implementation`` does."""
    PreTrainedConfig.flexnsa = property(_get, _set, _delete)  # pyright: ignore[reportAttributeAccessIssue]


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
