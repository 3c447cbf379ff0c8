"""The oracle: every branch with an explicit boolean mask over all pairs, in whatever precision the inputs have.

Quadratic in time and memory by intention. It reads like the formulas of the paper (arXiv 2502.11089, section 3) and
shares no attention, masking or scoring code with the other implementations, so that agreement means something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed, ScoreMod, Scorer
from flexnsa.config import NSAConfig, blocks_within, num_blocks
from flexnsa.masks.positions import Positions, positions_of

P = ParamSpec("P")
T = TypeVar("T")


def _without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Keep to the precision of the inputs, whatever the caller's autocast says."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        q = args[0]
        assert isinstance(q, Tensor)
        with torch.autocast(q.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the keys of each group for its query heads: head ``h`` reads head ``h // G``."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute ``scale * q.k`` for all pairs ``(B, Hq, T, S)``, at least in fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype) @ _repeat_heads(k, q.shape[1]).to(dtype).mT * scale


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise over the visible keys; a row without any has probabilities 0 and lse ``-inf``."""
    visible = visible & (scores != -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0)
    probs = scores.softmax(-1).masked_fill(~visible, 0.0)
    return probs, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def _modified(score_mod: ScoreMod | None, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Call the user's function for every pair of positions ``query (B, T, 1)`` and ``key (B, T, S)``."""
    if score_mod is None or not scores.numel():
        return scores
    batch, heads = (torch.arange(size, device=scores.device) for size in scores.shape[:2])
    key = torch.minimum(key.clamp_min(0), query)  # a key that is hidden anyway has a position that exists
    pairs = (scores, batch[:, None, None, None], heads[:, None, None], query[:, None], key[:, None])
    modified = torch.vmap(score_mod)(*(x.expand_as(scores).flatten() for x in pairs))
    return modified.view_as(scores).to(scores.dtype)


def _attend(v: Tensor, scores: Tensor, visible: Tensor) -> BranchOutput:
    probs, lse = _softmax(scores, visible)
    return BranchOutput(probs.to(v.dtype) @ _repeat_heads(v, scores.shape[1]), lse)


def _score_compressed(q: Tensor, k_cmp: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the scores of the compressed tokens ``(B, Hq, T, N)`` and which are visible, ``(B, 1, T, N)``.

    Visible are those of the own document whose last token is not in the future.
    """
    config, positions = call.config, positions_of(q, call.positions)
    key = torch.arange(k_cmp.shape[2], device=q.device) - positions.cmp_start[..., None]
    query = (positions.token - positions.start)[..., None]
    last_token = key * config.compress_stride + config.compress_block_size - 1
    scores = _modified(call.score_mod, _scores(q, k_cmp, call.scale), query, last_token)
    return scores, ((key >= 0) & (last_token <= query))[:, None]


def _score_tokens(q: Tensor, k: Tensor, positions: Positions | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the tokens ``(B, Hq, T, S)`` and the positions of queries and keys, ``(B, T, 1 or S)``."""
    positions = positions_of(q, positions)
    query = (positions.token - positions.start)[..., None]
    key = torch.arange(k.shape[2], device=k.device) - positions.start[..., None]
    return _modified(call.score_mod, _scores(q, k, call.scale), query, key), query, key


@_without_autocast
def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that lie wholly in the past (section 3.3.1)."""
    return Compressed(*_attend(v_cmp, *_score_compressed(q, k_cmp, call)))


@_without_autocast
def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens of the document (section 3.3.3)."""
    scores, query, key = _score_tokens(q, k, call.window_positions, call)
    visible = (key >= 0) & (key <= query) & (key > query - call.config.window_size)
    return _attend(v, scores, visible[:, None])


@_without_autocast
def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the past tokens of the selected blocks (section 3.3.2)."""
    scores, query, key = _score_tokens(q, k, call.positions, call)
    block = key.div(call.config.select_block_size, rounding_mode="floor")
    selected = torch.zeros(1, dtype=torch.bool, device=k.device)
    for chosen in block_indices.unbind(-1):
        selected = selected | (block[:, None] == chosen[..., None])
    visible = selected & ((key >= 0) & (key <= query))[:, None]
    return _attend(v, scores, _repeat_heads(visible, q.shape[1]))


def _overlap_weights(num_keys: int, num_blocks: int, config: NSAConfig, like: Tensor) -> Tensor:
    """Share of tokens of each compressed token in each block, in units of the stride, ``(N, M)`` (Eq. 9)."""
    key_start = torch.arange(num_keys, device=like.device)[:, None] * config.compress_stride
    block_start = torch.arange(num_blocks, device=like.device) * config.select_block_size
    key_end, block_end = key_start + config.compress_block_size, block_start + config.select_block_size
    overlap = torch.minimum(key_end, block_end) - torch.maximum(key_start, block_start)
    return overlap.clamp_min(0).to(like.dtype) / config.compress_stride


def _of_own_document(x: Tensor, positions: Positions) -> Tensor:
    """Move columns ``(B, H, T, N)`` so that the first is the first key of each query's document; 0 after the last."""
    column = torch.arange(x.shape[3], device=x.device) + positions.cmp_start[..., None]
    index = column.clamp(max=x.shape[3])[:, None].expand_as(x).to(torch.int64)
    return torch.nn.functional.pad(x, (0, 1)).gather(-1, index)


def _best_products(q: Tensor, k: Tensor, call: Call, num_blocks: int) -> Tensor:
    """Return the largest product of a visible key in each block, ``(B, Hkv, T, M)``, or ``-inf``."""
    products, visible = _score_compressed(q, k, call)
    key = torch.arange(k.shape[2], device=k.device) - positions_of(q, call.positions).start[..., None]
    block = key.div(call.config.select_block_size, rounding_mode="floor")[:, None]
    of_blocks = (products.masked_fill(~visible | (block != j), -torch.inf) for j in range(num_blocks))
    return torch.stack([each.amax(-1) for each in of_blocks], -1)


def _rate_keys(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return what each key adds to the score of its blocks, ``(B, H, T, N)``, and which are visible."""
    scores, visible = _score_compressed(q, k, call)
    visible = visible & (scores != -torch.inf)
    if call.config.index_score is None:
        return _softmax(scores, visible)[0], visible
    return scores.relu().masked_fill(~visible, 0), visible


@_without_autocast
def block_importance(q: Tensor, k_cmp: Tensor, call: Call, *, num_blocks: int) -> Tensor:
    """Score every selection block for every query, ``(B, Hkv, T, M)``, never differentiated (Eq. 8 to 10)."""
    with torch.no_grad():
        if call.config.index_score == "max":
            return _best_products(q, k_cmp, replace(call, scale=1.0), num_blocks)
        probs, _ = _rate_keys(q, k_cmp, call if call.config.index_score is None else replace(call, scale=1.0))
    probs = _of_own_document(probs, positions_of(q, call.positions))
    scores = probs @ _overlap_weights(k_cmp.shape[2], num_blocks, call.config, probs)
    return torch.unflatten(scores, 1, (k_cmp.shape[1], -1)).sum(2)


def select(
    q: Tensor,
    k_cmp: Tensor,
    call: Call,
    lse: Tensor | None,  # noqa: ARG001  (the oracle normalises for itself)
    importance: Tensor | None,  # noqa: ARG001
) -> Tensor:
    """Choose the ``n`` best blocks of each query, forced ones first, a tie to the lower index (section 3.3.2)."""
    config, positions = call.config, positions_of(q, call.positions)
    num_blocks = blocks_within(k_cmp.shape[2], config)
    score = block_importance(q, k_cmp, call, num_blocks=num_blocks)
    token = (positions.token - positions.start)[:, None, :, None]
    own, current = ((token + d).div(config.select_block_size, rounding_mode="floor") for d in (0, config.ahead))
    block = torch.arange(num_blocks, device=q.device)
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    candidate = block <= current
    score = score.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)

    best = score.argsort(dim=-1, descending=True, stable=True)[..., : config.num_selected_blocks]
    has_token = candidate & (block <= own)
    chosen = best.masked_fill(~has_token.expand_as(score).gather(-1, best), num_blocks).sort(-1).values
    chosen = chosen.masked_fill(chosen == num_blocks, -1).to(torch.int32)
    if config.index_score is not None and config.index_heads is not None:
        chosen = chosen.expand(-1, q.shape[1] // config.index_heads, -1, -1)
    return torch.nn.functional.pad(chosen, (0, config.num_selected_blocks - chosen.shape[-1]), value=-1)


@_without_autocast
def selection_loss(q: Tensor, k: Tensor, scorer: Scorer, call: Call, query_weights: str) -> tuple[Tensor, Tensor]:
    """Sum ``KL(true || score)`` of the free blocks of each query, weighted by their true mass or all alike."""
    config, blocks = call.config, num_blocks(k.shape[2], call.config)
    scores, query, key = _score_tokens(q.detach(), k.detach(), call.positions, call)
    probs, _ = _softmax(scores, ((key >= 0) & (key <= query))[:, None])
    block = key.div(config.select_block_size, rounding_mode="floor")[:, None]
    true = torch.stack([probs.masked_fill(block != j, 0).sum(-1) for j in range(blocks)], -1)
    true = torch.unflatten(true, 1, (1 if config.index_score == "relu" else k.shape[1], -1)).mean(2)

    if scorer.call.config.index_score == "max":
        best = _best_products(scorer.q, scorer.k, scorer.call, blocks)
        scored = best > -torch.inf
        score = (best - best.amax(-1, keepdim=True).detach()).where(scored, 0).exp()
    else:
        probs, visible = _rate_keys(scorer.q, scorer.k, scorer.call)
        visible = visible.to(probs.dtype)
        weights = _overlap_weights(scorer.k.shape[2], blocks, scorer.call.config, probs)
        positions = positions_of(scorer.q, scorer.call.positions)
        score, scored = (_of_own_document(x, positions) @ weights for x in (probs, visible))
        score, scored = (torch.unflatten(x, 1, (true.shape[1], -1)).sum(2) for x in (score, scored))
        if config.index_score is not None:
            score = (score - score.amax(-1, keepdim=True).detach()).exp()

    j, current = torch.arange(blocks, device=q.device), (query + config.ahead) // config.select_block_size
    free = (j >= config.num_init_blocks) & (j <= current - config.num_local_blocks)
    compared = (scored > 0) & free[:, None]
    true, score = (x.where(compared, 0) for x in (true, score))
    mass = true.sum(-1, keepdim=True)
    ratio = (true / mass).where(true > 0, 1) / (score / score.sum(-1, keepdim=True)).where(true > 0, 1)
    kl = ((true / mass) * ratio.log()).where(true > 0, 0).sum(-1)
    weights = mass[..., 0] if query_weights == "mass" else (mass[..., 0] > 0).to(mass.dtype)
    return (kl * weights).sum(), weights.sum()
