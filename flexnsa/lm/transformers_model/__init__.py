"""The decoder LM as a model of transformers: importing it registers ``model_type="flexnsa"`` with the Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from flexnsa.lm.transformers_model.config import FlexNSAConfig
from flexnsa.lm.transformers_model.decoder import FlexNSAForCausalLM

AutoConfig.register(FlexNSAConfig.model_type, FlexNSAConfig)
AutoModelForCausalLM.register(FlexNSAConfig, FlexNSAForCausalLM)


def register() -> None:
    """Do no more: the import has registered the classes. As a plugin of vLLM it runs in each of its processes."""


__all__ = ["FlexNSAConfig", "FlexNSAForCausalLM", "register"]
