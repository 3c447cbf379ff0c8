"""Ours, as users call it, and as near to the others as it can be brought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.harness.workloads import Workload, nsa
from benchmarks.peers.problem import Adapter, Problem
from flexnsa import MeanCompressor, NSAConfig, native_sparse_attention, selected_attention


def selected(problem: Problem) -> Workload:
    setting = problem.setting

    def attend(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor) -> Tensor:
        return selected_attention(q, k, v, block_indices, config=setting.config, impl=setting.impl)[0]

    inputs = (problem.q, problem.k, problem.v)
    return Workload("flexnsa", setting.compile(attend), (*inputs, problem.block_indices), inputs)


def three_branches(problem: Problem) -> Workload:
    """All branches, each with keys and values of its own; the compressed ones are given."""
    return nsa(problem.setting, problem.length)


def without_window(config: NSAConfig | None = None) -> Adapter:
    """Compressed and selected branch on one key and value, which are averaged on the way; gates get their sigmoid."""

    def make(problem: Problem) -> Workload:
        setting = problem.setting if config is None else replace(problem.setting, config=config)
        compress = MeanCompressor(setting.num_kv_heads, setting.head_dim, config=setting.config)

        def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Any:
            compressed = {"k_cmp": compress(k), "v_cmp": compress(v)}
            options = {"config": setting.config, "impl": setting.impl, "nonnegative_gates": True}
            return native_sparse_attention(q, k, v, gates.sigmoid(), **compressed, branches=("cmp", "slc"), **options)

        inputs = (problem.q, problem.k, problem.v, problem.gates)
        return Workload("flexnsa", setting.compile(attend), inputs, inputs)

    return make
