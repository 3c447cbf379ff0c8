"""Block selection on CUDA: importance and top-n in Triton, chunked over queries, one operator to the compiler.

Importance for all queries would be ``S x M`` numbers. Here it exists for one chunk of queries at a time, in a scratch
buffer that all chunks share; a chunk of a causal sequence is only as wide as its last query needs, so the first chunks
hold more queries. Scoring and selecting stay two kernels: the products want tiles of queries and blocks, the selection
needs all scores of a query, and writing and reading them once costs little next to either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flexnsa.attention.compilation import compile_once
from flexnsa.attention.interface import Call, given
from flexnsa.attention.plan import Plan
from flexnsa.attention.scoring import aligned, group_probabilities
from flexnsa.attention.selection import SelectionInputs, count_choices, select_in_chunks, select_with_mod
from flexnsa.attention.triton.arguments import factors_of
from flexnsa.config import NSAConfig, blocks_within, num_blocks
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import cap_of
from flexnsa.operators.opaque import opaque_operator

SCRATCH_BYTES = 256 * 2**20
MANY_PROGRAMS = 4096
"""Queries times kv heads of a chunk, at least. At 512k tokens 64 MB hold a quarter of it: to score half the queries so
took 245 ms, and 194 in chunks of this size (H200)."""
ROW_MULTIPLE = 128
"""Chunks hold whole tiles of queries, so that no program idles at their ends."""
MODIFIED_SCORES = 2**26
"""Scores of a chunk of queries that are in memory for a mod: 256 MB."""


def select(
    q: Tensor,
    k_cmp: Tensor,
    call: Call,
    lse: Tensor | None,
    importance: Tensor | None,  # noqa: ARG001  (no branch of a GPU makes it)
) -> Tensor:
    """Choose the ``n`` best blocks of each query (NSA paper, Eq. 8 to 12): two Triton kernels on CUDA.

    Those take no score_mod but a soft cap: with another, products of a chunk of queries are compiled with it. On a CPU
    it is products of a chunk in any case. Without ``lse`` it is computed here, where scores are the mass of a softmax.
    """
    if cap_of(call.score_mod) is None:
        probabilities = compile_once(group_probabilities) if q.is_cuda else group_probabilities
        rows = MODIFIED_SCORES // (q.shape[0] * q.shape[1] * max(1, k_cmp.shape[2]))
        chunk = max(1, rows // ROW_MULTIPLE) * ROW_MULTIPLE
        return select_with_mod(q, k_cmp, lse, call, probabilities=probabilities, chunk=chunk)
    return (select_blocks_triton if q.is_cuda else select_in_chunks)(q, k_cmp, lse, call)


def select_blocks_triton(q: Tensor, k_cmp: Tensor, lse: Tensor | None, call: Call) -> Tensor:
    """Select by the Triton kernels; arguments and result as of :func:`select`."""
    return _select_blocks_triton(SelectionInputs.of(q, k_cmp, lse, call))


@opaque_operator("select_blocks_triton", launches_kernels=True)
def _select_blocks_triton(inputs: SelectionInputs) -> Tensor:
    return launch_selection(*inputs[:3], inputs.call)


_select_blocks_triton.register_fake(SelectionInputs.empty_blocks)


def chunks(num_queries: int, choices: int, width: int | None, config: NSAConfig) -> Iterator[tuple[int, int, int]]:
    """Split the queries into chunks ``(first_row, num_rows, width)`` of about ``SCRATCH_BYTES`` of scores.

    Where rows are so long that these are few rows, a chunk holds more, :data:`MANY_PROGRAMS` over all heads.

    Args:
        num_queries: ``T``.
        choices: of each query, over the whole batch: ``B * Hkv``, or ``B`` where all heads choose together.
        width: blocks that every chunk holds; None for a causal sequence, whose chunk from ``first_row`` on holds
            ``(first_row + num_rows) / l'`` blocks, so that its height follows from a quadratic equation.
        config: the sizes.
    """
    cells = SCRATCH_BYTES // (8 * choices)
    first = 0
    while first < num_queries:
        if width is None:
            rows = (math.isqrt(first**2 + 4 * cells * config.select_block_size) - first) // 2
        else:
            rows = cells // width
        rows = max(rows, MANY_PROGRAMS // choices)
        rows = min(max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE, num_queries - first)
        yield first, rows, aligned(width or num_blocks(first + rows + config.ahead, config))
        first += rows


def _are_scattered(positions: Positions | None, num_queries: int) -> bool:
    """Return whether queries of packed documents are few enough to be rows of their own.

    New tokens of packed requests each lie in a document of their own, and a tile of them would loop over all documents.
    """
    return positions is not None and not positions.aligned and 1 < num_queries <= ROW_MULTIPLE


def launch_selection(q: Tensor, k_cmp: Tensor, lse: Tensor | None, call: Call) -> Tensor:
    """Score and select chunk by chunk, on the current stream, without synchronisation; see :func:`select`."""
    from flexnsa.attention.triton.kernels.importance import Band, Scores, importance
    from flexnsa.attention.triton.kernels.importance_few import importance_few
    from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp
    from flexnsa.attention.triton.kernels.product_scores import product_scores
    from flexnsa.attention.triton.kernels.top_blocks import check_width, write_top_blocks

    config, positions, factors = call.config, call.positions, factors_of(call)
    (batch, _, num_queries, _), num_keys, heads = q.shape, k_cmp.shape[2], count_choices(q, k_cmp, config)
    choices = 1 if config.index_score == "relu" else heads
    if batch == 1 and _are_scattered(positions, num_queries):
        rows, k_cmp = given(positions).map(lambda x: x.expand(1, -1).mT), k_cmp.expand(num_queries, -1, -1, -1)
        lse = None if lse is None else lse.transpose(0, 2)
        out = launch_selection(q.transpose(0, 2), k_cmp, lse, replace(call, positions=rows))
        return out.transpose(0, 2).contiguous()
    width = None
    if positions is not None:
        # The number of compressed keys bounds the length of any document without reading positions from the device.
        width = blocks_within(num_keys, config)
        if positions.longest is not None:
            width = min(width, num_blocks(positions.longest, config))
        width += config.ahead
        rows = max(map(len, positions.tensors))
        positions = positions.map(lambda x: x.expand(rows, -1).contiguous())
    check_width(width or num_blocks(num_queries, config))
    q, k_cmp = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k_cmp))
    if config.index_score is None:
        lse = log_sum_exp(q, k_cmp, positions, config=config, factors=factors) if lse is None else lse.contiguous()

    parts = list(chunks(num_queries, batch * choices, width, config))
    band = Band.of(config)
    cells = max((rows * width for _, rows, width in parts), default=0) * batch * choices
    own = torch.empty(cells, dtype=torch.float32, device=q.device)
    passed = torch.empty_like(own) if any(band.passed) else own
    out = q.new_empty(batch, choices, num_queries, config.num_selected_blocks, dtype=torch.int32)
    for first_row, num_rows, chunk_width in parts:
        scores = Scores(own, passed, num_rows, chunk_width, band)
        if lse is None:
            product_scores(q, k_cmp, positions, scores, first_row, config=config)
        elif Plan.of(q, k_cmp).score_alone:
            importance_few(q, k_cmp, lse, positions, scores, config=config, factors=factors)
        else:
            importance(q, k_cmp, lse, positions, scores, first_row, config=config, factors=factors)
        write_top_blocks(scores, positions, out, first_row, config=config)
    return out.expand(-1, heads, -1, -1).contiguous()
