"""How far the scores of blocks are from their true shares, at a few queries of each sequence, in linear memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Scorer
from flexnsa.attention.log_scores import differentiate, log_probabilities, log_scores
from flexnsa.attention.selection import own_and_last, top_blocks
from flexnsa.attention.shares import log_shares, log_shares_at_once, queries_at_once
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.user_mods import SoftCap, cap_of
from flexnsa.operators.opaque import OpaqueOperator, opaque_operator


def free_blocks(positions: Positions, blocks: int, config: NSAConfig) -> Tensor:
    """Return which blocks each query may leave out, bool ``(B or 1, 1, T, M)``: candidates that are not forced."""
    block = torch.arange(blocks, device=positions.token.device)
    _, last = own_and_last(positions, config)
    return (block >= config.num_init_blocks) & (block <= last - config.num_local_blocks)


def selection_loss(q: Tensor, k: Tensor, scorer: Scorer, call: Call, query_weights: str) -> tuple[Tensor, Tensor]:
    """Sum the divergences of scores from true shares; see ``flexnsa.attention.interface.SelectionLossSum``.

    Both are distributions over the free blocks that have a visible key of the scorer; a query without any counts 0.
    """
    if call.score_mod is None:
        return selection_loss_by(_selection_loss, q, k, scorer, call, query_weights)
    # An operator cannot take a mod; autograd differentiates it.
    positions, of_scorer = positions_of(q, call.positions), positions_of(scorer.q, scorer.call.positions)
    with torch.autocast(q.device.type, enabled=False):
        with torch.no_grad():
            log_true = log_shares(q, k, positions, call)
        log_probs = log_probabilities(scorer.q, scorer.k, of_scorer, scorer.call)
        compared, _ = _compare(log_true, log_probs, positions, of_scorer, call.config, scorer.call.config)
        weights = weigh(compared.mass, query_weights == "mass")
        return (compared.kl * weights).sum(), weights.sum()


class SelectionLossInputs(NamedTuple):
    """What a selection loss compares, with no mod but a soft cap; see ``flexnsa.attention.interface.SelectionLossSum``.

    Queries ``q (B, Hq, m, D)`` of a few tokens and keys ``k (B, Hkv, S, D)`` of the selected branch, the scorer's
    ``q_index (B, Hkv * H, m, D)`` and ``k_index (B, Hkv, N, D)``, and the positions of both, int ``(B or 1, m)``.
    """

    q: Tensor
    k: Tensor
    q_index: Tensor
    k_index: Tensor
    token: Tensor
    start: Tensor
    cmp_start: Tensor
    index_token: Tensor
    index_start: Tensor
    index_cmp_start: Tensor
    aligned: bool
    sizes: Sequence[int]
    index_sizes: Sequence[int]
    scale: float
    index_scale: float
    cap: float | None
    by_mass: bool

    @property
    def call(self) -> Call:
        """The call of the selected branch."""
        positions = Positions(self.token, self.start, self.cmp_start, consecutive=False, aligned=self.aligned)
        return Call(NSAConfig.from_ints(self.sizes), self.scale, SoftCap(self.cap) if self.cap else None, positions)

    @property
    def index_call(self) -> Call:
        """The call of the scorer."""
        tensors = self.index_token, self.index_start, self.index_cmp_start
        positions = Positions(*tensors, consecutive=False, aligned=self.aligned)
        return Call(NSAConfig.from_ints(self.index_sizes), self.index_scale, self.call.score_mod, positions)


LossAndGradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""The sum of the divergences and its weight, and the gradients of the sum in ``q_index`` and ``k_index``."""
LossOperator = OpaqueOperator[[SelectionLossInputs], LossAndGradients]


