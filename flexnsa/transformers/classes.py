"""Converted classes: one for each class of transformers, made of it when it is first needed.

A converted Llama is a ``FlexNSALlamaForCausalLM``, whose config has the ``model_type`` ``flexnsa_llama``. The Auto
classes know all of them, and so does ``pickle``: this module has each by its name.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
)

from flexnsa.primitives import describe
from flexnsa.transformers.converted import ConvertedConfig, ConvertedForCausalLM, ConvertedModel
from flexnsa.transformers.parallel import converted_plan

PREFIX, TYPE_PREFIX = "FlexNSA", "flexnsa_"


def register_classes() -> None:
    """Make transformers' Auto classes know the converted class of every causal model."""
    mapping: Any = CONFIG_MAPPING
    mapping._extra_content = _ConvertedTypes(mapping._extra_content)


class _ConvertedTypes(dict[str, type]):
    """Configs by ``model_type``, those of converted models made when they are first read."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or _dense_type(key) is not None

    def __missing__(self, key: str) -> type:
        dense = _dense_type(key)
        if dense is None:
            raise KeyError(key)
        return converted_config(CONFIG_MAPPING[dense])


def _dense_type(key: object) -> str | None:
    """Return the ``model_type`` of the dense model of a converted one; None for others."""
    if not isinstance(key, str) or not key.startswith(TYPE_PREFIX):
        return None
    dense = key.removeprefix(TYPE_PREFIX)
    return dense if not dense.startswith(TYPE_PREFIX) and dense in CONFIG_MAPPING else None


def dense_class(model: Any) -> Any:
    """Return the class of a dense causal model, or of the dense one that a converted model is of.

    Raises:
        ValueError: transformers has no such causal model.
    """
    dense = getattr(type(model), "dense_class", type(model))
    config, known = getattr(model, "config", None), cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING)
    text_alone = isinstance(config, PreTrainedConfig) and config.get_text_config() is config
    if not text_alone or known.get(dense.config_class, None) is not dense:
        expected = "one of the causal models of text that AutoModelForCausalLM knows"
        raise ValueError(f"model: expected {expected}, got {describe(type(model).__name__)}")
    return dense


@cache
def converted_config(dense: Any) -> Any:
    """Return the config class of converted models whose dense ones have configs of the class ``dense``."""
    plans = [converted_plan(dense.base_model_tp_plan, mixed=mixed) for mixed in (False, True)]
    doc = f"As :class:`{dense.__name__}`, with ``flexnsa`` as in :class:`flexnsa.transformers.LayerOptions`."
    fields = {"model_type": TYPE_PREFIX + dense.model_type, "base_model_tp_plan": plans[0], "mixed_tp_plan": plans[1]}
    made = _make((ConvertedConfig, dense), doc, fields)
    for auto, mapping in ((AutoModel, MODEL_MAPPING), (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)):
        model_class = mapping.get(dense, None)
        if isinstance(model_class, type):
            auto.register(made, _converted_class(model_class, made))
    return made


def converted_class(dense: Any) -> Any:
    """Return the converted class of a class of models."""
    return _converted_class(dense, converted_config(dense.config_class))


@cache
def _converted_class(dense: Any, config_class: Any) -> Any:
    doc = f"As :class:`{dense.__name__}`, with NSA layers."
    fields = {"config_class": config_class, "dense_class": dense}
    if MODEL_FOR_CAUSAL_LM_MAPPING.get(dense.config_class, None) is not dense:
        return _make((ConvertedModel, dense), doc, fields)
    base = _converted_class(MODEL_MAPPING[dense.config_class], config_class)
    bases = (ConvertedForCausalLM, dense, GenerationMixin)  # transformers' tests ask for the last among direct bases
    return _make(bases, doc, fields | {"base_class": base})


def _make(bases: tuple[type, ...], doc: str, fields: dict[str, Any]) -> Any:
    """Make the converted class of the second base."""
    name = PREFIX + bases[1].__name__
    made = type(name, bases, {"__module__": __name__, "__doc__": doc, **fields})
    globals()[name] = made
    return made


def __getattr__(name: str) -> Any:
    dense = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if not isinstance(dense, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return converted_config(dense) if issubclass(dense, PreTrainedConfig) else converted_class(dense)
