"""flash-linear-attention: ``fla.ops.nsa``, which ``fla-core`` installs."""

from __future__ import annotations

import warnings

from torch import Tensor

from benchmarks.harness.workloads import Workload
from benchmarks.peers.problem import Peer, Problem, attribute


def selected(problem: Problem) -> Workload:
    """Its selected branch alone: its public function averages keys and values even where it needs no averages."""
    apply = attribute("fla.ops.nsa.parallel", "ParallelNSAFunction").apply
    config, scale = problem.setting.config, problem.setting.head_dim**-0.5
    blocks = problem.block_indices.transpose(1, 2).contiguous()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return apply(q, k, v, blocks, config.num_selected_blocks, config.select_block_size, scale, None)

    inputs = tuple(x[None].detach().requires_grad_() for x in problem.token_major(problem.q, problem.k, problem.v))
    return Workload("fla", attend, inputs, inputs)


def whole(problem: Problem) -> Workload:
    parallel_nsa = attribute("fla.ops.nsa", "parallel_nsa")
    config = problem.setting.config

    def attend(q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor) -> Tensor:
        sizes = {"block_size": config.select_block_size, "block_counts": config.num_selected_blocks}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parallel_nsa(q, k, v, g_cmp=g_cmp, g_slc=g_slc, **sizes)

    qkv = tuple(x[None].detach().requires_grad_() for x in problem.token_major(problem.q, problem.k, problem.v))
    (gates,) = problem.token_major(problem.gates.sigmoid())
    inputs = (*qkv, *(gates[None, ..., i].detach().contiguous().requires_grad_() for i in (0, 1)))
    return Workload("fla", attend, inputs, inputs)


FLA = Peer(
    "fla",
    "fla",
    selected,
    whole,
    "l = d = l' = 64, so a quarter of the compressed keys and no overlap: compare it with ours of these sizes. Gates "
    "come after the sigmoid. Tiles are tuned by itself, at the first length that is measured. Its window needs "
    "flash-attn and is left out.",
)
