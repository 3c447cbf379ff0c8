"""User mods: functions of token positions, lifted into the coordinates of each branch.

A ``score_mod(score, b, h, q_idx, kv_idx)`` and a ``mask_mod(b, h, q_idx, kv_idx)`` are written once, as for dense
attention: ``h`` is a query head, ``q_idx`` and ``kv_idx`` are token positions, counted from the first token of the
document. A compressed token stands at the position of its last token. Inside, one function does the work of both, and
it is never called for a pair outside ``0 <= kv_idx <= q_idx``: where a tile holds such pairs, which no branch shows,
the key's position is moved to the nearest that is inside. So a mod may index tables and take logarithms of distances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import MaskMod, by_query, stored
from flexnsa.positions import Positions

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mods = tuple[ScoreMod | None, MaskMod | None]


def merge_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> ScoreMod | None:
    """Make one score_mod of both: it gives a banned pair the score ``-inf``.

    As part of the score, a mask leaves the block masks as they are, full tiles and cached ones included.
    """
    if mask_mod is None:
        return score_mod

    def banned_or_scored(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = mask_mod(b, h, q_idx, kv_idx)
        scored = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(allowed, scored, -torch.inf)

    return banned_or_scored


def apply_score_mod(score_mod: ScoreMod, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Call a score_mod for every pair, as FlexAttention does: it sees numbers, never dimensions.

    Args:
        score_mod: in token positions.
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


def query_positions(positions: Positions) -> Tensor:
    """Count the queries from the first token of their document, ``(B or 1, T)``."""
    return positions.token - positions.start


def token_positions(key: Tensor, positions: Positions) -> Tensor:
    """Locate tokens ``key (B or 1, H or 1, T or 1, K)`` in the document of each query, ``(B or 1, H or 1, T, K)``."""
    return key - positions.start[:, None, :, None]


def compressed_positions(key: Tensor, positions: Positions, config: NSAConfig) -> Tensor:
    """As :func:`token_positions`, for compressed tokens: each stands where its last token does."""
    return _last_token(key - positions.cmp_start[:, None, :, None], config)


def mod_of_tokens(
    score_mod: ScoreMod,
    positions: Positions | None,
    *,
    tokens: Tensor | None = None,
    rows: int = 1,
    groups: int = 1,
) -> ScoreMod:
    """Lift to a kernel whose keys are tokens.

    Args:
        score_mod: in token positions.
        positions: of the queries; None for one whole sequence from token 0.
        tokens: int ``(B, H, V)``, the token that each key is; None where keys are tokens as they lie.
        rows: kernel rows a query; the first ``groups`` are heads of its group, the others padding.
        groups: see ``rows``.
    """
    start = None if positions is None else by_query(positions.start)

    def position(b: Tensor, h: Tensor, query: Tensor, kv_idx: Tensor) -> Tensor:
        token = kv_idx if tokens is None else tokens[b, h, kv_idx]
        return token if start is None else token - start(b, query)

    return _lifted(score_mod, positions, position, rows, groups)


def mod_of_compressed(
    score_mod: ScoreMod, positions: Positions | None, *, config: NSAConfig, rows: int = 1, groups: int = 1
) -> ScoreMod:
    """Lift to a kernel whose keys are compressed tokens; arguments as in :func:`mod_of_tokens`."""
    first = None if positions is None else by_query(positions.cmp_start)

    def position(b: Tensor, h: Tensor, query: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return _last_token(kv_idx if first is None else kv_idx - first(b, query), config)

    return _lifted(score_mod, positions, position, rows, groups)


def _lifted(
    score_mod: ScoreMod,
    positions: Positions | None,
    key_position: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    rows: int,
    groups: int,
) -> ScoreMod:
    """Turn a kernel's row into a query head and a position, and its key into a position by ``key_position``."""
    own = None if positions is None else by_query(stored(query_positions(positions)))

    def kernel_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = q_idx // rows
        head = h if rows == 1 else h * groups + (q_idx % rows).clamp_max(groups - 1)
        q_position = query if own is None else own(b, query)
        kv_position = key_position(b, h, query, kv_idx).clamp_min(0)
        return score_mod(score, b, head, q_position, torch.minimum(kv_position, q_position))

    return kernel_mod


def _last_token(key: Tensor, config: NSAConfig) -> Tensor:
    """Give the last token of a document's compressed token."""
    return key * config.compress_stride + config.compress_block_size - 1
