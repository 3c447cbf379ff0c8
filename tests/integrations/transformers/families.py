"""Tiny random models of the families that people have, and how small NSA has to be for them to leave something out."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM
from flexnsa.transformers import convert

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
"""Sizes of which quantised weights are multiples."""
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"attention_bias": True}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
}
ROPES = {name: {"rope_type": name, "rope_theta": 100.0, **options} for name, options in ROPES.items()}
"""Of 40 tokens and more, each turns them otherwise than without it."""

FEW: dict[str, Any] = {
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 8,
    "num_selected_blocks": 4,
    "num_init_blocks": 1,
    "num_local_blocks": 1,
    "window_size": 12,
}
"""Of 64 tokens a query sees 32, and chooses 2 blocks of the 6 that are not forced."""
CHOICE: dict[str, Any] = {"attn_implementation": "flexnsa", "flexnsa": FEW}
ALL: dict[str, Any] = FEW | {"num_selected_blocks": 64}
"""Every block of up to 512 tokens is selected."""
INDEX: dict[str, Any] = {"index_heads": 3, "index_block_size": 4, "index_stride": 4}
"""An index query for each query head, and two index keys for each block."""
INDEXED = FEW | INDEX | {"index_rank": 4}


def dense(family: str, **changes: Any) -> Any:
    """Make a dense model in evaluation mode, always with the same weights, in float64: what is equal there is equal."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES | extra | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms, which begin as constants
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def tokens(*shape: int) -> Tensor:
    """Draw tokens that are neither padding nor special."""
    made = torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return made.to(torch.get_default_device())


def sparse(family: str, options: dict[str, Any], **changes: Any) -> Any:
    """Make the same model with flexnsa in the place of its attention."""
    model = dense(family, **changes)
    model.config.flexnsa = options
    model.set_attn_implementation("flexnsa")
    return model


def own(**changes: Any) -> Any:
    """Make the library's own decoder, of the same sizes, in evaluation mode and float64."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 48, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    config = FlexNSAConfig(**{**sizes, "nsa": FEW, "vocab_size": SIZES["vocab_size"], "pad_token_id": 0, **changes})
    return FlexNSAForCausalLM(config).eval().double()


def pad_left(rows: list[Tensor]) -> dict[str, Tensor]:
    """Pad rows of tokens on the left, as a tokenizer does for generation."""
    length = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), length, dtype=torch.int64)
    for row, (one, real) in zip(rows, zip(ids, mask, strict=True), strict=True):
        one[length - len(row) :], real[length - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def in_steps(model: Any, x: Tensor, *ends: int, cache: Any = None) -> Tensor:
    """Return the logits of tokens on a cache: as many at a time as reach each of the ends, and then one by one."""
    out, first = [], 0
    for last in (*ends, *range(ends[-1] + 1, x.shape[1] + 1)):
        told = model(input_ids=x[:, first:last], past_key_values=cache, use_cache=True)
        cache, first = told.past_key_values, last
        out.append(told.logits)
    return torch.cat(out, 1)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make one of as many words as models have tokens."""
    words: Any = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def converted(family: str, options: dict[str, Any], **changes: Any) -> Any:
    """Make the same model with NSA layers whose new weights are alive, as after some training."""
    chosen = {name: value for name, value in options.items() if name in ("branches", "index_rank", "share_index")}
    sizes = NSAConfig(**{name: size for name, size in options.items() if name not in chosen})
    return alive(convert(dense(family, **changes), sizes, **chosen))


def alive(model: Any) -> Any:
    """Change all weights that a dense model has not."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(new in name for new in ("proj_", "compress", "gate.", "indexer.")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
