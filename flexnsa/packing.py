"""Four formats of packed documents, and conversions between them.

- ``document_ids`` ``(B, S)``: the document of each token, never decreasing along a sequence. Attention takes this one.
- ``cu_seqlens`` ``(D + 1,)``: the start of each document in one long sequence, and its end. Varlen kernels take this.
- ``position_ids`` ``(B, S)``: the position of each token in its document, from 0.
- ``attention_mask`` ``(B, S)``: which tokens of padded sequences are real: one run each, padding on any side.

Values are checked on a CPU outside ``torch.compile``; elsewhere a check would synchronise with the device. A function
whose result has a shape that depends on values has to synchronise, and its docstring says so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa import primitives
from flexnsa.checks.calls import check_document_ids

IGNORED = -100
"""The target that ``torch.nn.functional.cross_entropy`` ignores."""


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, seq_len: int | None = None) -> Tensor:
    """Return the document id of each token of one packed sequence.

    Args:
        cu_seqlens: int ``(D + 1,)``, from 0 to S. Documents may be empty, so S may be repeated at the end.
        seq_len: S. If None, it is read from ``cu_seqlens``, which synchronises.

    Returns:
        int32 ``(1, S)``; ids of empty documents do not occur.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, not starting at 0, decreasing, or not ending at ``seq_len``.
    """
    return document_ids_from_starts("cu_seqlens", cu_seqlens, seq_len)


def document_ids_from_starts(name: str, starts: Tensor, seq_len: int | None) -> Tensor:
    """Return what :func:`document_ids_from_cu_seqlens` does for an argument of any name."""
    primitives.check_integers(name, starts, ("D + 1",))
    if len(starts) == 0:
        raise ValueError(f"{name}: expected at least the end of the row, got no entry")
    if seq_len is None:
        primitives.check_has_values(name, starts)
    elif not torch.compiler.is_compiling():  # in a graph it may be a symbolic size
        primitives.check_int("seq_len", seq_len, 0)
    if primitives.may_look(starts):
        _check_starts(name, starts, seq_len)
    seq_len = int(starts[-1]) if seq_len is None else seq_len
    token = torch.arange(seq_len, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts[1:].contiguous(), token, right=True, out_int32=True)[None]


def cu_seqlens_from_document_ids(document_ids: Tensor) -> Tensor:
    """Return the starts of the documents with all sequences concatenated; synchronises to count them.

    Args:
        document_ids: int ``(B, S)``, never decreasing along a sequence. A document never continues in the next
            sequence.

    Returns:
        int32 ``(D + 1,)``, from 0 to ``B * S``.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, without values, or decreasing (checked on a CPU only).
    """
    starts = _starts(document_ids).flatten()
    primitives.check_has_values("document_ids", document_ids)
    return F.pad(starts, (0, 1), value=True).nonzero()[:, 0].to(torch.int32)


def position_ids_from_document_ids(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, int32 ``(B, S)``; raises as :func:`next_token_targets`."""
    starts = _starts(document_ids)
    token = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device)
    return token - torch.where(starts, token, 0).cummax(1).values


def document_ids_from_position_ids(position_ids: Tensor) -> Tensor:
    """Return document ids from 0 in each sequence, int32 ``(B, S)``; a document starts wherever the position is 0.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, or a position that is neither 0 nor one more than the previous.
    """
    primitives.check_integers("position_ids", position_ids, ("B", "S"))
    if primitives.may_look(position_ids):
        before = F.pad(position_ids[:, :-1], (1, 0), value=-1)
        goes_on = (position_ids == 0) | (position_ids == before + 1)
        _require_all("position_ids", goes_on, position_ids, "0 or one more than before")
    return (position_ids == 0).cumsum(1, dtype=torch.int32) - 1


def document_ids_from_attention_mask(attention_mask: Tensor) -> Tensor:
    """Return ids that make padding documents of its own, int32 ``(B, S)``, so that real tokens never see it.

    Args:
        attention_mask: bool or int 0 and 1, ``(B, S)``; the real tokens of a sequence are one run, or none.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, other values, or padding between real tokens.
    """
    mask = _check_attention_mask(attention_mask)
    return _changes(mask, first=False).cumsum(1, dtype=torch.int32)


