"""What every public function does before it attends: say where queries stand, and who computes."""

from __future__ import annotations

from torch import Tensor

from flexnsa.argument_checks import check_document_ids, check_scale
from flexnsa.attention.implementations import choose_implementation, prepare_mods
from flexnsa.attention.seam import Call, Implementation
from flexnsa.config import NSAConfig
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.positions import Positions


def stand(
    q: Tensor,
    config: NSAConfig,
    document_ids: Tensor | None,
    tokens: Tensor | None = None,
    length: int | None = None,
) -> Positions | None:
    """Say where the queries stand among ``length`` keys; None for one at every key of one sequence."""
    if document_ids is None:
        return None if tokens is None else Positions.of_queries(tokens)
    check_document_ids(document_ids, q.shape[0], q.shape[2] if length is None else length, like=q)
    every = document_positions(document_ids, config)
    return every if tokens is None else every.of_some(tokens)


def prepare(
    q: Tensor,
    config: NSAConfig,
    scale: float | None,
    positions: Positions | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    impl: str,
) -> tuple[Implementation, Call]:
    """Choose the implementation, and say what its branches share."""
    modded = score_mod is not None or mask_mod is not None
    implementation, scale = choose_implementation(impl, q, modded=modded), check_scale(q, scale)
    mod = prepare_mods(score_mod, mask_mod, q, q.shape[1], implementation)
    return implementation, Call(config, scale, mod, positions, positions)
