"""native-sparse-attention-triton, which takes packed sequences."""

from __future__ import annotations

from torch import Tensor

from benchmarks.harness.workloads import Workload
from benchmarks.peers.problem import Peer, Problem, attribute

OPS = "native_sparse_attention.ops"


def selected(problem: Problem) -> Workload:
    attention, ends = attribute(OPS, "topk_sparse_attention"), problem.ends()
    blocks, size = problem.block_indices[0].contiguous(), problem.setting.config.select_block_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, blocks, size, ends, None)

    inputs = problem.token_major(problem.q, problem.k, problem.v)
    return Workload("native-sparse-attention-triton", attend, inputs, inputs)


def whole(problem: Problem) -> Workload:
    """What its module does between the projections and the window, without rotary embedding."""
    compress, compressed = attribute(OPS, "avgpool_compress"), attribute(OPS, "compressed_attention")
    sparse, ends = attribute(OPS, "topk_sparse_attention"), problem.ends()
    config, length = problem.setting.config, problem.length
    kernel = (config.compress_block_size, config.compress_stride)
    forced = (config.num_init_blocks, config.num_local_blocks)
    selection = (config.select_block_size, config.num_selected_blocks)

    def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        k_cmp, ends_cmp = compress(k, None, ends, *kernel, None)
        v_cmp, _ = compress(v, None, ends, *kernel, None)
        out_cmp, blocks = compressed(
            q, k_cmp, v_cmp, *kernel, *selection, ends, ends_cmp, length, len(k_cmp), None, *forced
        )
        out_slc = sparse(q, k, v, blocks, config.select_block_size, ends, None)
        return gates[..., 0:1] * out_cmp + gates[..., 1:2] * out_slc

    inputs = problem.token_major(problem.q, problem.k, problem.v, problem.gates.sigmoid())
    return Workload("native-sparse-attention-triton", attend, inputs, inputs)


SPARSE_TRITON = Peer(
    "native-sparse-attention-triton",
    "native_sparse_attention",
    selected,
    whole,
    "Gates come after the sigmoid, and the gated sum is plain PyTorch, as in its module. Its window needs flash-attn "
    "and is left out.",
)
