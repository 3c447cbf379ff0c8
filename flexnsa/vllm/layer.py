"""Attention of a layer in vLLM's linear layers: the ranks of tensor parallelism share its heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import rotary_embedding
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper

from flexnsa.config import gated_branches
from flexnsa.layers.compression import COMPRESSORS, MeanCompressor
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.core import Compressors
from flexnsa.layers.indexer import Indexer
from flexnsa.vllm.attention import PagedAttention


class Attention(nn.Module):
    """Attention of the library's own layer; its parameters have the names of that, but for one joint projection.

    Args:
        config: of the layer.
        tables: cosines and then sines of all positions, fp32 ``(S, D)``.
        vllm_config: of the model.
        prefix: a unique name.
        gates: by branch that has a gate, its upper bound; by default 1 for those of ``config.gate``.
        biased: whether the projections of the input, and that of the output, have a bias.
        leader: as of :class:`PagedAttention`.
    """

    in_checkpoint: Mapping[str, str] = {}
    """How the names of parameters begin in a checkpoint, where they differ."""

    def __init__(
        self,
        config: LayerConfig,
        tables: Tensor,
        vllm_config: VllmConfig,
        prefix: str,
        gates: Mapping[str, float] | None = None,
        biased: tuple[bool, bool] = (False, False),
        leader: str | None = None,
    ) -> None:
        super().__init__()
        ranks, nsa, branches = get_tensor_model_parallel_world_size(), config.nsa, config.branches
        dims = config.head_dim, config.v_head_dim or config.head_dim
        self.gate, self.tables = config.gate, tables
        self.gates = dict.fromkeys(gated_branches(config.gate, branches), 1.0) if gates is None else gates
        self.num_heads, self.num_kv_heads = config.num_heads // ranks, config.num_kv_heads // ranks
        widths = {"w_q": config.num_heads * dims[0]}
        for tag in branches:
            if not (config.shared_keys and tag == "cmp"):
                widths[f"w_k_{tag}"] = config.num_kv_heads * dims[0]
            widths[f"w_v_{tag}"] = config.num_kv_heads * dims[1]
        if self.gates:
            widths["gate.linear"] = config.num_heads * len(self.gates)
        self.parts = {name: width // ranks for name, width in widths.items()}
        """Widths of the projections, on this rank, in the order of their joint product."""
        *self.stored, w_o = WeightsMapper(orig_to_new_prefix=self.in_checkpoint).apply_list([*self.parts, "w_o"])
        """Names of the projections in a checkpoint."""
        quant = vllm_config.quant_config
        if quant is not None:
            quant.packed_modules_mapping = quant.packed_modules_mapping | {"project": self.stored}
        options: Any = {"quant_config": quant, "return_bias": False}
        self.project = MergedColumnParallelLinear(
            config.dim, [*widths.values()], biased[0], **options, prefix=f"{prefix}.project"
        )
        if biased[0]:
            nn.init.zeros_(self.project.bias)  # not all of its parts may have one
        self.w_o = RowParallelLinear(
            config.num_heads * dims[1], config.dim, biased[1], **options, prefix=f"{prefix}.{w_o}"
        )
        self.phi_k = self.phi_v = self.indexer = None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if "cmp" in branches:
            compressor = COMPRESSORS[config.compression]
            self.phi_k, self.phi_v = (compressor(self.num_kv_heads, dim, config=nsa) for dim in dims)
        elif "slc" in branches and nsa.index_heads is None:
            self.phi_k = MeanCompressor(self.num_kv_heads, dims[0], config=nsa)
        if nsa.index_heads is not None and leader is None:
            shape, rank = (self.num_kv_heads, dims[0]), config.index_rank
            self.indexer = Indexer(config.dim, *shape, config=nsa, compression=config.compression, rank=rank)
        compressors = Compressors(self.phi_k, self.phi_v, None if self.indexer is None else self.indexer.phi)
        self.attend = PagedAttention(prefix, config, self.num_kv_heads, compressors, self.rotate, vllm_config, leader)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate heads ``x (T, H, D)`` by their positions; this may change ``x``."""
        turned = x.float().flatten(1).contiguous()  # a view of x, where its dtype and layout allow it
        rotary_embedding(positions.to(torch.int64), turned, None, x.shape[2], self.tables, True)
        return turned.view(x.shape).to(x.dtype)

    def weigh(self, logits: Tensor) -> Tensor:
        """Map logits ``(T, Hq, gated branches)`` to the weights of all branches, ``(T, Hq, branches)``."""
        gates = logits.softmax(-1) if self.gate == "softmax" else logits.sigmoid()
        if [*self.gates] == [*self.attend.layer.branches] and {*self.gates.values()} == {1.0}:
            return gates
        weights = {tag: gate * most for (tag, most), gate in zip(self.gates.items(), gates.unbind(-1), strict=True)}
        one = logits.new_ones(logits.shape[:2])
        return torch.stack([weights.get(tag, one) for tag in self.attend.layer.branches], -1)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Map ``(T, dim)``, new tokens of all requests of a batch."""
        rows = dict(zip(self.parts, self.project(hidden_states).split([*self.parts.values()], -1), strict=True))
        q = rows.pop("w_q").view(len(hidden_states), self.num_heads, -1)
        q = q if self.q_norm is None else self.q_norm(q)
        gates = self.weigh(rows.pop("gate.linear", q[..., :0]).reshape(*q.shape[:2], len(self.gates)))
        heads = {name[2:]: row.view(len(row), self.num_kv_heads, -1) for name, row in rows.items()}
        k = {name[2:]: x if self.k_norm is None else self.k_norm(x) for name, x in heads.items() if name[0] == "k"}
        v = {name[2:]: x for name, x in heads.items() if name[0] == "v"}
        turned, k_index = {"q": q} | {tag: k[tag] for tag in ("slc", "win") if tag in k}, None
        if self.indexer is not None:
            of_q, of_k = self.indexer(hidden_states[None], q.transpose(0, 1)[None], k["slc"].transpose(0, 1)[None])
            turned["q_index"], k_index = of_q[0].transpose(0, 1), of_k[0].transpose(0, 1)
        if "cmp" not in k and "slc" in k:
            k["cmp"] = k["slc"]
        joint = self.rotate(torch.cat([*turned.values()], 1), positions)
        turned = dict(zip(turned, joint.split([x.shape[1] for x in turned.values()], 1), strict=True))
        q, q_index = turned.pop("q"), turned.pop("q_index", None)
        out = self.attend(q, k | turned, v, gates, q_index, k_index)
        return self.w_o(out.flatten(1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load parameters by their names in a checkpoint; return the names of those that hold them here."""
        loaded: set[str] = set()
        parts, ranks = [*self.parts], get_tensor_model_parallel_world_size()
        for name, weight in weights:
            part, _, kind = name.rpartition(".")
            holder, shard = (f"project.{kind}", (parts.index(part),)) if part in parts else (name, ())
            if name.startswith("indexer.change") and part.endswith("up"):
                weight = weight.chunk(ranks)[get_tensor_model_parallel_rank()]
            parameter: Any = self.get_parameter(holder)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight, *shard)
            loaded.add(holder)
        return loaded
