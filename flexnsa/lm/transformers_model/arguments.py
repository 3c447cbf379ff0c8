"""What the library's own decoder is given, checked by the names that transformers has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa.packing import IGNORED
from flexnsa.primitives import check_int, check_integers, check_tensor, check_tokens, check_type, describe, may_look


def check_inputs(input_ids: Any, inputs_embeds: Any, embedding: Tensor) -> Tensor:
    """Return the tokens ``(B, T)`` or their embeddings ``(B, T, dim)``, whichever are given."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"inputs_embeds: expected either these or input_ids, got {describe(inputs_embeds)}")
    if inputs_embeds is None:
        check_tokens("input_ids", input_ids, embedding)
        return input_ids
    shape = ("B", "T", embedding.shape[1])
    check_tensor("inputs_embeds", inputs_embeds, shape, like=embedding, as_of="the model")
    return inputs_embeds


def check_of_tokens(tokens: Tensor, vocab_size: int, *, position_ids: Any, **labels: Any) -> None:
    """Check what is given for each of the tokens, where it is."""
    shape = tuple(tokens.shape[:2])
    if position_ids is not None:
        rows = 1 if getattr(position_ids, "shape", ())[:1] == (1,) else shape[0]
        check_integers("position_ids", position_ids, (rows, shape[1]), like=tokens, as_of="the tokens")
    for name, targets in labels.items():
        if targets is None:
            continue
        check_integers(name, targets, shape)  # on any device: the loss takes them to its own
        if may_look(targets) and not ((targets == IGNORED) | ((targets >= 0) & (targets < vocab_size))).all():
            extent = f"{targets.min()} .. {targets.max()}"
            raise ValueError(f"{name}: expected 0 .. {vocab_size - 1} or {IGNORED}, got {extent}")


def check_wishes(logits_to_keep: Any, **flags: Any) -> None:
    """Check what is asked for: logits of the last tokens or at some places, and each flag."""
    if not isinstance(logits_to_keep, Tensor):
        check_int("logits_to_keep", logits_to_keep, 0)
    elif logits_to_keep.dtype != torch.bool:
        check_integers("logits_to_keep", logits_to_keep, ("K",))
    for name, value in flags.items():
        if value is not None:
            check_type(name, value, bool)