def pack_padded(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the real tokens of padded sequences into one; synchronises to count them.

    Args:
        x: ``(B, S, ...)``: tokens, or anything computed for each token, any dtype.
        attention_mask: as in :func:`document_ids_from_attention_mask`.

    Returns:
        The ``T`` real tokens ``(1, T, ...)``, and int32 ``document_ids (1, T)``: the batch index of each.

    Raises:
        TypeError: not a tensor.
        ValueError: ``attention_mask`` is not a mask or has no values, or ``x`` does not start with its shape.
    """
    mask = _check_attention_mask(attention_mask)
    primitives.check_has_values("attention_mask", mask)
    primitives.check_type("x", x, Tensor)
    if not primitives.is_dense(x) or x.shape[:2] != mask.shape or x.device != mask.device:
        expected = f"a tensor {tuple(mask.shape)} + (...) on {mask.device}, as attention_mask"
        raise ValueError(f"x: expected {expected}, got {primitives.describe(x)}")
    row = torch.arange(len(mask), dtype=torch.int32, device=mask.device)
    return x[mask][None], row[:, None].expand_as(mask)[mask][None]


def unpack_padded(packed: Tensor, attention_mask: Tensor) -> Tensor:
    """Undo :func:`pack_padded`: ``(1, T, ...)`` to ``(B, S, ...)``, with 0 in the padding.

    Raises:
        TypeError: not a tensor.
        ValueError: ``attention_mask`` is not a mask, or has another number of real tokens than ``packed``.
    """
    mask = _check_attention_mask(attention_mask)
    primitives.check_type("packed", packed, Tensor)
    if not primitives.is_dense(packed) or packed.dim() < 2 or len(packed) != 1 or packed.device != mask.device:
        raise ValueError(f"packed: expected a tensor (1, T, ...) on {mask.device}, got {primitives.describe(packed)}")
    if primitives.may_look(mask) and packed.shape[1] != mask.sum():
        raise ValueError(f"packed: expected the {int(mask.sum())} tokens of attention_mask, got {packed.shape[1]}")
    mask = mask.view(*mask.shape, *[1] * (packed.dim() - 2))
    return packed.new_zeros(*mask.shape[:2], *packed.shape[2:]).masked_scatter(mask, packed)


def next_token_targets(tokens: Tensor, document_ids: Tensor) -> Tensor:
    """Return the target of each position: the next token, or -100 at the end of a document.

    Args:
        tokens: int ``(B, S)``.
        document_ids: int ``(B, S)``.

    Returns:
        int64 ``(B, S)``, for ``torch.nn.functional.cross_entropy``.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, or ``document_ids`` decreases (checked on a CPU only).
    """
    starts = _starts(document_ids)
    primitives.check_integers("tokens", tokens, tuple(starts.shape), like=starts, as_of="document_ids")
    next_starts = starts.roll(-1, dims=1)  # the last token is followed by the first, which also starts a document
    return tokens.roll(-1, dims=1).to(torch.int64).masked_fill(next_starts, IGNORED)


def _starts(document_ids: Tensor) -> Tensor:
    """Return which tokens are the first of their document, bool ``(B, S)``."""
    check_document_ids(document_ids, "B", "S")
    return _changes(document_ids, first=True)


def _changes(x: Tensor, *, first: bool) -> Tensor:
    """Return where an entry differs from the one before it in its row, bool ``(B, S)``; ``first`` for the first."""
    start = torch.full_like(x[:, :1], first, dtype=torch.bool)
    return torch.cat((start, x[:, 1:] != x[:, :-1]), dim=1)


def _check_starts(name: str, starts: Tensor, seq_len: int | None) -> None:
    if starts[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {int(starts[0])}")
    _require_all(name, starts <= primitives.LARGEST_SIZE, starts, f"at most {primitives.LARGEST_SIZE}")
    _require_all(name, starts >= F.pad(starts[:-1], (1, 0)), starts, "no less than before")
    if seq_len is not None and starts[-1] != seq_len:
        raise ValueError(f"{name}: expected to end at seq_len={seq_len}, got {int(starts[-1])}")


def _check_attention_mask(attention_mask: Tensor) -> Tensor:
    """Check that real tokens are one run in each sequence, and return the mask as booleans."""
    primitives.check_tensor("attention_mask", attention_mask, ("B", "S"), dtype=getattr(attention_mask, "dtype", None))
    if attention_mask.dtype not in (torch.bool, torch.int32, torch.int64):
        raise ValueError(f"attention_mask: expected dtype bool, int32 or int64, got {attention_mask.dtype}")
    mask = attention_mask != 0
    if primitives.may_look(attention_mask):
        _require_all("attention_mask", attention_mask == mask, attention_mask, "0 or 1")
        runs_before = (_changes(mask, first=False) & ~mask).cumsum(1)
        _require_all("attention_mask", ~mask | (runs_before == 0), attention_mask, "one run of real tokens a row")
    return mask


def _require_all(name: str, holds: Tensor, values: Tensor, expected: str) -> None:
    wrong = (~holds).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(f"{name}: expected {expected}, got {values[at].item()} at {list(at)}")
