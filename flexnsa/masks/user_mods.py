"""User mods: functions of token positions, translated to the indices of each branch's kernel.

A ``score_mod(score, b, h, q_idx, kv_idx)`` and a ``mask_mod(b, h, q_idx, kv_idx)`` are written once, as for dense
attention: ``h`` is a query head, and ``q_idx`` and ``kv_idx`` are token positions, counted from the first token of the
document. The position of a compressed token is that of its last token.

Internally both are merged into one score_mod. It is never called outside ``0 <= kv_idx <= q_idx``: a tile may contain
such pairs, which are masked, and there the key's position is clamped. So a mod may index tables and take logarithms of
distances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import MaskMod, by_query, stored
from flexnsa.masks.positions import Positions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mods = tuple[ScoreMod | None, MaskMod | None]


class SoftCap:
    """A score_mod that our own kernels know, see :func:`flexnsa.mods.soft_cap`: it limits scores to ``(-cap, cap)``."""

    def __init__(self, cap: float) -> None:
        self.number = repr(cap)  # a string, as torch.compile makes a variable of a float that differs between calls

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        """Return the limited score."""
        return float(self.number) * torch.tanh(score / float(self.number))


def cap_of(score_mod: ScoreMod | None, mask_mod: MaskMod | None = None) -> float | None:
    """Return the limit of a soft cap; 0 without a mod, and None for mods that our own kernels do not know."""
    if mask_mod is not None or not isinstance(score_mod, SoftCap | None):
        return None
    return 0.0 if score_mod is None else float(score_mod.number)


def merge_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> ScoreMod | None:
    """Merge both into one score_mod, which returns ``-inf`` for a banned pair.

    Block masks then do not depend on the mask_mod: their full tiles stay full, and cached ones stay valid.
    """
    if mask_mod is None:
        return score_mod

    def banned_or_scored(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = mask_mod(b, h, q_idx, kv_idx)
        scored = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(allowed, scored, -torch.inf)

    return banned_or_scored


def mod_of_index_heads(score_mod: ScoreMod | None, num_heads: int, num_index_heads: int) -> ScoreMod | None:
    """Translate a score_mod of query heads to index heads: each takes the first of its share of a group's heads."""
    if score_mod is None or isinstance(score_mod, SoftCap):
        return score_mod

    def of_index_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h * num_heads // num_index_heads, q_idx, kv_idx)

    return of_index_head


def apply_score_mod(score_mod: ScoreMod, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Call a score_mod for every pair, as FlexAttention does: its arguments are scalars, by vmap.

    Args:
        score_mod: of token positions.
        scores: ``(B, H, T, K)``.
        query: int ``(B or 1, T)``, the position of each query in its document.
        key: int ``(B or 1, H or 1, T, K)``, the position of each key in the query's document.
    """
    if not scores.numel():  # vmap takes no empty dimension
        return scores
    batch, heads = scores.shape[:2]
    query = query.expand(batch, -1)
    key = torch.minimum(key.clamp_min(0), query[:, None, :, None])
    shared = key.shape[1] == 1
    every_key = torch.vmap(score_mod, in_dims=(0, None, None, None, 0))
    every_query = torch.vmap(every_key, in_dims=(0, None, None, 0, 0))
    every_head = torch.vmap(every_query, in_dims=(0, None, 0, None, None if shared else 0))
    every_row = torch.vmap(every_head, in_dims=(0, 0, None, 0, 0))
    b, h = (torch.arange(size, dtype=torch.int32, device=scores.device) for size in (batch, heads))
    return every_row(scores, b, h, query, key[:, 0] if shared else key).to(scores.dtype)


def modify_groups(score_mod: ScoreMod, scores: Tensor, positions: Positions, key: Tensor) -> Tensor:
    """Call :func:`apply_score_mod` for scores ``(B, Hkv, G, T, K)`` by group of query heads."""
    modified = apply_score_mod(score_mod, scores.flatten(1, 2), query_positions(positions), key)
    return torch.unflatten(modified, 1, scores.shape[1:3])


def query_positions(positions: Positions) -> Tensor:
    """Return the position of each query in its document, ``(B or 1, T)``."""
    return positions.token - positions.start


def token_positions(key: Tensor, positions: Positions) -> Tensor:
    """Return positions of tokens ``key (B or 1, H or 1, T or 1, K)`` in each query's document, ``(..., T, K)``."""
    return key - positions.start[:, None, :, None]


def compressed_positions(key: Tensor, positions: Positions, config: NSAConfig) -> Tensor:
    """Return :func:`token_positions` of compressed tokens, which are at the position of their last token."""
    return _last_token(key - positions.cmp_start[:, None, :, None], config)


def mod_of_tokens(
    score_mod: ScoreMod, positions: Positions | None, *, tokens: Tensor | None = None, rows: int = 1, groups: int = 1
) -> ScoreMod:
    """Translate a score_mod to the indices of a kernel whose keys are tokens.

    Args:
        score_mod: of token positions.
        positions: of the queries; None for one whole sequence from token 0.
        tokens: int ``(B, H, V)``, the token of each key; None where key ``i`` is token ``i``.
        rows: kernel rows per query; the first ``groups`` are heads of its group, the others padding.
        groups: see ``rows``.
    """
    start = None if positions is None else by_query(positions.start)

    def position(b: Tensor, h: Tensor, query: Tensor, kv_idx: Tensor) -> Tensor:
        token = kv_idx if tokens is None else tokens[b, h, kv_idx]
        return token if start is None else token - start(b, query)

    return _translated(score_mod, positions, position, rows, groups)


def mod_of_compressed(
    score_mod: ScoreMod, positions: Positions | None, *, config: NSAConfig, rows: int = 1, groups: int = 1
) -> ScoreMod:
    """Translate a score_mod to a kernel whose keys are compressed tokens; arguments as in :func:`mod_of_tokens`."""
    first = None if positions is None else by_query(positions.cmp_start)

    def position(b: Tensor, h: Tensor, query: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return _last_token(kv_idx if first is None else kv_idx - first(b, query), config)

    return _translated(score_mod, positions, position, rows, groups)


def _translated(
    score_mod: ScoreMod,
    positions: Positions | None,
    key_position: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    rows: int,
    groups: int,
) -> ScoreMod:
    """Compute head and query position from a kernel's row, and the key's position by ``key_position``."""
    position_of = None if positions is None else by_query(stored(query_positions(positions)))

    def kernel_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = q_idx // rows
        head = h if rows == 1 else h * groups + (q_idx % rows).clamp_max(groups - 1)
        q_position = query if position_of is None else position_of(b, query)
        kv_position = key_position(b, h, query, kv_idx).clamp_min(0)
        return score_mod(score, b, head, q_position, torch.minimum(kv_position, q_position))

    return kernel_mod


def _last_token(key: Tensor, config: NSAConfig) -> Tensor:
    """Return the last token of compressed token ``key``, both counted in the document."""
    return key * config.compress_stride + config.compress_block_size - 1
