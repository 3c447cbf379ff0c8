"""Every causal model type of the installed transformers with flexnsa in it, beside its own eager attention.

    python -m tests.integrations.transformers.sweep [TYPE ...]

takes a minute or two, and prints a line a type and a count of each verdict. Models are random and tiny, and all blocks
are selected: a type is ``right`` where logits are those of eager attention, ``wrong`` where they differ, ``refused``
where flexnsa says by name what it does not do, ``unasked`` where the model never asks for the attention that was
chosen, because it has one of its own or none, ``broken`` where anything else is raised, and ``not built`` where no tiny
model of the type runs with eager attention.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexnsa.transformers.choice import NAME, towers
from flexnsa.transformers.dropin import attention_forward
from tests.integrations.transformers.families import ALL, tokens

LAYERS = 2
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
LARGEST_DIFFERENCE = 1e-3
"""In float32, of logits that are as large as 1; attention that is another differs by more than a tenth."""


def tiny_model(model_type: str) -> Any:
    """Make a random causal model with eager attention, in evaluation mode, always the same.

    Raises:
        RuntimeError: none of the configs that were tried gives a model that runs.
    """
    config_class, errors = CONFIG_MAPPING[model_type], []
    for config in tiny_configs(config_class):
        try:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
            with torch.device("meta"):
                count = model_class._from_config(deepcopy(config)).num_parameters()
            if count > MOST_PARAMETERS:
                raise ValueError(f"expected at most {MOST_PARAMETERS} parameters, got {count}")
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation="eager").eval()
            logits(model)
        except Exception as error:  # whatever a model of any kind says of a config
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return model
    raise RuntimeError("; ".join(dict.fromkeys(errors)))


def tiny_configs(config_class: Any) -> Iterator[Any]:
    """Make configs of :data:`SIZES`, as far as the class has such fields, the likeliest to fit first."""
    known = {field.name for field in fields(config_class)}
    sizes = {config_class.attribute_map.get(name, name): size for size, names in SIZES for name in names.split()}
    sizes = {name: size for name, size in sizes.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention, with a key for every head
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)  # the same, by another name
    full = {"layer_types": ["full_attention"] * LAYERS} if "layer_types" in known else {}
    for attempt in (sizes | full, sizes):
        for left_out in ((), (None,)):  # some of what may be None elsewhere may not be here
            with suppress(Exception):
                config = config_class(**{name: size for name, size in attempt.items() if size not in left_out})
                for name, tower in towers(config).items():
                    setattr(config, name, next(tiny_configs(type(tower))))
                yield config


def with_flexnsa(model: Any) -> Any:
    """Make the same model with flexnsa, of which every block is selected."""
    config = type(model.config)(**model.config.to_dict())
    config.flexnsa = ALL
    same = type(model)._from_config(config, attn_implementation=NAME).eval()
    same.load_state_dict(model.state_dict())
    return same


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Give the logits of a row of tokens, without a cache."""
    return model(tokens(1, 40), use_cache=False).logits


def verdict_on(model_type: str) -> tuple[str, str]:
    """Judge a type; see the module."""
    calls = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return attention_forward(*args, **kwargs)

    try:
        model = tiny_model(model_type)
    except RuntimeError as error:
        return "not built", str(error)
    AttentionInterface.register(NAME, attend)
    try:
        difference = float((logits(with_flexnsa(model)) - logits(model)).abs().max())
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        return ("refused" if "flexnsa" in place else "broken"), f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        AttentionInterface.register(NAME, attention_forward)
    if not calls:
        return "unasked", ""
    return ("right" if difference < LARGEST_DIFFERENCE else "wrong"), f"{difference:.1e}"


def main(model_types: list[str]) -> None:
    """Judge these types, or all."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        verdict, detail = verdict_on(model_type)
        counts[verdict] += 1
        print(f"{verdict:10} {model_type:28} {detail[:200]}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
