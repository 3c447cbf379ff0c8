"""The library's own decoder, ``FlexNSAForCausalLM``, in vLLM's layers; parameters have the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from flexnsa.config import gated_branches
from flexnsa.layers.compression import COMPRESSORS, MeanCompressor
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.core import Compressors
from flexnsa.layers.rope import RopeTables, apply_rope, rope_tables
from flexnsa.vllm.attention import NewTokens, PagedAttention
from flexnsa.vllm.unsupported import refuse_options

SERVED = (
    *("dim", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "num_layers", "vocab_size", "nsa", "branches"),
    *("compression", "gate", "rope_base", "shared_keys", "begin_as_mean", "index_rank", "impl", "recompute"),
)
"""Fields of a checkpoint's config that this model knows; any other has to have its default."""


class _Plain(TypedDict):
    bias: bool
    return_bias: bool


PLAIN: _Plain = {"bias": False, "return_bias": False}


class Change(nn.Module):
    """What an indexer adds to queries or keys: one map, or two of low rank."""

    def __init__(self, dim: int, out_dim: int, rank: int | None, prefix: str) -> None:
        super().__init__()
        self.down = None if rank is None else ReplicatedLinear(dim, rank, prefix=f"{prefix}.down", **PLAIN)
        self.up = ColumnParallelLinear(dim if rank is None else rank, out_dim, prefix=f"{prefix}.up", **PLAIN)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(T, dim)``."""
        return self.up(x if self.down is None else self.down(x))


class Indexer(nn.Module):
    """The parameters of an indexer."""

    def __init__(self, config: LayerConfig, index_heads: int, num_kv_heads: int, prefix: str) -> None:
        super().__init__()
        width, rank = config.num_kv_heads * config.head_dim, config.index_rank
        self.num_kv_heads, self.index_heads = num_kv_heads, index_heads
        self.change_q = Change(config.dim, width * index_heads, rank, f"{prefix}.change_q")
        self.change_k = Change(config.dim, width, rank, f"{prefix}.change_k")
        self.phi = COMPRESSORS[config.compression](num_kv_heads, config.head_dim, config=config.nsa.scoring)

    def forward(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``x (T, dim)``, queries and keys to index queries and raw index keys, none of them rotated."""
        count = self.num_kv_heads * self.index_heads
        q = q if q.shape[1] == count else q.unflatten(1, (count, -1)).mean(2)
        return q + self.change_q(x).unflatten(-1, (count, -1)), k + self.change_k(x).view(k.shape)


