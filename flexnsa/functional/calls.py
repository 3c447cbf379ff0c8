"""What every public function does before it attends: locate the queries, choose the implementation."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexnsa.attention.dispatch import choose_implementation, prepare_mods
from flexnsa.attention.interface import Call, Implementation, Scorer
from flexnsa.checks.calls import check_document_ids, check_scale
from flexnsa.checks.scorers import check_masses
from flexnsa.config import NSAConfig
from flexnsa.masks.document import document_positions
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod, cap_of, mod_of_index_heads


def locate_queries(
    q: Tensor, config: NSAConfig, document_ids: Tensor | None, tokens: Tensor | None, length: int | None
) -> Positions | None:
    """Return the queries' positions among ``length`` keys; None for one query per key of one sequence."""
    if document_ids is None:
        return None if tokens is None else Positions.of_queries(tokens)
    check_document_ids(document_ids, q.shape[0], q.shape[2] if length is None else length, like=q)
    all_tokens = document_positions(document_ids, config)
    return all_tokens if tokens is None else all_tokens.at_tokens(tokens)


def prepare(
    q: Tensor,
    config: NSAConfig,
    scale: float | None,
    document_ids: Tensor | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    impl: str,
    v: Tensor | None = None,
    tokens: Tensor | None = None,
    length: int | None = None,
) -> tuple[Implementation, Call]:
    """Return the chosen implementation and the call that its branches share, with the positions of the queries."""
    positions = locate_queries(q, config, document_ids, tokens, length)
    if score_mod is not None or mask_mod is not None:
        check_masses(config, "with a score_mod or mask_mod")
    v_dim, modded = 0 if v is None else v.shape[-1], cap_of(score_mod, mask_mod) is None
    implementation, scale = choose_implementation(impl, q, modded=modded, v_dim=v_dim), check_scale(q, scale)
    mod = prepare_mods(score_mod, mask_mod, q, q.shape[1], implementation)
    return implementation, Call(config, scale, mod, positions, positions)


def scorer_of(
    q: Tensor,
    q_index: Tensor | None,
    keys: Tensor,
    call: Call,
    index_scale: float | None,
    document_ids: Tensor | None,
    tokens: Tensor | None = None,
    length: int | None = None,
) -> Scorer:
    """Return what scores the blocks of a call: its index queries, or else q, and their keys."""
    if q_index is None:
        scale = call.scale if index_scale is None else check_scale(q, index_scale, "index_scale")
        return Scorer(q, keys, replace(call, scale=scale))
    positions = locate_queries(q_index, call.config.scoring, document_ids, tokens, length)
    mod = mod_of_index_heads(call.score_mod, q.shape[1], q_index.shape[1])
    scale = check_scale(q_index, index_scale, "index_scale")
    return Scorer(q_index, keys, Call(call.config.scoring, scale, mod, positions, positions))
