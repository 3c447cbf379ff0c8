"""The decoder LM as a model of transformers: importing it registers ``model_type="flexnsa"`` with the Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from flexnsa.lm.transformers_model.config import FlexNSAConfig
from flexnsa.lm.transformers_model.decoder import FlexNSAForCausalLM

AutoConfig.register(FlexNSAConfig.model_type, FlexNSAConfig)
AutoModelForCausalLM.register(FlexNSAConfig, FlexNSAForCausalLM)

__all__ = ["FlexNSAConfig", "FlexNSAForCausalLM"]