class Attention(nn.Module):
    """Attention of a layer; the ranks of tensor parallelism share its heads."""

    def __init__(self, config: LayerConfig, tables: Tensor, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks, nsa, branches = get_tensor_model_parallel_world_size(), config.nsa, config.branches
        if config.num_kv_heads % ranks:
            expected = f"a divisor of num_kv_heads={config.num_kv_heads}"
            raise ValueError(f"tensor_parallel_size: expected {expected}, got {ranks}")
        dims = config.head_dim, config.v_head_dim or config.head_dim
        self.gate, self.gated, self.tables = config.gate, gated_branches(config.gate, branches), tables
        self.num_heads, self.num_kv_heads = config.num_heads // ranks, config.num_kv_heads // ranks
        widths = {"w_q": config.num_heads * dims[0]}
        for tag in branches:
            if not (config.shared_keys and tag == "cmp"):
                widths[f"w_k_{tag}"] = config.num_kv_heads * dims[0]
            widths[f"w_v_{tag}"] = config.num_kv_heads * dims[1]
        if self.gated:
            widths["gate.linear"] = config.num_heads * len(self.gated)
        self.parts = {name: width // ranks for name, width in widths.items()}
        """Widths of the projections, on this rank, in the order of their joint product."""
        self.project = MergedColumnParallelLinear(config.dim, [*widths.values()], prefix=f"{prefix}.project", **PLAIN)
        self.w_o = RowParallelLinear(config.num_heads * dims[1], config.dim, prefix=f"{prefix}.w_o", **PLAIN)
        self.phi_k = self.phi_v = self.indexer = None
        if "cmp" in branches:
            self.phi_k, self.phi_v = (
                COMPRESSORS[config.compression](self.num_kv_heads, dim, config=nsa) for dim in dims
            )
        elif "slc" in branches and nsa.index_heads is None:
            self.phi_k = MeanCompressor(self.num_kv_heads, dims[0], config=nsa)
        if nsa.index_heads is not None:
            self.indexer = Indexer(config, nsa.index_heads, self.num_kv_heads, f"{prefix}.indexer")
        self.attend = PagedAttention(
            prefix,
            sizes=nsa,
            branches=branches,
            gated=self.gated,
            num_kv_heads=self.num_kv_heads,
            dims=dims,
            scale=dims[0] ** -0.5,
            compressors=Compressors(self.phi_k, self.phi_v, None if self.indexer is None else self.indexer.phi),
            rotate=self.rotate,
            impl=config.impl,
            vllm_config=vllm_config,
        )

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads ``x (T, H, D)`` by their positions."""
        tables = RopeTables(*(table[positions][:, None, None] for table in self.tables))
        return apply_rope(x[:, :, None], tables)[:, :, 0]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map ``x (T, dim)``, new tokens of all requests of a batch."""
        rows = dict(zip(self.parts, self.project(x).split([*self.parts.values()], -1), strict=True))
        q = rows.pop("w_q").unflatten(-1, (self.num_heads, -1))
        gates: dict[str, Tensor] = {}
        if self.gated:
            logits = rows.pop("gate.linear").unflatten(-1, (self.num_heads, -1))
            weights = logits.softmax(-1) if self.gate == "softmax" else logits.sigmoid()
            gates = dict(zip(self.gated, weights.unbind(-1), strict=True))
        heads = {name[2:]: row.unflatten(-1, (self.num_kv_heads, -1)) for name, row in rows.items()}
        k = {name[2:]: x for name, x in heads.items() if name[0] == "k"}
        v = {name[2:]: x for name, x in heads.items() if name[0] == "v"}
        q_index = k_index = None
        if self.indexer is not None:
            q_index, k_index = self.indexer(x, q, k["slc"])
            q_index = self.rotate(q_index, positions)
        if "cmp" not in k and "slc" in k:
            k["cmp"] = k["slc"]
        k |= {tag: self.rotate(k[tag], positions) for tag in ("slc", "win") if tag in k}
        out = self.attend(NewTokens(self.rotate(q, positions), k, v, gates, q_index, k_index))
        return self.w_o(out.flatten(1))


class MLP(nn.Module):
    """``down(silu(up(x)))``."""

    def __init__(self, dim: int, prefix: str) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(dim, 4 * dim, prefix=f"{prefix}.up", **PLAIN)
        self.down = RowParallelLinear(4 * dim, dim, prefix=f"{prefix}.down", **PLAIN)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(T, dim)``."""
        return self.down(F.silu(self.up(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: LayerConfig, tables: Tensor, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, tables, vllm_config, f"{prefix}.attention")
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
        self.tables = torch.stack(rope_tables(token, config.head_dim, config.rope_base))
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.dim, prefix=f"{prefix}.embedding")
        names = (f"{prefix}.layers.{index}" for index in range(config.num_layers))
        self.layers: Any = nn.ModuleList(DecoderLayer(config, self.tables, vllm_config, name) for name in names)
        self.norm = RMSNorm(config.dim, eps=1e-6)
        self.head = ParallelLMHead(config.vocab_size, config.dim, prefix=f"{prefix}.head")


class FlexNSAForCausalLM(nn.Module):
    """What vLLM calls.

    Raises:
        ValueError: the checkpoint or the engine has an option that cannot be served.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refuse_options(vllm_config)
        config = vllm_config.model_config.hf_config.decoder_config()
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in SERVED and field.default is not MISSING and value != field.default:
                raise ValueError(f"{field.name}: expected {field.default!r} of a model in vLLM, got {value!r}")
        self.model = Decoder(config, vllm_config, f"{prefix}.model" if prefix else "model")
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
        """Load a checkpoint; the projections of a layer's input are parts of one matrix."""
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, weight in weights:
            layer, _, part = name.removesuffix(".weight").partition(".attention.")
            attention: Any = self.get_submodule(f"{layer}.attention") if part else None
            parts = [*attention.parts] if part else []
            if part in parts:
                name = f"{layer}.attention.project.weight"
                parameters[name].weight_loader(parameters[name], weight, parts.index(part))
            else:
                load = getattr(parameters[name], "weight_loader", default_weight_loader)
                load(parameters[name], weight)
            loaded.add(name)
        return loaded
