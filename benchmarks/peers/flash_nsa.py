"""Scalable-Flash-Native-Sparse-Attention: its training form, which its published times are of."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.workloads import Workload
from benchmarks.peers.problem import Peer, Problem, attribute
from flexnsa.config import num_blocks

TRAINING = "flash_nsa.modules.megatron_level_nsa"


def selected(problem: Problem) -> Workload:
    """Its selected branch; padding is the number of blocks, as its own selection has it."""
    _prepare(problem)
    select_attn = attribute("flash_nsa.ops.select_attn", "select_attn")
    blocks = problem.block_indices[0]
    blocks = torch.where(blocks < 0, num_blocks(problem.length, problem.setting.config), blocks).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return select_attn(q, k, v, blocks)

    inputs = problem.token_major(problem.q, problem.k, problem.v)
    return Workload("Scalable-Flash-NSA", attend, inputs, inputs)


def whole(problem: Problem) -> Workload:
    """Everything but its window, whose place zeros take."""
    _prepare(problem)
    module = importlib.import_module(TRAINING)
    zeros = torch.zeros_like(problem.token_major(problem.q)[0])

    def no_window(*_: Any, **__: Any) -> tuple[Tensor, None]:
        return zeros, None

    def no_window_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    module.swa_fwd, module.swa_bwd = no_window, no_window_backward  # pyright: ignore[reportAttributeAccessIssue]

    def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return module.flash_nsa_varlen_func(q, k, v, gates, None, None)

    inputs = problem.token_major(problem.q, problem.k, problem.v, problem.gates)
    return Workload("Scalable-Flash-NSA", attend, inputs, inputs)


def _prepare(problem: Problem) -> None:
    """Tell its global helper the sizes and the sequence, which it reads in every call."""
    helper, config = attribute("flash_nsa.utils", "NSAHelper"), problem.setting.config
    helper.set_hyperparameters(
        config.compress_block_size,
        config.compress_stride,
        config.select_block_size,
        config.window_size,
        config.num_selected_blocks,
        config.num_init_blocks,
        config.num_local_blocks,
    )
    helper.init_cu_seqlens(problem.ends())


FLASH_NSA = Peer(
    "Scalable-Flash-NSA",
    "flash_nsa",
    selected,
    whole,
    "Its window needs FlashAttention-3 and is left out; zeros stand in its place, made before the clock starts in "
    "forward and written in backward, so its gated sum reads and writes one branch more than ours. Scores are kept in "
    "fp16. Nothing is recomputed in backward, which is its default.",
)
