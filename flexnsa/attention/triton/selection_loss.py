"""The selection loss on CUDA: products of sampled queries in four kernels, one operator to the compiler.

``block_log_sums`` reduces the scores of each query and head to one log-sum-exp a block, once for the keys of the
selected branch and once for those of the scorer. ``compare_blocks`` turns them into the loss and its derivatives in the
scores of blocks. ``query_gradients`` and ``key_gradients`` compute the scorer's products again, as a flash backward
does. Nothing but these log-sum-exps, a number for each query, head and block, is written between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Scorer
from flexnsa.attention.plan import Plan
from flexnsa.attention.selection_loss import (
    LossAndGradients,
    SelectionLossInputs,
    differentiate_by_results,
    selection_loss_by,
)
from flexnsa.attention.selection_loss import selection_loss as by_products
from flexnsa.config import NSAConfig, num_blocks
from flexnsa.operators import opaque_operator

SCRATCH_SUMS = 2**26
"""Log-sum-exps of a chunk of queries that exist at a time: 256 MB."""


def selection_loss(q: Tensor, k: Tensor, scorer: Scorer, call: Call, query_weights: str) -> tuple[Tensor, Tensor]:
    """Sum the divergences of scores from true shares; see ``flexnsa.attention.interface.SelectionLossSum``.

    Products in chunks compute it on a CPU, with a score_mod, for head dimensions above 256, and of the best keys.
    """
    by_best = scorer.call.config.index_score is not None
    if by_best or not Plan.of(q, k, scorer.q, has_mod=call.score_mod is not None).in_triton:
        return by_products(q, k, scorer, call, query_weights)
    return selection_loss_by(selection_loss_triton, q, k, scorer, call, query_weights)


def scratch_bytes(batch: int, heads: int, kv_heads: int, queries: int, seq_len: int, config: NSAConfig) -> int:
    """Return what the kernels hold at a time: log-sum-exps of all heads, and two numbers for each key head."""
    width, index_config = num_blocks(seq_len, config), config.scoring
    overlapping = index_config.compress_block_size > index_config.compress_stride
    rows = min(queries, max(1, SCRATCH_SUMS // (batch * heads * width)))
    index_heads = kv_heads * (config.index_heads or heads // kv_heads)
    return 4 * batch * rows * width * (heads + (2 if overlapping else 1) * index_heads + 2 * kv_heads)


@opaque_operator("selection_loss_triton", launches_kernels=True)
def selection_loss_triton(inputs: SelectionLossInputs) -> LossAndGradients:
    """Sum the divergences at a few queries, and differentiate the sum."""
    from flexnsa.attention.triton.kernels.selection_loss import KeyGrid, Scored, compare, gradients

    q, k, q_index, k_index, token, start, _, *index_positions = inputs[:10]
    config, index_config = NSAConfig.from_ints(inputs.sizes), NSAConfig.from_ints(inputs.index_sizes)
    (batch, heads, num_queries, _), width = q.shape, num_blocks(k.shape[2], config)
    rows = max(1, SCRATCH_SUMS // (batch * heads * width))
    size = config.select_block_size
    index_grid = KeyGrid(index_config.compress_block_size, index_config.compress_stride, size)
    # Without compression a key is a token, and the first key of a document its first token.
    token_grid, positions = KeyGrid(1, 1, size), (token, start, start)

    def compute(part: slice) -> LossAndGradients:
        true = Scored.of(q, k, part, positions, token_grid, inputs.scale)
        scored = Scored.of(q_index, k_index, part, index_positions, index_grid, inputs.index_scale)
        compared = compare(true, scored, width, config, by_mass=inputs.by_mass)
        return compared.losses.sum(), compared.weights.sum(), *gradients(scored, compared, width)

    parts = [compute(slice(at, at + rows)) for at in range(0, num_queries, rows)]
    if len(parts) == 1:
        return parts[0]
    totals, weights, dq, dk = zip(*parts, strict=True)
    return torch.stack(totals).sum(), torch.stack(weights).sum(), torch.cat(dq, 2), torch.stack(dk).sum(0)


differentiate_by_results(selection_loss_triton)
