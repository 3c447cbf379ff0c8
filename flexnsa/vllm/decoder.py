"""The library's own decoder, ``FlexNSAForCausalLM``, in vLLM's layers; parameters have the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import utils
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.sequence import IntermediateTensors

from flexnsa.layers.rope import rope_tables
from flexnsa.vllm.layer import Attention


class MLP(nn.Module):
    """``down(silu(up(x)))``."""

    def __init__(self, dim: int, quant: Any, prefix: str) -> None:
        super().__init__()
        options: Any = {"bias": False, "quant_config": quant, "return_bias": False}
        self.up = ColumnParallelLinear(dim, 4 * dim, **options, prefix=f"{prefix}.up")
        self.down = RowParallelLinear(4 * dim, dim, **options, prefix=f"{prefix}.down")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(T, dim)``."""
        return self.down(F.silu(self.up(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: Any, tables: Tensor, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        layers, _, index = prefix.rpartition(".")
        number = config.leaders[int(index)]
        leader = None if number == int(index) else f"{layers}.{number}.attention.paged"
        self.attention_norm = RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, tables, vllm_config, f"{prefix}.attention", leader=leader)
        self.mlp_norm = RMSNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config.dim, vllm_config.quant_config, f"{prefix}.mlp")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map the residual stream ``(T, dim)``."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """The parameters of a checkpoint, or those of a stage of pipeline parallelism."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        token = torch.arange(vllm_config.model_config.max_model_len)
        tables = torch.cat(rope_tables(token, config.head_dim, config.rope_base), -1)
        layer = partial(DecoderLayer, config, tables, vllm_config)
        self.start, _, self.layers = utils.make_layers(config.num_layers, layer, f"{prefix}.layers")
        self.embedding, self.norm, self.head = (utils.PPMissingLayer() for _ in range(3))
        if get_pp_group().is_first_rank:
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.dim, prefix=f"{prefix}.embedding")
        if get_pp_group().is_last_rank:
            self.norm = RMSNorm(config.dim, eps=1e-6)
            self.head = ParallelLMHead(config.vocab_size, config.dim, prefix=f"{prefix}.head")


class FlexNSAForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """What vLLM calls."""

    # vLLM would leave out, without a word, what an adapter (LoRA) changes in an indexer; it refuses these names.
    of_indexers: Any = re.compile(r"(\.indexer\..*)\.lora_")  # Any: vLLM's hint is a Pattern of no type
    hf_to_vllm_mapper = utils.WeightsMapper(orig_to_new_regex={of_indexers: r"\1.indexer.lora_"})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config.decoder_config()
        self.model = Decoder(config, vllm_config, f"{prefix}.model" if prefix else "model")
        self.config = vllm_config.model_config.hf_config
        first: Any = self.model.layers[self.model.start]
        self.packed_modules_mapping = {"project": first.attention.stored}  # of adapters (LoRA)
        self.make_empty_intermediate_tensors = utils.make_empty_intermediate_tensors_factory(["x"], config.dim)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens ``(T,)``."""
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Return the hidden states ``(T, dim)`` of tokens at ``positions (T,)``, which go from stage to stage."""
        x: Any = inputs_embeds if intermediate_tensors is None else intermediate_tensors["x"]
        x = self.model.embedding(input_ids) if x is None else x
        for layer in self.model.layers:  # those of other stages return x
            x = layer(x, positions)
        return self.model.norm(x) if get_pp_group().is_last_rank else IntermediateTensors({"x": x})

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of hidden states."""
        return self.logits_processor(self.model.head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint."""
        return utils.AutoWeightsLoader(self).load_weights(weights)
