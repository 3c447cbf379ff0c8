"""Selection on its own: the scores of all blocks, and the indices of the selected ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.product_scores import scores_to_rank
from flexnsa.attention.scoring import block_scores, group_probabilities
from flexnsa.checks.calls import check_queries
from flexnsa.checks.scorers import checked_scorer_keys
from flexnsa.config import NSAConfig, num_blocks
from flexnsa.functional.calls import prepare, scorer_of
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.primitives import check_positive_int, check_tensor, describe


def block_importance(
    q: Tensor,
    k_cmp: Tensor | None,
    *,
    config: NSAConfig,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Score every selection block for every query (NSA paper, Eq. 8 to 10): dense, for analysis and tests.

    Args:
        q: ``(B, Hq, T, Dk)``, the last ``T`` queries of the sequence.
        k_cmp: ``(B, Hkv, N, Dk)``, ``N`` as of ``seq_len``; not read if ``config`` has an indexer.
        config: provides ``l``, ``d`` and ``l'``.
        q_index: as in :func:`native_sparse_attention`, for ``T`` queries.
        k_index: as in :func:`native_sparse_attention`.
        seq_len: tokens of the sequence, by default ``T``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        index_scale: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.

    Returns:
        fp32 ``(B, Hkv, T, M)``, ``M = ceil(seq_len / l')``, or ``(B, 1, T, M)`` with an ``index_score`` of ``"relu"``;
        blocks that a query cannot see score 0, or ``-inf`` with an ``index_score``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    seq_len = q.shape[2] if seq_len is None else seq_len
    check_positive_int("seq_len", seq_len)
    if seq_len < q.shape[2]:
        raise ValueError(f"seq_len: expected at least the {q.shape[2]} tokens of q, got {seq_len}")
    keys = checked_scorer_keys(q, k_cmp, q_index, k_index, index_scale, "Hkv", seq_len, config)
    whole = Positions.of_sequence(seq_len, q.device)
    last = whole.at(slice(seq_len - q.shape[2], None))
    _, call = prepare(q, config, scale, None, score_mod, mask_mod, "sdpa")
    scorer = scorer_of(q, q_index, keys, call, index_scale, None)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        blocks = num_blocks(seq_len, config)
        if config.index_score is not None:
            return scores_to_rank(scorer.q, scorer.k, last, blocks, scorer.call)
        probs = group_probabilities(scorer.q, scorer.k, None, last, scorer.call)
        return block_scores(probs, last, num_blocks=blocks, config=scorer.call.config)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor | None,
    *,
    config: NSAConfig,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> Tensor:
    """Select the ``n`` blocks that each query attends to (NSA paper, Eq. 8 to 12); never differentiated.

    Args:
        q: ``(B, Hq, S, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``; not read if ``config`` has an indexer.
        config: provides the block sizes, ``n`` and the forced blocks.
        q_index: as in :func:`native_sparse_attention`.
        k_index: as in :func:`native_sparse_attention`.
        lse: from :func:`compressed_attention` with the same q, k_cmp and scale, so that it is not computed again.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        index_scale: as in :func:`native_sparse_attention`.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        int32 ``(B, Hkv, S, n)``: ascending block indices, padded with -1, shared by the heads of a group. The first
        ``num_init_blocks`` and the last ``num_local_blocks`` are always selected. A tie goes to the lower index.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    keys = checked_scorer_keys(q, k_cmp, q_index, k_index, index_scale, "Hkv", q.shape[2], config)
    if lse is not None and config.index_heads is not None:
        raise ValueError(f"lse: expected None with an indexer, got {describe(lse)}")
    if lse is not None:
        check_tensor("lse", lse, tuple(q.shape[:3]), like=q, dtype=torch.promote_types(q.dtype, torch.float32))
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl)
    scorer = scorer_of(q, q_index, keys, call, index_scale, document_ids)
    implementation.check(q=scorer.q.detach(), k_cmp=scorer.k.detach())
    return implementation.select(scorer.q, scorer.k, scorer.call, lse, None)
