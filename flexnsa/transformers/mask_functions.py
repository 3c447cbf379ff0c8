"""Mask functions of transformers: NSA supports causal masks, with or without packed documents, and no others.

A mask function returns whether a query attends to a key. transformers composes them as closures. The closures are
inspected here, because evaluating the function for every pair would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import masking_utils

from flexnsa.checks.primitives import describe

MaskFunction = Callable[..., Any]

JOINED = {"and_masks": "mask_functions", "or_masks": "mask_functions"}
JOINED |= {"remap_positions_for_packed_sequence": "mask_function"}
"""Functions that compose mask functions, and the variable of the closure that holds the parts."""
DOCUMENTS = "packed_sequence_mask_function"
TAKEN = ("causal_mask_function", DOCUMENTS, "and_masks", "remap_positions_for_packed_sequence")
WINDOWS = ("sliding_window_overlay", "chunked_overlay")
BLOCKS = "blockwise_overlay"
"""Makes attention bidirectional inside blocks: images, and prefixes of a prefix-LM."""


def is_local(mask_function: MaskFunction) -> bool:
    """Return whether a mask function, read outside ``torch.compile``, is that of sliding or chunked layers."""
    return not torch.compiler.is_compiling() and any(_kind(part) in WINDOWS for part in _parts(mask_function))


def read_documents(
    mask_function: MaskFunction,
    batch_size: int,
    num_tokens: int,
    device: torch.device | str | None,
    *,
    has_additions: bool,
) -> Tensor | None:
    """Return the document ids of packed sequences, int32 ``(B, S)``; None for a plain causal mask.

    Args:
        mask_function: as composed by transformers.
        batch_size: ``B``.
        num_tokens: ``S``.
        device: of the keys.
        has_additions: whether it contains functions of the model or of its caller.

    Raises:
        ValueError: the mask is neither causal nor that of packed documents.
    """
    if not torch.compiler.is_compiling():
        mask_function = _without_empty_blocks(mask_function)
    if mask_function is masking_utils.causal_mask_function:
        return None
    if torch.compiler.is_compiling():  # no closures to read here, so has_additions decides
        if _kind(mask_function) != "and_masks" or has_additions:
            _refuse(mask_function)
    else:
        _check_parts(mask_function, has_additions=has_additions)
    row = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, num_tokens, device=device)[None]
    follows = mask_function(row, 0, token, token - 1)  # a document starts where a token does not see the one before
    return F.pad(~follows, (1, 0)).cumsum(1, dtype=torch.int32)


def _without_empty_blocks(mask_function: MaskFunction) -> MaskFunction:
    """Return a mask function without blocks of which there are none, as multimodal models add them to plain text."""
    while _kind(mask_function) == "or_masks":
        inner, *others = getclosurevars(mask_function).nonlocals["mask_functions"]
        if any(_kind(other) != BLOCKS or bool((_blocks(other) >= 0).any()) for other in others):
            break
        mask_function = inner
    return mask_function


def _blocks(mask_function: MaskFunction) -> Tensor:
    return getclosurevars(mask_function).nonlocals["block_sequence_ids"]


def _check_parts(mask_function: MaskFunction, *, has_additions: bool) -> None:
    """Check that a function is causal and adds nothing but the documents that transformers found."""
    parts = list(_parts(mask_function))
    for part in parts:
        if _kind(part) not in TAKEN:
            _refuse(part)
    kinds = {*map(_kind, parts)}
    if has_additions or not kinds.issuperset(("causal_mask_function", DOCUMENTS)):
        _refuse(mask_function)


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """Yield the functions that one is composed of, itself included."""
    kept = JOINED.get(_kind(mask_function))
    if kept is not None:
        made_of = getclosurevars(mask_function).nonlocals[kept]
        for part in made_of if isinstance(made_of, tuple) else (made_of,):
            yield from _parts(part)
    yield mask_function


def _kind(mask_function: MaskFunction) -> str:
    """Return the name of the function of transformers that this is, or that returned it; "" for others."""
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return ""
    return mask_function.__qualname__.split(".")[0]


def _refuse(mask_function: MaskFunction) -> None:
    """Raise an error that names the argument behind an unsupported mask."""
    if _kind(mask_function) == BLOCKS:
        raise ValueError(
            "block_sequence_ids: expected None (and no token_type_ids, of which some models make them) where attention "
            f"is NSA, got {describe(_blocks(mask_function))}"
        )
    raise ValueError(
        "attention_mask: expected a causal mask and padding, got a mask function of the model's own, "
        f"{getattr(mask_function, '__qualname__', type(mask_function).__name__)}"
    )
