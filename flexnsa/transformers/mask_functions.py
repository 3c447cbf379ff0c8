"""Masks: what transformers asks of its attention's mask function, and what NSA layers get in its place.

transformers creates one mask per forward pass, by a function registered with the attention, and passes it to every
layer. Ours is one of these:

- None, where no key is padding and the queries are the last keys.
- The padding mask, int8 ``(B, 1, 1, S)``: each key has the flag :data:`VALID` if it is not padding, and :data:`NEW` if
  its token is also a query.
- The ids of packed documents, int32 ``(B, 1, S, 1)``. transformers finds documents only without padding and a cache.
- Empty, ``(B, 1, 0, S)``, where NSA does not support the mask; its dtype encodes the reason. Models also create masks
  for types of layers that they do not have. So this raises only where the mask is used.

A mask function returns whether a query attends to a key. NSA supports causal ones, with or without packed documents,
and no others. transformers composes them as closures. The closures are inspected here, because evaluating the function
for every pair would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import masking_utils

from flexnsa.primitives import describe

MaskFunction = Callable[..., Any]

VALID = 1
NEW = 2
"""Flags of keys in the padding mask."""
REFUSED = {
    torch.bool: "is_causal: expected True where attention is NSA, got a bidirectional mask",
    torch.int8: "sliding_window: expected None where attention is NSA, got the mask of a sliding window",
    torch.int16: "attention_chunk_size: expected None where attention is NSA, got the mask of chunked attention",
    torch.uint8: "cache: expected a cache that keeps every token, got one that dropped tokens",
}
NOT_CAUSAL, SLIDING, CHUNKED, DROPPED = REFUSED

JOINED = {"and_masks": "mask_functions", "or_masks": "mask_functions"}
JOINED |= {"remap_positions_for_packed_sequence": "mask_function"}
"""Functions that compose mask functions, and the variable of the closure that holds the parts."""
DOCUMENTS = "packed_sequence_mask_function"
TAKEN = ("causal_mask_function", DOCUMENTS, "and_masks", "remap_positions_for_packed_sequence")
WINDOWS = ("sliding_window_overlay", "chunked_overlay")
BLOCKS = "blockwise_overlay"
"""Makes attention bidirectional inside blocks: images, and prefixes of a prefix-LM."""


def make_padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | str | None = None,
    **_: object,
) -> Tensor | None:
    """Return the padding mask or document ids; transformers calls this once per forward pass.

    Like transformers' own functions it reads ``attention_mask``, which synchronises on a GPU, except in
    ``torch.compile``. Queries are the slots from ``q_offset`` on, and keys those from ``kv_offset`` on, above 0 only
    with a cache that drops old tokens. ``attention_mask (B, S)`` is False for padding; slots after the new tokens may
    be missing. The mask function is as transformers composed it, without padding; with ``use_vmap`` the model adds one.

    Raises:
        ValueError: the mask is not as long as the tokens so far, or has padding between tokens.
    """
    refused = _refused_kind(mask_function, local_size, config)
    if kv_offset and refused is None:
        refused = DROPPED
    if refused is not None:  # by the layer that would use the mask: not every model has one
        return torch.empty(batch_size, 1, 0, kv_length, dtype=refused, device=device)
    documents = read_documents(mask_function, batch_size, kv_length, device, has_additions=use_vmap)
    if documents is not None:
        if attention_mask is not None or q_length != kv_length:
            raise ValueError("attention_mask: expected packed documents without padding or a cache, got them with one")
        return documents[:, None, :, None]
    if attention_mask is not None and isinstance(q_offset, int):
        seen, width = q_offset + q_length, attention_mask.shape[1]
        if width not in (seen, kv_length):
            raise ValueError(f"attention_mask: expected (B, {seen}), all tokens so far, got {describe(attention_mask)}")
    is_last = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if is_last and (attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))):
        return None
    slot = torch.arange(kv_length, device=device)
    seen = slot < q_offset + q_length
    new = (seen & (slot >= q_offset)).to(torch.int8) * NEW
    valid = seen.expand(batch_size, -1)
    if attention_mask is not None:
        valid = F.pad(attention_mask.to(torch.bool), (0, kv_length - attention_mask.shape[1]))
        _check_runs(valid)
    return (valid.to(torch.int8) * VALID + new)[:, None, None]


def read_mask(mask: Any, batch_size: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Return what :func:`make_padding_mask` made: a padding mask, or document ids ``(B, S)``; at least one is None.

    Raises:
        ValueError: the mask comes from elsewhere, or NSA does not support it.
    """
    if mask is None:
        return None, None
    form = (mask.dtype, tuple(mask.shape)) if isinstance(mask, Tensor) else None
    if form == (torch.int8, (batch_size, 1, 1, num_keys)):
        return mask, None
    if form == (torch.int32, (batch_size, 1, num_keys, 1)):
        return None, mask[:, 0, :, 0]
    if form is not None and form[1] == (batch_size, 1, 0, num_keys) and form[0] in REFUSED:
        raise ValueError(REFUSED[form[0]])
    expected = "(B, S) given to the model, 0 or False for padding"
    raise ValueError(f"attention_mask: expected {expected}, got {describe(mask)}")


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

    The function is as transformers composed it; with ``has_additions`` there are some of the model or of its caller.

    Raises:
        ValueError: the mask is neither causal nor that of packed documents.
    """
    if not torch.compiler.is_compiling():
        mask_function = _without_empty_blocks(mask_function)
    if mask_function is masking_utils.causal_mask_function:
        return None
    row = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, num_tokens, device=device)[None]
    if torch.compiler.is_compiling():  # no closures to read here, so has_additions decides, and whether a token sees
        if _kind(mask_function) != "and_masks" or has_additions:  # the next: documents may be joined with blocks
            _refuse(mask_function)
        message = "block_sequence_ids: expected None where attention is NSA, got blocks"
        torch.ops.aten._assert_async.msg(~mask_function(row, 0, token - 1, token).any(), message)
    else:
        _check_parts(mask_function, has_additions=has_additions)
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
    """Yield the functions that one is composed of, itself included, but for blocks of which there are none."""
    mask_function = _without_empty_blocks(mask_function)
    variable = JOINED.get(_kind(mask_function))
    if variable is not None:
        made_of = getclosurevars(mask_function).nonlocals[variable]
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
        expected = "None (and no token_type_ids, of which some models make them) where attention is NSA"
        raise ValueError(f"block_sequence_ids: expected {expected}, got {describe(_blocks(mask_function))}")
    own = getattr(mask_function, "__qualname__", type(mask_function).__name__)
    got = f"a mask function of the model's own, {own}"
    raise ValueError(f"attention_mask: expected a causal mask and padding, got {got}")


def _refused_kind(mask_function: MaskFunction, local_size: int | None, config: Any) -> torch.dtype | None:
    """Return the dtype that encodes an unsupported mask; None for a supported one."""
    if mask_function is masking_utils.bidirectional_mask_function:
        return NOT_CAUSAL
    if local_size is None:
        return None
    return CHUNKED if local_size == getattr(config, "attention_chunk_size", None) else SLIDING


def _check_runs(valid: Tensor) -> None:
    """Check, outside ``torch.compile``, that a sequence has padding only before or after its tokens."""
    if torch.compiler.is_compiling():
        return
    starts = valid & ~F.pad(valid[:, :-1], (1, 0))
    row = (starts.sum(1) > 1).nonzero()
    if len(row):
        expected = "one run of tokens a row, padding before or after it"
        raise ValueError(f"attention_mask: expected {expected}, got holes in row {int(row[0])}")
