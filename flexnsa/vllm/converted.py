"""Converted models in vLLM: its own classes of the dense ones, whose attention becomes that of NSA layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index

from flexnsa.layers.config import LayerConfig, leaders_of
from flexnsa.layers.presets import GATE_LIMIT
from flexnsa.transformers.options import LayerOptions
from flexnsa.vllm.layer import Attention

NAMES = {"q_proj": "w_q", "k_proj": "w_k", "v_proj": "w_v", "o_proj": "w_o", "compress": "phi", "gate": "gate.linear"}
"""How parameters of a converted layer begin, and those of the library's own."""


class ConvertedAttention(Attention):
    """Attention of a :class:`flexnsa.transformers.attention.ConvertedAttention`.

    Args:
        dense: vLLM's layer, which it replaces.
        options: how to attend.
        tables: as of :class:`Attention`.
        vllm_config: of the model.
    """

    in_checkpoint = {own: old for old, own in NAMES.items()}  # noqa: RUF012

    def __init__(self, dense: Any, options: LayerOptions, tables: Tensor, vllm_config: VllmConfig) -> None:
        name, branches = dense.attn.layer_name, options.branches
        number, count = extract_layer_index(name), vllm_config.model_config.hf_config.num_hidden_layers
        leader, prefix = leaders_of(options.share_index, count, options.sizes)[number], name.rpartition(".")[0]
        del vllm_config.compilation_config.static_forward_context[name]  # else vLLM keeps pages for it
        gated = branches if len(branches) > 1 else ()
        gates = {tag: GATE_LIMIT * (1.0 if tag == "slc" else options.opening) for tag in gated}
        super().__init__(
            LayerConfig(
                dim=dense.hidden_size,
                num_heads=dense.total_num_heads,
                num_kv_heads=dense.total_num_kv_heads,
                head_dim=dense.head_dim,
                nsa=options.sizes,
                compression="linear",
                branches=branches,
                impl=options.impl,
                index_rank=options.index_rank,
            ),
            tables,
            vllm_config,
            prefix,
            gates,
            (bool(gates) or dense.qkv_proj.bias is not None, dense.o_proj.bias is not None),
            None if leader == number else prefix.replace(f".{number}.", f".{leader}.") + ".paged",
        )
        self.q_norm, self.k_norm = (getattr(dense, norm, None) for norm in ("q_norm", "k_norm"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by their names in a checkpoint of a converted model."""
        return super().load_weights(WeightsMapper(orig_to_new_prefix=NAMES).apply(weights))


class Converted:
    """Mixin of vLLM's classes."""

    model: Any
    packed_modules_mapping: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        quant = vllm_config.quant_config
        if quant is not None:  # qkv_proj, which is replaced, has names that are not all in a checkpoint
            quant.packed_modules_mapping = quant.packed_modules_mapping | {"qkv_proj": ["q_proj"]}
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]
        options = LayerOptions.of(vllm_config.model_config.hf_config)
        layers = self.model.layers[self.model.start_layer : self.model.end_layer]  # of this stage
        tables = layers[0].self_attn.rotary_emb._compute_cos_sin_cache()
        for layer in layers:
            layer.self_attn = ConvertedAttention(layer.self_attn, options, tables, vllm_config)
        # vLLM would take keys of each branch for those of its own layers.
        stacked = self.model.hf_to_vllm_mapper.orig_to_new_stacked.items()
        own = {old: new for old, new in stacked if new[0] != ".qkv_proj"}
        self.model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=own)
        # Adapters (LoRA) have the names of a checkpoint.
        self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={".o_proj.": ".w_o."})
        self.packed_modules_mapping = self.packed_modules_mapping | {"project": layers[0].self_attn.stored}


class FlexNSALlamaForCausalLM(Converted, LlamaForCausalLM):
    """A converted Llama."""


class FlexNSAMistralForCausalLM(Converted, MistralForCausalLM):
    """A converted Mistral."""


class FlexNSAQwen2ForCausalLM(Converted, Qwen2ForCausalLM):
    """A converted Qwen2."""


class FlexNSAQwen3ForCausalLM(Converted, Qwen3ForCausalLM):
    """A converted Qwen3."""
