"""The selection loss on CUDA: products of sampled queries in four kernels, one operator to the compiler.

``block_log_sums`` reduces the scores of each query and head to one log-sum-exp a block, once for the keys of the
selected branch and once for those of the scorer. ``compare_blocks`` turns them into the loss and its derivatives in the
scores of blocks. ``query_gradients`` and ``key_gradients`` compute the scorer's products again, as a flash backward
does. Nothing but these log-sum-exps, a number for each query, head and block, is written between them.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Scorer
from flexnsa.attention.plan import Plan
from flexnsa.attention.selection_loss import (
    LossAndGradients,
    SelectionLossInputs,
    differentiate_by_results,
    selection_loss_by,
    sum_losses,
)
from flexnsa.attention.selection_loss import selection_loss as by_products
from flexnsa.attention.shares import mean_shares, queries_at_once
from flexnsa.attention.triton.arguments import factors_of
from flexnsa.config import NSAConfig, num_blocks
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import cap_of
from flexnsa.operators.opaque import opaque_operator

SCRATCH_SUMS = 2**26
"""Log-sum-exps of a chunk of queries that exist at a time: 256 MB."""


def selection_loss(q: Tensor, k: Tensor, scorer: Scorer, call: Call, query_weights: str) -> tuple[Tensor, Tensor]:
    """Sum the divergences of scores from true shares; see ``flexnsa.attention.interface.SelectionLossSum``.

    Products in chunks compute it on a CPU, with a mod that is no soft cap, and for head dimensions above 256.
    """
    if not Plan.of(q, k, scorer.q, has_mod=cap_of(call.score_mod) is None).in_triton:
        return by_products(q, k, scorer, call, query_weights)
    by_mass = scorer.call.config.index_score is None
    operator = selection_loss_triton if by_mass else product_loss_triton
    return selection_loss_by(operator, q, k, scorer, call, query_weights)


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
        true = Scored.of(q, k, part, positions, token_grid, factors_of(inputs.call))
        scored = Scored.of(q_index, k_index, part, index_positions, index_grid, factors_of(inputs.index_call))
        compared = compare(true, scored, width, config, by_mass=inputs.by_mass)
        return compared.losses.sum(), compared.weights.sum(), *gradients(scored, compared, width)

    parts = [compute(slice(at, at + rows)) for at in range(0, num_queries, rows)]
    if len(parts) == 1:
        return parts[0]
    totals, weights, dq, dk = zip(*parts, strict=True)
    return torch.stack(totals).sum(), torch.stack(weights).sum(), torch.cat(dq, 2), torch.stack(dk).sum(0)


@opaque_operator("product_loss_triton", launches_kernels=True)
def product_loss_triton(inputs: SelectionLossInputs) -> LossAndGradients:
    """As :func:`selection_loss_triton`, of scores by products: kernels compute true shares, which have most heads."""
    return sum_losses(inputs, log_shares, queries_at_once(inputs.q_index, inputs.k_index))


def log_shares(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Compute :func:`flexnsa.attention.shares.log_shares_at_once`, without a score_mod."""
    from flexnsa.attention.triton.kernels.selection_loss import KeyGrid, Scored, log_sums

    size, width = call.config.select_block_size, num_blocks(k.shape[2], call.config)
    token, start, _ = (x.to(torch.int32) for x in positions.tensors)
    queries = slice(0, q.shape[2])
    sums, _ = log_sums(Scored.of(q, k, queries, (token, start, start), KeyGrid(1, 1, size), factors_of(call)), width)
    unseen = torch.arange(width, device=q.device) * size > (token - start)[..., None]  # and never written
    of_blocks = sums.view(len(q), k.shape[1], -1, q.shape[2], width).masked_fill(unseen[:, None, None], -torch.inf)
    return mean_shares(of_blocks * log(2))


differentiate_by_results(selection_loss_triton)
differentiate_by_results(product_loss_triton)
