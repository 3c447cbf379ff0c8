"""What every public function does before it attends: locate the queries, choose the implementation."""

from __future__ import annotations

from torch import Tensor

from flexnsa.attention.seam import Call, Implementation
from flexnsa.attention.table import choose_implementation, prepare_mods
from flexnsa.checks.calls import check_document_ids, check_scale
from flexnsa.config import NSAConfig
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.positions import Positions


def locate_queries(
    q: Tensor,
    config: NSAConfig,
    document_ids: Tensor | None,
    tokens: Tensor | None = None,
    length: int | None = None,
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
    positions: Positions | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    impl: str,
    v: Tensor | None = None,
) -> tuple[Implementation, Call]:
    """Return the chosen implementation and the call that its branches share."""
    modded = score_mod is not None or mask_mod is not None
    v_dim = 0 if v is None else v.shape[-1]
    implementation, scale = choose_implementation(impl, q, modded=modded, v_dim=v_dim), check_scale(q, scale)
    mod = prepare_mods(score_mod, mask_mod, q, q.shape[1], implementation)
    return implementation, Call(config, scale, mod, positions, positions)
