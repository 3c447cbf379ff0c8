"""The families of models that can be converted, and their converted classes."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralModel
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3Model

from flexnsa.transformers.converted import ConvertedConfig, ConvertedForCausalLM, ConvertedModel
from flexnsa.transformers.parallel import converted_plan


class FlexNSALlamaConfig(ConvertedConfig, LlamaConfig):
    """As :class:`LlamaConfig`, with ``flexnsa`` as in :class:`LayerOptions`."""

    model_type = "flexnsa_llama"
    base_model_tp_plan = converted_plan(LlamaConfig.base_model_tp_plan)


class FlexNSALlamaModel(ConvertedModel, LlamaModel):
    """Llama with NSA layers, without its head."""

    config_class = FlexNSALlamaConfig


class FlexNSALlamaForCausalLM(ConvertedForCausalLM, LlamaForCausalLM):
    """Llama with NSA layers."""

    config_class, model_class = FlexNSALlamaConfig, FlexNSALlamaModel


class FlexNSAQwen2Config(ConvertedConfig, Qwen2Config):
    """As :class:`Qwen2Config`, with ``flexnsa`` as in :class:`LayerOptions`."""

    model_type = "flexnsa_qwen2"
    base_model_tp_plan = converted_plan(Qwen2Config.base_model_tp_plan)


class FlexNSAQwen2Model(ConvertedModel, Qwen2Model):
    """Qwen2 with NSA layers, without its head."""

    config_class = FlexNSAQwen2Config


class FlexNSAQwen2ForCausalLM(ConvertedForCausalLM, Qwen2ForCausalLM):
    """Qwen2 with NSA layers."""

    config_class, model_class = FlexNSAQwen2Config, FlexNSAQwen2Model


class FlexNSAQwen3Config(ConvertedConfig, Qwen3Config):
    """As :class:`Qwen3Config`, with ``flexnsa`` as in :class:`LayerOptions`."""

    model_type = "flexnsa_qwen3"
    base_model_tp_plan = converted_plan(Qwen3Config.base_model_tp_plan)


class FlexNSAQwen3Model(ConvertedModel, Qwen3Model):
    """Qwen3 with NSA layers, without its head."""

    config_class = FlexNSAQwen3Config


class FlexNSAQwen3ForCausalLM(ConvertedForCausalLM, Qwen3ForCausalLM):
    """Qwen3 with NSA layers."""

    config_class, model_class = FlexNSAQwen3Config, FlexNSAQwen3Model


class FlexNSAMistralConfig(ConvertedConfig, MistralConfig):
    """As :class:`MistralConfig`, with ``flexnsa`` as in :class:`LayerOptions`."""

    model_type = "flexnsa_mistral"
    base_model_tp_plan = converted_plan(MistralConfig.base_model_tp_plan)


class FlexNSAMistralModel(ConvertedModel, MistralModel):
    """Mistral with NSA layers, without its head."""

    config_class = FlexNSAMistralConfig


class FlexNSAMistralForCausalLM(ConvertedForCausalLM, MistralForCausalLM):
    """Mistral with NSA layers."""

    config_class, model_class = FlexNSAMistralConfig, FlexNSAMistralModel


class Family(NamedTuple):
    """The dense class of a family, and its converted classes."""

    dense: Any
    config: Any
    base: Any
    model: Any


FAMILIES = (
    Family(LlamaForCausalLM, FlexNSALlamaConfig, FlexNSALlamaModel, FlexNSALlamaForCausalLM),
    Family(Qwen2ForCausalLM, FlexNSAQwen2Config, FlexNSAQwen2Model, FlexNSAQwen2ForCausalLM),
    Family(Qwen3ForCausalLM, FlexNSAQwen3Config, FlexNSAQwen3Model, FlexNSAQwen3ForCausalLM),
    Family(MistralForCausalLM, FlexNSAMistralConfig, FlexNSAMistralModel, FlexNSAMistralForCausalLM),
)


def register_families() -> None:
    """Register the converted classes with transformers' Auto classes."""
    for family in FAMILIES:
        AutoConfig.register(family.config.model_type, family.config)
        AutoModel.register(family.config, family.base)
        AutoModelForCausalLM.register(family.config, family.model)
