"""The library's own decoder, ``FlexNSAForCausalLM``, in vLLM's layers; parameters have the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from flexnsa.layers.config import LayerConfig
from flexnsa.layers.rope import rope_tables
from flexnsa.vllm.layer import Attention
from flexnsa.vllm.unsupported import refuse_options


class MLP(nn.Module):
    """``down(silu(up(x)))``."""

    def __init__(self, dim: int, prefix: str) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(dim, 4 * dim, bias=False, return_bias=False, prefix=f"{prefix}.up")
        self.down = RowParallelLinear(4 * dim, dim, bias=False, return_bias=False, prefix=f"{prefix}.down")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(T, dim)``."""
        return self.down(F.silu(self.up(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(
        self, config: LayerConfig, tables: Tensor, vllm_config: VllmConfig, prefix: str, leader: str | None
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, tables, vllm_config, f"{prefix}.attention", leader=leader)
        self.mlp_norm = RMSNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config.dim, f"{prefix}.mlp")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map the residual stream ``(T, dim)``."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """All parameters of a checkpoint."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        token = torch.arange(vllm_config.model_config.max_model_len)
        self.tables = torch.cat(rope_tables(token, config.head_dim, config.rope_base), -1)
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.dim, prefix=f"{prefix}.embedding")
        self.layers: Any = nn.ModuleList()
        for index, number in enumerate(config.leaders):
            leader = None if number == index else self.layers[number].attention.attend.name
            self.layers.append(DecoderLayer(config, self.tables, vllm_config, f"{prefix}.layers.{index}", leader))
        self.norm = RMSNorm(config.dim, eps=1e-6)
        self.head = ParallelLMHead(config.vocab_size, config.dim, prefix=f"{prefix}.head")


class FlexNSAForCausalLM(nn.Module, SupportsLoRA):
    """What vLLM calls.

    Raises:
        ValueError: the checkpoint or the engine has an option that cannot be served.
    """

    # vLLM would leave out, without a word, what an adapter (LoRA) changes in an indexer; it refuses these names.
    of_indexers: Any = re.compile(r"(\.indexer\..*)\.lora_")  # Any: vLLM's hint is a Pattern of no type
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex={of_indexers: r"\1.indexer.lora_"})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_options(vllm_config)
        config = vllm_config.model_config.hf_config.decoder_config()
        self.model = Decoder(config, vllm_config, f"{prefix}.model" if prefix else "model")
        self.config = vllm_config.model_config.hf_config
        self.packed_modules_mapping = {"project": [*self.model.layers[0].attention.parts]}  # of adapters (LoRA)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens ``(T,)``."""
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002  (of pipeline parallelism)
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states ``(T, dim)`` of tokens at ``positions (T,)``."""
        x: Tensor = self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.model.layers:
            x = layer(x, positions)
        return self.model.norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of hidden states."""
        return self.logits_processor(self.model.head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights)
