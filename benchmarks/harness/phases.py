"""The phases of NSA, each as a function of its own inputs."""

from __future__ import annotations

import importlib
import warnings
from functools import reduce
from operator import add

import torch
from torch import Tensor

from benchmarks.harness.setting import Setting
from benchmarks.harness.workloads import Maker, Workload, dense_inputs
from flexnsa import compressed_attention, select_blocks, selected_attention, sliding_window_attention
from flexnsa.attention.dispatch import gated
from flexnsa.attention.selection import top_blocks
from flexnsa.config import num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.masks.selected import selected_mask


def compression_phase(setting: Setting, length: int) -> Workload:
    """Both MLPs, for keys and for values."""
    phi_k, phi_v = setting.compressor(), setting.compressor()
    inputs = (setting.draw(setting.num_kv_heads, length), setting.draw(setting.num_kv_heads, length))
    weights = (*phi_k.parameters(), *phi_v.parameters())
    call = setting.compile(lambda k, v: torch.cat((phi_k(k), phi_v(v)), -1))
    return Workload("compress", call, inputs, (*inputs, *weights))


def compressed_phase(setting: Setting, length: int) -> Workload:
    inputs = dense_inputs(setting, length, num_compressed(length, setting.config))
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v: compressed_attention(q, k, v, **options)[0])
    return Workload("cmp branch", call, inputs, inputs)


def selection_phase(setting: Setting, length: int) -> Workload:
    """Scores and top-n, the log-sum-exp of the compressed branch at hand."""
    q, k_cmp, lse = _scored(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k_cmp, lse: select_blocks(q, k_cmp, lse=lse, **options))
    return Workload("score and select", call, (q, k_cmp, lse), ())


def scoring_phase(setting: Setting, length: int) -> Workload:
    """Scores alone, chunk by chunk as the selection makes them."""
    from flexnsa.attention.triton.kernels.importance import Band, Scores, importance
    from flexnsa.attention.triton.selection import chunks

    q, k_cmp, lse = _scored(setting, length)
    config, band = setting.config, Band.of(setting.config)
    plan = list(chunks(length, setting.num_kv_heads, None, config))
    own, passed = torch.empty(
        2, max(rows * width for _, rows, width in plan) * setting.num_kv_heads, device=setting.device
    )

    def score(q: Tensor, k_cmp: Tensor, lse: Tensor) -> None:
        for first, rows, width in plan:
            scores = Scores(own, passed, rows, width, band)
            importance(q, k_cmp, lse, None, scores, first, config=config, factors=(setting.head_dim**-0.5, 0.0))

    return Workload("score", score, (q, k_cmp, lse), ())


def mask_phase(setting: Setting, length: int) -> Workload:
    """The block mask of the selected branch, part of that branch's forward."""

    def build(block_indices: Tensor) -> list[Tensor | None]:
        selected = selected_mask(block_indices, None, length, rows=rows, config=setting.config)
        return [*selected.block_mask.as_tuple()[2:10], selected.tokens]

    rows = -(-setting.num_heads // setting.num_kv_heads // 16) * 16
    return Workload("mask", setting.compile(build), (random_blocks(setting, length),), ())


def lists_phase(setting: Setting, length: int) -> Workload:
    """The queries of every key block, part of the selected branch's forward in Triton."""
    from flexnsa.attention.triton.kernels.selected_lists import Lists, Selection, build_lists
    from flexnsa.attention.triton.selected import capacity_of, chunk_of

    config, group = setting.config, setting.num_heads // setting.num_kv_heads
    partial_rows = group * config.num_selected_blocks * setting.head_dim * setting.dtype.itemsize

    def build(block_indices: Tensor) -> Lists:
        selection = Selection(block_indices, None, None, config.select_block_size, length)
        return build_lists(selection, chunk_of(partial_rows), capacity_of(group, setting.dtype.itemsize))

    return Workload("lists", build, (random_blocks(setting, length),), ())


def selected_phase(setting: Setting, length: int) -> Workload:
    inputs = dense_inputs(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v, blocks: selected_attention(q, k, v, blocks, **options)[0])
    return Workload("slc branch", call, (*inputs, random_blocks(setting, length)), inputs)


def fla_selected(setting: Setting, length: int) -> Workload:
    """The selected branch of flash-linear-attention, given the same kind of blocks, in its own layout."""
    parallel_nsa = importlib.import_module("fla.ops.nsa").parallel_nsa

    inputs = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in dense_inputs(setting, length))
    # It takes no padding: the blocks of early queries repeat their first, which it masks by count.
    blocks = random_blocks(setting, length).transpose(1, 2).contiguous()
    counts = (blocks >= 0).sum(-1)
    blocks = blocks.clamp_min(0).long()
    size = setting.config.select_block_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parallel_nsa(q, k, v, block_indices=blocks, block_counts=counts, block_size=size)

    return Workload("fla: selected branch", attend, inputs, inputs)


def window_phase(setting: Setting, length: int) -> Workload:
    inputs = dense_inputs(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v: sliding_window_attention(q, k, v, **options)[0])
    return Workload("win branch", call, inputs, inputs)


def gate_phase(setting: Setting, length: int) -> Workload:
    inputs = (
        setting.draw(setting.num_heads, length, 3),
        *(setting.draw(setting.num_heads, length) for _ in range(3)),
    )
    call = setting.compile(lambda gates, *outputs: reduce(add, map(gated, gates.unbind(-1), outputs)))
    return Workload("gate", call, inputs, inputs)


PHASES: dict[str, Maker] = {
    "compress": compression_phase,
    "cmp branch": compressed_phase,
    "score": scoring_phase,
    "score and select": selection_phase,
    "mask": mask_phase,
    "lists": lists_phase,
    "slc branch": selected_phase,
    "win branch": window_phase,
    "gate": gate_phase,
    "fla: selected branch": fla_selected,
}


def random_blocks(setting: Setting, length: int) -> Tensor:
    """Blocks as selection gives them: forced ones, the rest drawn evenly from the past."""
    config, chunk = setting.config, 4096
    blocks = -(-length // config.select_block_size)
    chosen = []
    for first in range(0, length, chunk):
        token = torch.arange(first, min(first + chunk, length), dtype=torch.int32, device=setting.device)[None]
        zero = torch.zeros_like(token)
        scores = torch.rand(1, setting.num_kv_heads, token.shape[1], blocks, device=setting.device)
        chosen.append(top_blocks(scores, Positions(token, zero, zero), config=config))
    return torch.cat(chosen, dim=2)


def _scored(setting: Setting, length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k_cmp, v_cmp = (x.detach() for x in dense_inputs(setting, length, num_compressed(length, setting.config)))
    lse = compressed_attention(q, k_cmp, v_cmp, config=setting.config, impl=setting.impl)[1]
    assert lse is not None
    return q, k_cmp, lse
