"""Activation checkpointing that saves the selected blocks, because selecting again could choose others.

A recomputed score may differ in its last bit and break a tie differently: the gradient would then belong to another
forward pass. The indices are small, ``n`` integers per query and group, and scoring again takes time.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from flexnsa.operators.opaque import in_transform

SELECTION_OPERATORS = tuple(
    f"flexnsa.{name}.default"
    for name in (
        "select_in_chunks",
        "selection_with_mod",
        "select_blocks_triton",
        "selection_loss",
        "selection_loss_triton",
    )
)


def keep_selection() -> tuple[Any, Any]:
    """Return the contexts of a checkpoint that recomputes everything but the selection.

    Usage: ``torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=keep_selection)``.

    Raises:
        NotImplementedError: called inside a transform of ``torch.func``, where nothing can be checkpointed.
    """
    if in_transform():
        raise NotImplementedError("keep_selection works in no transform of torch.func: call the layer itself there")
    return create_selective_checkpoint_contexts(_policy)


# Without it, a restarted process would not read again what torch.compile has stored of a checkpointed layer.
keep_selection.cache_hash = " ".join(SELECTION_OPERATORS)  # pyright: ignore[reportFunctionMemberAccess]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in SELECTION_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
