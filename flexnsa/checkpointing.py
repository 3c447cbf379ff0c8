"""Activation checkpointing that saves which blocks were selected, because selecting anew could choose others.

A recomputed score may differ in its last bit, and a tie may then fall the other way: the gradient would belong to
another forward pass. The indices are small, ``n`` integers a query and group, and scoring them again is not free.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SELECTION_OPERATORS = tuple(
    f"flexnsa.{name}.default" for name in ("select_in_chunks", "selection_with_mod", "select_blocks_triton")
)


def keep_selection() -> tuple[Any, Any]:
    """Give the contexts of a checkpoint that recomputes everything but the selection.

    For ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=keep_selection)``.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    selects = str(operator) in SELECTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if selects else CheckpointPolicy.PREFER_RECOMPUTE
