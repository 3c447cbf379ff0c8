"""Models that torchtitan would train, built in the tests' own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.teaching import Teaching
from tests.integrations.torchtitan.runs import config_of, override

# isort: split
from torchtitan.config.override import apply_overrides
from torchtitan.trainer import Trainer


def adapted(name: str, *arguments: str, **options: Any) -> Trainer.Config:
    """Give a config as it is before torchtitan builds anything, with the override's options."""
    config = config_of(name, Path(), override(**options), *arguments)
    model: Any = config.model_spec
    model.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config


def built(name: str, **options: Any) -> Any:
    """Build a model with two NSA layers whose new weights are alive, as after some training."""
    spec: Any = adapted(name, **options).model_spec
    spec.model.layers = spec.model.layers[:2]
    model = spec.model.build()
    with torch.no_grad():
        model.init_states()
        torch.manual_seed(0)
        layers = layers_of(model)
        for layer in layers:
            layer.passed = layers[layer.leader or 0].passed  # as the metrics of a run would
            for name, parameter in layer.named_parameters():
                if not name.startswith(("qkv_linear.", "wo.", "q_norm.", "k_norm.")):
                    parameter += 0.1 * torch.randn_like(parameter)
    return model


def layers_of(model: Any) -> list[NSAttention]:
    """List the NSA layers of a model."""
    return [module for module in model.modules() if isinstance(module, NSAttention)]


def teach(model: Any, step: int = 1) -> None:
    """Tell the layers of a model of a step, as the metrics of a run would."""
    for layer in layers_of(model):
        layer.teaching = Teaching(layer.options, num_heads=layer.n_kv_heads, sequences=1, step=torch.tensor(step))


def positions_of(*lengths: int) -> Tensor:
    """Give the positions of a row of documents of these lengths."""
    return torch.cat([torch.arange(length) for length in lengths])[None]
