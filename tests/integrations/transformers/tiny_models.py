"""A small random model of every causal type that the installed transformers has, and of families that are converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from flexnsa.transformers.choice import towers
from flexnsa.transformers.local_layers import FULL, LOCAL, WITHOUT
from tests.integrations.transformers.families import FEW, alive, tokens

LAYERS = 2
WINDOW = 12
"""Of sliding layers, and the length of chunks."""
SIZES: tuple[tuple[Any, str], ...] = (
    (64, "vocab_size hidden_size n_embd d_model embed_dim dim word_embed_proj_dim embedding_size intermediate_size"),
    (64, "ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank"),
    (32, "shared_intermediate_size moe_shared_expert_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts"),
    (16, "head_dim v_head_dim qk_nope_head_dim kv_channels d_kv attention_head_dim"),
    (8, "rotary_dim qk_rope_head_dim"),
    (1, "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (0, "pad_token_id bos_token_id"),
    (0.0, "attention_dropout attn_pdrop dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob"),
    (0.0, "resid_pdrop embd_pdrop activation_dropout residual_dropout_prob embedding_dropout_prob"),
    (0.2, "initializer_range init_std"),
    (True, "is_decoder causal"),
    (False, "use_sliding_window"),
    (None, "eos_token_id sep_token_id sliding_window"),
)
"""What a tiny model has, by the names that configs have for it."""
MOST_PARAMETERS = 20_000_000
"""Of a model that is built: where a size has another name, a model is as large as the one that people train."""
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 1}},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "gemma3n_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    | {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granite": {"attention_multiplier": 0.1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {
        "num_layers": 1,
        "head_dim": 8,
        "zero_expert_num": 1,
        "moe_topk": 2,
        "routed_scaling_factor": 1.0,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "mpt": {"n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64, "attn_config": {}},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"], "indexer_budget": 8}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "attention_hidden_size": 128, "mamba_dt_rank": 4}
    | {"num_hidden_layers": 6}
    | {"attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_d_state": 8}
    | {"num_key_value_heads": 4, "hybrid_layer_ids": [1]},
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"]}
    | {"sliding_window": WINDOW},
}
"""What some types have by other names, or need."""


def tiny_model(model_type: str) -> Any:
    """Make a random causal model with eager attention, in evaluation mode, always the same.

    Raises:
        RuntimeError: none of the configs that were tried gives a model that runs.
    """
    config_class, errors = CONFIG_MAPPING[model_type], []
    for config in tiny_configs(config_class, OTHERS.get(model_type, {})):
        try:
            with torch.device("meta"):
                count = AutoModelForCausalLM.from_config(deepcopy(config)).num_parameters()
            if count > MOST_PARAMETERS:
                raise ValueError(f"expected at most {MOST_PARAMETERS} parameters, got {count}")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                model(tokens(1, 40), use_cache=False)
        except Exception as error:  # whatever a model of any kind raises
            errors.append(f"{type(error).__name__}: {error}".replace("\n", " "))
        else:
            return model
    raise RuntimeError("; ".join(dict.fromkeys(errors)))


def tiny_configs(config_class: Any, others: dict[str, Any]) -> Iterator[Any]:
    """Make configs of :data:`SIZES`, as far as the class has such fields, the likeliest to fit first."""
    known = {field.name for field in fields(config_class)}
    sizes = {config_class.attribute_map.get(name, name): size for size, names in SIZES for name in names.split()}
    sizes = {name: size for name, size in sizes.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention, with a key for every head
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)  # the same, by another name
    for types in _layer_types(config_class, known):
        for left_out in ((), (None,)):  # some of what may be None elsewhere may not be here
            with suppress(Exception):
                options = {name: size for name, size in (sizes | types).items() if size not in left_out}
                config = config_class(**options | others)
                for name, tower in towers(config).items():
                    if name not in others:
                        setattr(config, name, next(tiny_configs(type(tower), OTHERS.get(tower.model_type, {}))))
                yield config


def _layer_types(config_class: Any, known: set[str]) -> list[dict[str, Any]]:
    """Return what makes a config have each type of layer that it has by default, the last of full attention."""
    if "layer_types" not in known:
        return [{}]
    types = {*(getattr(_default(config_class), "layer_types", None) or ("full_attention",))}
    last = next((kind for kind in FULL if kind in types), min(types))
    first = next((kind for kind in LOCAL + WITHOUT if kind in types), last)
    window = {"sliding_window": WINDOW} if first == "sliding_attention" else {}
    chunk = {"attention_chunk_size": WINDOW} if first == "chunked_attention" else {}
    return [{"layer_types": [first, last]} | window | chunk, {}]


def _default(config_class: Any) -> Any:
    with suppress(Exception):
        return config_class()


FAMILIES = {
    "cohere": "neighbouring channels rotated together",
    "gemma2": "a cap on scores, and sliding layers",
    "gemma3_text": "sliding layers with other angles",
    "glm4": "a part of the channels rotated, neighbours together",
    "gpt_oss": "sinks, biases, and sliding layers",
    "granite": "a scale of its own",
    "llama": "nothing else",
    "mistral": "nothing else",
    "mixtral": "experts",
    "olmo2": "norms of all heads together",
    "olmo_hybrid": "linear layers",
    "phi3": "one projection for queries, keys and values",
    "qwen2": "biases",
    "qwen3": "norms of each head",
    "qwen3_moe": "experts",
    "qwen3_next": "gates on what heads give, and linear layers",
    "smollm3": "layers that do not rotate",
}


def dense_model(kind: str) -> Any:
    """Make a tiny model whose layers, if it has layers that do not rotate, do and do not."""
    model = tiny_model(kind)
    if kind == "smollm3":
        model.config.no_rope_layers = [1, 0]
        model = type(model)._from_config(model.config, attn_implementation="eager").eval()
    return model


def few_blocks(kind: str) -> Any:
    """Make a converted model of three branches that leaves blocks out, in float64, where none score the same."""
    model = dense_model(kind)
    model.config._experts_implementation = "eager"  # the others take no float64
    return alive(convert(model.double(), NSAConfig(**FEW)))
