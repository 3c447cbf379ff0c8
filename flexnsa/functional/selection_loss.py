"""What a choice of blocks is worth, and the loss that teaches it: scores of blocks beside their true shares."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from flexnsa.attention.interface import Scorer
from flexnsa.attention.sampling import Sample, at_sample, sampled_tokens
from flexnsa.attention.selection_loss import found_and_best
from flexnsa.attention.shares import log_shares
from flexnsa.checks.calls import check_group, check_queries, checked_selection
from flexnsa.checks.scorers import check_scorer
from flexnsa.config import NSAConfig
from flexnsa.functional.calls import prepare, scorer_of
from flexnsa.masks.positions import positions_of
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.primitives import check_choice, check_int64, check_integers, check_positive_int, check_tensor, check_type


@overload
def selection_loss(
    q: Tensor,
    k: Tensor,
    k_cmp: Tensor,
    *,
    q_index: Tensor | None = None,
    config: NSAConfig,
    num_queries: int = 256,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    sequence_ids: Tensor | None = None,
    query_weights: str = "mass",
    reduction: Literal["mean"] = "mean",
    scale: float | None = None,
    index_scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> Tensor: ...
@overload
def selection_loss(
    q: Tensor,
    k: Tensor,
    k_cmp: Tensor,
    *,
    q_index: Tensor | None = None,
    config: NSAConfig,
    num_queries: int = 256,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    sequence_ids: Tensor | None = None,
    query_weights: str = "mass",
    reduction: Literal["sum"],
    scale: float | None = None,
    index_scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def selection_loss(
    q: Tensor,
    k: Tensor,
    k_cmp: Tensor,
    *,
    q_index: Tensor | None = None,
    config: NSAConfig,
    num_queries: int = 256,
    seed: int | Tensor = 0,
    step: int | Tensor = 0,
    sequence_ids: Tensor | None = None,
    query_weights: str = "mass",
    reduction: str = "mean",
    scale: float | None = None,
    index_scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute how far the scores of blocks are from the blocks' true shares: ``KL(true || score)`` at some queries.

    Nothing is differentiated through a selection, so what scores blocks learns from this loss. Both sides are
    distributions over the blocks that a query may leave out and of which the scorer shows it a key. The true one is the
    softmax over all keys that the query sees, a mean over the heads of a group, summed by block; the other is Eq. 8 to
    10 of the NSA paper, or the softmax over the products of the best keys. Queries without such a block count 0.

    Memory is linear in ``S``: ``num_queries * S`` products a head are computed, in chunks.

    Args:
        q: queries of the selected branch ``(B, Hq, S, Dk)``, rotated; constant.
        k: keys of the selected branch ``(B, Hkv, S, Dk)``, rotated; constant.
        k_cmp: keys of the scorer ``(B, Hkv, N, D)``: compressed keys, or index keys if ``config`` has an indexer. They
            get a gradient.
        q_index: index queries ``(B, Hkv * index_heads, S, D)`` if ``config`` has an indexer, which get a gradient;
            ``None`` otherwise: q, which gets none.
        config: sizes of the blocks and of the scorer.
        num_queries: queries of each sequence, one from each of as many equal stretches; all of a shorter sequence.
        seed: chooses the queries, with ``step`` and ``sequence_ids``: an int, or an int64 tensor ``()``.
        step: see ``seed``.
        sequence_ids: int ``(B,)``, the index of each sequence in the global batch, by default 0 to ``B - 1``.
        query_weights: ``"mass"``: a query weighs as much as the true share of its blocks in question; ``"mean"``:
            all weigh the same.
        reduction: ``"mean"``: the weighted mean over queries, key heads and sequences; ``"sum"``: the weighted sum,
            and the weight to divide it by.
        scale: factor on ``q.k``, by default ``Dk ** -0.5``.
        index_scale: factor on the scorer's products, by default ``D ** -0.5`` for an indexer, else ``scale``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`, on both sides; an index head takes the first query head of
            its share of the group. Tensors that it captures get a gradient from the scorer's side.
        mask_mod: likewise.
        impl: as in :func:`native_sparse_attention`; flex, triton and sdpa are one computation here.

    Returns:
        The loss, a scalar, fp32 or wider; with ``reduction="sum"`` the sum and its weight, which has no gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    batch, length = q.shape[0], q.shape[2]
    _check_keys(q, k)
    check_scorer(q, q_index, k_cmp, "k_cmp", k.shape[1], length, config)
    check_positive_int("num_queries", num_queries)
    check_choice("query_weights", query_weights, ("mass", "mean"))
    check_choice("reduction", reduction, ("mean", "sum"))
    for name, number in (("seed", seed), ("step", step)):
        check_int64(name, number, like=q)
    if sequence_ids is None:
        sequence_ids = torch.arange(batch, device=q.device)
    else:
        check_integers("sequence_ids", sequence_ids, (batch,), like=q)
    q, k = q.detach(), k.detach()
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl)
    scorer = scorer_of(q, q_index, k_cmp, call, index_scale, document_ids)
    sample = Sample(sampled_tokens(length, num_queries, seed, step, sequence_ids))
    scorer = Scorer(sample.take(scorer.q), scorer.k, at_sample(scorer.call, scorer.q, sample))
    q, call = sample.take(q), at_sample(call, q, sample)
    total, weight = implementation.selection_loss(q, k, scorer, call, query_weights)
    if reduction == "sum":
        return total, weight
    return total / weight.where(weight > 0, 1)


def block_shares(
    q: Tensor,
    k: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Compute how much of the softmax over all visible keys each block holds; the best choice has the largest shares.

    Args:
        q: queries of the selected branch ``(B, Hq, S, Dk)``, rotated.
        k: keys of the selected branch ``(B, Hkv, S, Dk)``, rotated.
        config: provides ``l'``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`; blocks count from the document's start.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.

    Returns:
        fp32 ``(B, Hkv, S, M)``, a mean over the heads of a group: the shares of a query add up to 1, or to 0 if it sees
        no key. It has no gradient; scores exist for a chunk of queries at a time.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    _check_keys(q, k)
    _, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, "sdpa")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return log_shares(q, k, positions_of(q, call.positions), call).exp_()


def selection_recall(
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    forced: bool = False,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Compare a choice of blocks with the best: the true shares of the chosen blocks over those of the best ones.

    Args:
        q: as in :func:`block_shares`.
        k: as in :func:`block_shares`.
        block_indices: int32 ``(B, Hkv, S, n)``, as from :func:`select_blocks`.
        config: provides the block sizes, ``n`` and the forced blocks.
        forced: count the forced blocks too, which every choice has.
        scale: as in :func:`block_shares`.
        document_ids: as in :func:`block_shares`.
        score_mod: as in :func:`block_shares`.
        mask_mod: as in :func:`block_shares`.

    Returns:
        fp32 ``(Hkv,)``: the shares of the chosen blocks, summed over sequences and queries, over those of the best;
        NaN for a head without a block to choose.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    check_type("forced", forced, bool)
    _check_keys(q, k)
    block_indices = checked_selection(q, block_indices, k.shape[1], q.shape[2], config)
    _, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, "sdpa")
    found, best = found_and_best(q, k, block_indices, call, forced=forced)
    return (found / best).float()


def _check_keys(q: Tensor, k: Tensor) -> None:
    check_tensor("k", k, (q.shape[0], "Hkv", q.shape[2], q.shape[3]), like=q)
    check_group("k", q, k)
