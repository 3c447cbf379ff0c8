"""Models of several towers: a tiny Llava that sees images, and any type of transformers as a shape without weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from flexnsa.transformers.choice import towers
from tests.integrations.transformers.families import SIZES, tokens

IMAGE_TOKEN, IMAGE_TOKENS = 2, 4
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,  # of which the last but one is looked at
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "initializer_range": 0.2,
}


def llava(text: Any = None, **options: Any) -> Any:
    """Make a tiny Llava in evaluation mode and float64, always with the same weights; by default with a Llama."""
    torch.manual_seed(0)
    config: Any = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES) if text is None else text,
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=IMAGE_TOKENS,
    )
    config.initializer_range = SIZES["initializer_range"]
    return transformers.LlavaForConditionalGeneration._from_config(config, **options).eval().double()


def page() -> dict[str, Tensor]:
    """Draw an image and 70 tokens after it, of which the tiniest NSA leaves most out."""
    x = torch.cat((torch.full((1, IMAGE_TOKENS), IMAGE_TOKEN), tokens(1, 70)), dim=1)
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return {"input_ids": x, "pixel_values": image}


def small_config(model_type: str) -> Any:
    """Make the default config of a type with two layers in each tower."""
    config = transformers.AutoConfig.for_model(model_type)
    values = config.to_dict()
    _take_two_layers(values)
    return type(config)(**values)


def _take_two_layers(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _take_two_layers(value)
        elif name in ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers"):
            values[name] = 2
        elif name in ("layer_types", "mlp_layer_types") and value:
            values[name] = (list(dict.fromkeys(value)) + value)[:2]  # two types, if there are two


def shape_of(model_class: Any, config: Any, **options: Any) -> Any:
    """Make a model without weights."""
    with torch.device("meta"):
        return model_class._from_config(config, **options)


def paths(config: Any) -> Iterator[tuple[str, ...]]:
    """Give the path to every tower, and to those within it."""
    for name, tower in towers(config).items():
        yield (name,)
        yield from ((name, *path) for path in paths(tower))


def choice_of(path: tuple[str, ...], value: str) -> Any:
    """Say of one tower how it is to attend, and nothing of the others."""
    choice: Any = value
    for name in reversed(path):
        choice = {name: choice}
    return choice


def attentions(model: Any) -> dict[str, tuple[Any, Any]]:
    """Give the attention and the options of every module that has a config."""
    configs = {name: getattr(module, "config", None) for name, module in model.named_modules()}
    return {
        name: (config._attn_implementation, getattr(config, "flexnsa", None))
        for name, config in configs.items()
        if isinstance(config, transformers.PreTrainedConfig)
    }