def selection_loss_by(
    operator: OpaqueOperator[..., LossAndGradients],
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    call: Call,
    query_weights: str,
) -> tuple[Tensor, Tensor]:
    """Sum the divergences by an operator of :class:`SelectionLossInputs`."""
    positions, of_scorer = positions_of(q, call.positions), positions_of(scorer.q, scorer.call.positions)
    arguments = *positions.tensors, *of_scorer.tensors, positions.aligned
    numbers = call.config.to_ints(), scorer.call.config.to_ints(), call.scale, scorer.call.scale, cap_of(call.score_mod)
    tensors = q.detach(), k.detach(), scorer.q, scorer.k
    total, weight, _, _ = operator(SelectionLossInputs(*tensors, *arguments, *numbers, query_weights == "mass"))
    return total, weight


@opaque_operator("selection_loss")
def _selection_loss(inputs: SelectionLossInputs) -> LossAndGradients:
    """Sum the divergences at a few queries, and differentiate the sum."""
    return sum_losses(inputs, log_shares_at_once, queries_at_once(inputs.q, inputs.k))


def sum_losses(inputs: SelectionLossInputs, shares: Callable[..., Tensor], chunk: int) -> LossAndGradients:
    """Sum the divergences, and differentiate the sum, in chunks of queries, of which ``shares`` are the true ones.

    So backward is a product with a number, and keeps neither scores nor queries.
    """
    q, k, q_index, k_index, *_ = inputs
    call, index_call = inputs.call, inputs.index_call
    where, index_where = positions_of(q, call.positions), positions_of(q_index, index_call.positions)
    dtype = torch.promote_types(q_index.dtype, torch.float32)
    total, weight = (torch.zeros((), dtype=dtype, device=q.device) for _ in range(2))
    dq, dk = (x.new_zeros(x.shape, dtype=dtype) for x in (q_index, k_index))
    for at in range(0, q.shape[2], chunk):
        part = slice(at, at + chunk)
        positions, of_scorer = where.at(part), index_where.at(part)
        q_part = q_index[:, :, part].to(dtype)
        log_true = shares(q[:, :, part], k, positions, call)
        log_probs = log_probabilities(q_part, k_index, of_scorer, index_call)
        compared, log_score = _compare(log_true, log_probs, positions, of_scorer, call.config, index_call.config)
        weights = weigh(compared.mass, inputs.by_mass)
        total, weight = total + (compared.kl * weights).sum(), weight + weights.sum()
        slope = (compared.score - compared.true) * weights[..., None]  # in the log of the score of each block
        d_scores = index_call.scale * differentiate(log_probs, log_score, slope, of_scorer, index_call.config)
        d_scores = d_scores.flatten(2, 3)  # (B, Hkv, H * m, N)
        d_part = torch.unflatten(d_scores @ k_index.to(dtype), 2, (-1, q_part.shape[2]))
        dq[:, :, part] = d_part.flatten(1, 2)
        of_heads = d_scores.mT @ torch.unflatten(q_part, 1, (d_scores.shape[1], -1)).flatten(2, 3)
        dk += of_heads.sum_to_size(dk.shape)  # heads may share their index keys
    return total, weight, dq, dk


def _empty_results(inputs: SelectionLossInputs) -> LossAndGradients:
    dtype = torch.promote_types(inputs.q_index.dtype, torch.float32)
    total, weight = (inputs.q.new_empty((), dtype=dtype) for _ in range(2))
    dq, dk = (x.new_empty(x.shape, dtype=dtype) for x in (inputs.q_index, inputs.k_index))
    return total, weight, dq, dk


class _Context(Protocol):
    """What backward is given of an operator's call."""

    saved_tensors: tuple[Tensor, Tensor]
    dtype: torch.dtype
    others: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, *tuple[object, ...]]


def _save_gradients(ctx: _Context, inputs: _Inputs, output: LossAndGradients) -> None:
    _, _, q_index, _, *others = inputs
    _, weight, dq, dk = output
    ctx.mark_non_differentiable(weight, dq, dk)
    ctx.save_for_backward(dq, dk)
    ctx.dtype, ctx.others = q_index.dtype, len(others)


