"""Tiny models and runs, as torchtitan's ``--module tests.integrations.torchtitan.configs --config NAME`` finds them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models import common
from torchtitan.models.common import config_utils
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3 import model_registry as llama3_models
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3 import model_registry as qwen3_models
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from flexnsa.layers.sharding import write

VOCAB, DIM, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 64, 96, 4, 2, 16, 4
EXPERTS = ("w1_EFD", "w2_EDF", "w3_EFD")
ONES: dict[str, Any] = {"weight": nn.init.ones_}


def settle(model: Any, std: float = 0.2) -> None:
    """Have all weights drawn whole, wherever their parts are: DTensor draws other ones for other shards on a CPU."""
    kinds = {common.Linear.Config: ("weight",), common.Embedding.Config: ("weight",), GroupedExperts.Config: EXPERTS}
    for kind, names in kinds.items():
        for path, config, _, _ in model.traverse(kind):
            config.param_init = {name: partial(_fill, name=path + name, std=std) for name in names}


def _fill(parameter: Tensor, name: str, std: float) -> None:
    seed = zlib.crc32(name.encode())
    write(parameter, std * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


class NoTokenizer(BaseTokenizer):
    """A tokenizer of nothing: the rows below are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB


def row(index: int, seq_len: int, documents: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give tokens, positions and labels of the row of that index in the whole data, the same for every rank.

    A document counts in steps of its own, so that a model learns to look back.
    """
    draw = torch.Generator().manual_seed(index)
    cuts = torch.randperm(seq_len - 1, generator=draw)[: documents - 1].sort().values + 1
    lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([seq_len])).tolist()
    tokens, positions, labels = [], [], []
    for length in lengths:
        first, step = torch.randint(VOCAB, (2,), generator=draw).tolist()
        text = (first + (step % 5 + 1) * torch.arange(length + 1)) % VOCAB
        tokens.append(text[:length])
        labels.append(text[1 : length + 1])
        positions.append(torch.arange(length))
    return torch.cat(tokens), torch.cat(positions), torch.cat(labels)


class Rows(BaseDataLoader):
    """Rows of the data, the next ones of all ranks in each batch: so the same steps on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: int = 1

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.read, self.documents, self.seq_len = 0, config.documents, seq_len
        self.batch, self.rank, self.ranks = local_batch_size, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.read + self.rank * self.batch
            self.read += self.batch * self.ranks
            rows = [row(index, self.seq_len, self.documents) for index in range(first, first + self.batch)]
            tokens, positions, labels = (torch.stack(column) for column in zip(*rows, strict=True))
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"]


def _parts(
    block: Any, rope: common.RoPE.Config, qk_norm: common.RMSNorm.Config | None, *, fused: bool = True
) -> dict[str, Any]:
    def norm() -> common.RMSNorm.Config:
        return common.RMSNorm.Config(normalized_shape=DIM, param_init=ONES)

    def layer() -> Any:
        attention = config_utils.make_gqa_config(
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM if qk_norm else None,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=common.ScaledDotProductAttention.Config(),
            rope=rope,
            fuse_qkv=fused,
            qk_norm=None if qk_norm is None else replace(qk_norm),
        )
        feed_forward = config_utils.make_ffn_config(dim=DIM, hidden_dim=HIDDEN, w1_param_init={}, w2w3_param_init={})
        return block.Config(attention_norm=norm(), ffn_norm=norm(), attention=attention, feed_forward=feed_forward)

    embedding = common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM)
    head = common.Linear.Config(in_features=DIM, out_features=VOCAB)
    sizes = {"dim": DIM, "vocab_size": VOCAB, "norm": norm(), "layers": [layer() for _ in range(LAYERS)]}
    return {**sizes, "tok_embeddings": embedding, "lm_head": head}


def _run(spec: ModelSpec, std: float = 0.2) -> Trainer.Config:
    """Describe a run of 20 steps of 4 rows, in fp32."""
    settle(spec.model, std)
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=".",
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        optimizer=replace(default_adamw(lr=3e-3), implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, seq_len=128, steps=20, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


def llama(*, fused: bool = True) -> Trainer.Config:
    """Describe a tiny Llama 3, whose rotary embedding rotates neighbouring components."""
    rope = common.ComplexRoPE.Config(dim=HEAD_DIM, max_seq_len=4096, theta=10_000.0, scaling="llama")
    spec = llama3_models("debugmodel")
    return _run(replace(spec, model=Llama3Model.Config(**_parts(Llama3TransformerBlock, rope, None, fused=fused))))


def debug_llama() -> Trainer.Config:
    """Describe torchtitan's debug Llama: 6 layers of 16 heads, each with keys of its own."""
    config = _run(llama3_models("debugmodel"), std=0.02)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    return config


def llama_apart() -> Trainer.Config:
    """Describe the same one, with projections of their own for queries, keys and values."""
    return llama(fused=False)


def qwen3() -> Trainer.Config:
    """Describe a tiny Qwen3, with norms of queries and keys, whose rotary embedding rotates halves."""
    rope = common.CosSinRoPE.Config(dim=HEAD_DIM, max_seq_len=4096, theta=10_000.0)
    norm = common.RMSNorm.Config(normalized_shape=HEAD_DIM, param_init=ONES)
    spec = qwen3_models("debugmodel")
    return _run(replace(spec, model=Qwen3Model.Config(**_parts(Qwen3TransformerBlock, rope, norm))))


def qwen3_moe() -> Trainer.Config:
    """Describe the same one with four experts instead of every feed-forward layer."""
    config = qwen3()
    model: Any = config.model_spec.model
    for layer in model.layers:
        router = config_utils.make_router_config(dim=DIM, num_experts=4, gate_param_init={}, top_k=2)
        sizes: dict[str, Any] = {"dim": DIM, "hidden_dim": 64, "num_experts": 4, "top_k": 2}
        experts = config_utils.make_routed_experts_config(**sizes, param_init={}, comm_backend="standard")
        layer.moe = config_utils.make_moe_config(num_experts=4, router=router, routed_experts=experts)
        layer.feed_forward = None
    settle(model)
    return config
