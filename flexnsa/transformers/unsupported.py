"""Models in which NSA could not act are refused when flexnsa is chosen, before any work is done.

transformers accepts any registered name for any model: one without full causal attention, or with an attention of its
own, would silently stay what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from flexnsa.transformers.choice import LAYERS, NAME
from flexnsa.transformers.local_layers import check_layer_types
from flexnsa.transformers.options import DropInOptions
from flexnsa.transformers.paged import serve_requests

PURPOSE = f"with attn_implementation={NAME!r}"


def refuse_models() -> None:
    """Make models of transformers check that NSA can act in them when they are built or told to use flexnsa."""
    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = _after_class_check(models.get_correct_attn_implementation)
    models.post_init = _before_layer_check(models.post_init)
    models.set_attn_implementation = _before_layer_check(_after_class_check(models.set_attn_implementation))


def check_class(model_class: Any) -> None:
    """Check that a class of models takes its attention from transformers' interface."""
    if isinstance(model_class, type) and not model_class._can_set_attn_implementation():  # pyright: ignore
        expected = f"{NAME!r} of a model that takes its attention from transformers' interface"
        raise ValueError(f"attn_implementation: expected {expected}, got it of a {model_class.__name__}")


def check_config(config: Any) -> None:
    """Check all that a config says of whether NSA can act in its model."""
    check_class(MODEL_MAPPING.get(type(config), None))  # pyright: ignore[reportArgumentType]
    check_layer_types(config, PURPOSE)


def check_layers(model: nn.Module) -> None:
    """Check a model's options, and that it has layers of full causal attention that use transformers' interface.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option does not fit; or the model has no such layers, or layers of a type that NSA does not know.
    """
    config: Any = model.config
    DropInOptions.of(config)
    check_layer_types(config, PURPOSE)
    asking = attention_modules(model)
    if not asking:
        expected = f"{NAME!r} of a model with layers that take their attention from transformers' interface"
        raise ValueError(f"attn_implementation: expected {expected}, got it of a {type(model).__name__}")
    if all(getattr(module, "is_causal", True) is False for module in asking):
        advice = f"in a model of several towers, choose it for one: {{'text_config': {NAME!r}}}"
        got = f"False in all layers of a {type(model).__name__}; {advice}"
        raise ValueError(f"is_causal: expected True {PURPOSE}, got {got}")


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that compute attention by transformers' interface."""
    return [module for module in model.modules() if asks_for_attention(type(module))]


def refuse_attentions(config: Any, options: Mapping[str, Any], purpose: str = PURPOSE) -> None:
    """Check that probabilities are not asked for, by an argument or by the config: no implementation has them."""
    if options.get("output_attentions", getattr(config, "output_attentions", False)):
        raise ValueError(f"output_attentions: expected None or False {purpose}, got True")


@torch.compiler.assume_constant_result  # a compiler cannot read signatures
def takes_positions(config_class: type) -> bool:
    """Return whether models with such configs have an argument ``position_ids``; True for unknown classes."""
    return _takes_positions(config_class)


@cache
def _takes_positions(config_class: type) -> bool:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)  # pyright: ignore[reportArgumentType]
    return not isinstance(model_class, type) or "position_ids" in inspect.signature(model_class.forward).parameters  # pyright: ignore


@cache
def asks_for_attention(module_class: type) -> bool:
    """Return whether a class of modules computes attention by transformers' interface."""
    if not issubclass(module_class, nn.Module) or module_class.__module__.startswith("torch."):
        return False
    try:
        return "get_interface(" in inspect.getsource(inspect.unwrap(module_class.forward))
    except (OSError, TypeError):  # written in a shell
        return "Attention" in module_class.__name__


def _after_class_check(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method, whose first argument is an ``attn_implementation``, after checking the model's class for it."""

    @wraps(method)
    def checked(model: Any, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        if chosen == NAME:
            check_class(type(model))
        if chosen == LAYERS and not hasattr(model.config, "has_nsa_layers"):
            expected = f"another than {LAYERS!r} of a {type(model).__name__}, whose layers are not NSA"
            raise ValueError(f"attn_implementation: expected {expected}; AutoModelForCausalLM loads a converted model")
        return method(model, chosen, *args, **kwargs)

    return checked


def _before_layer_check(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method, and then check the layers of each part of the model that uses flexnsa, and have it serve."""

    @wraps(method)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(model, *args, **kwargs)
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME:
                check_layers(part)
                serve_requests(part)
        return result

    return checked