def _scale_gradients(ctx: _Context, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk = ((grad * x).to(ctx.dtype) for x in ctx.saved_tensors)
    return None, None, dq, dk, *(None,) * ctx.others


def differentiate_by_results(operator: LossOperator) -> None:
    """Tell PyTorch what an operator like ``_selection_loss`` returns: the last two results are its gradients."""
    operator.register_fake(_empty_results)
    operator.register_autograd(_scale_gradients, setup_context=_save_gradients)


differentiate_by_results(_selection_loss)


class Compared(NamedTuple):
    """Two distributions over blocks, ``(B, Hkv, m, M)``, and of each query ``(B, Hkv, m)`` their divergence and mass.

    ``mass`` is the true share of all blocks that are compared; where it is 0, the divergence is 0, and both are 0.
    """

    kl: Tensor
    mass: Tensor
    true: Tensor
    score: Tensor


def compare(log_true: Tensor, log_score: Tensor, kept: Tensor) -> Compared:
    """Compare the true shares of the blocks that are ``kept`` with their scores, by their logs ``(B, Hkv, m, M)``."""
    log_true = log_true.masked_fill(~kept, -torch.inf)
    log_mass = log_true.logsumexp(-1)
    some = log_mass > -torch.inf
    log_true = log_true - log_mass.masked_fill(~some, 0)[..., None]
    log_score = log_score.masked_fill(~kept, -torch.inf).masked_fill(~some[..., None], 0).log_softmax(-1)
    true, score = log_true.exp(), log_score.exp().masked_fill(~kept, 0)
    terms = torch.where(true > 0, true * (log_true - log_score), 0)
    return Compared(terms.sum(-1), log_mass.exp(), true, score)


def _compare(
    log_true: Tensor,
    log_probs: Tensor,
    positions: Positions,
    of_scorer: Positions,
    config: NSAConfig,
    index_config: NSAConfig,
) -> tuple[Compared, Tensor]:
    """Compare the true shares of free blocks with the scores that ``log_probs (B, Hkv, H, m, N)`` give them.

    Returns:
        The comparison, and the log of the scores ``(B, Hkv, m, M)``, finite and undefined for blocks without a key.
    """
    log_sums, scored = log_scores(log_probs, of_scorer, log_true.shape[-1], index_config)
    if log_sums.shape[1] < log_true.shape[1]:  # key heads that choose together have the mean of their shares
        log_true = log_true.logsumexp(1, keepdim=True) - log(log_true.shape[1])
    kept = scored & free_blocks(positions, log_true.shape[-1], config)
    return compare(log_true, log_sums, kept), log_sums


def weigh(mass: Tensor, by_mass: bool) -> Tensor:
    """Weigh queries by the true mass of their blocks, or all alike that have any."""
    return mass if by_mass else (mass > 0).to(mass.dtype)


@torch.no_grad()
def found_and_best(q: Tensor, k: Tensor, block_indices: Tensor, call: Call, *, forced: bool) -> tuple[Tensor, Tensor]:
    """Sum the true shares of the chosen blocks, and of the best ones, over sequences and queries, fp64 ``(Hkv,)``.

    Without ``forced``, the blocks that every choice has are left out.
    """
    positions, chunk = positions_of(q, call.positions), queries_at_once(q, k)
    found, best = (torch.zeros(k.shape[1], dtype=torch.float64, device=q.device) for _ in range(2))
    with torch.autocast(q.device.type, enabled=False):
        for at in range(0, q.shape[2], chunk):
            part = slice(at, at + chunk)
            here = positions.at(part)
            shares = log_shares_at_once(q[:, :, part], k, here, call).exp().float()
            counted = shares if forced else shares * free_blocks(here, shares.shape[-1], call.config)
            found += _sum_chosen(block_indices[:, :, part], counted)
            best += _sum_chosen(top_blocks(shares, here, config=call.config), counted)
    return found, best


def _sum_chosen(block_indices: Tensor, shares: Tensor) -> Tensor:
    valid = (block_indices >= 0) & (block_indices < shares.shape[-1])
    chosen = shares.gather(-1, block_indices.clamp(0, shares.shape[-1] - 1).to(torch.int64))
    return chosen.masked_fill(~valid, 0).sum((0, 2, 3), dtype=torch.float64)
