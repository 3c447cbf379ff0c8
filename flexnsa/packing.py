"""Packed documents, said in four ways, and what turns one into another.

- ``document_ids`` ``(B, S)``: the document of each token, never decreasing along a row. What attention takes.
- ``cu_seqlens`` ``(D + 1,)``: where documents begin in one long row, and its end. What varlen kernels take.
- ``position_ids`` ``(B, S)``: the position of each token in its document, from 0.
- ``attention_mask`` ``(B, S)``: which tokens of padded rows are real; one run a row, padding on any side.

Values are checked on a CPU, outside of a compiler; elsewhere looking at them would cost a synchronisation. Those
functions synchronise whose result has a shape that depends on values, and their docstrings say so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.argument_checks import check_document_ids
from flexnsa.validation import (
    LARGEST_SIZE,
    check_has_values,
    check_int,
    check_integers,
    check_tensor,
    check_type,
    describe,
    is_dense,
    may_look,
)

IGNORED = -100
"""The target that ``torch.nn.functional.cross_entropy`` leaves out."""


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, seq_len: int | None = None) -> Tensor:
    """Number the tokens of one packed row by document.

    Args:
        cu_seqlens: int ``(D + 1,)``, from 0 to S. A document may be empty, so the list may end in any number of S.
        seq_len: S. Without it, it is read off ``cu_seqlens``, which synchronises.

    Returns:
        int32 ``(1, S)``; the numbers of empty documents are left out.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, not from 0, decreasing, or not up to ``seq_len``.
    """
    check_integers("cu_seqlens", cu_seqlens, ("D + 1",))
    if len(cu_seqlens) == 0:
        raise ValueError("cu_seqlens: expected at least the end of the row, got no entry")
    if seq_len is None:
        check_has_values("cu_seqlens", cu_seqlens)
    elif not torch.compiler.is_compiling():  # to a compiler it may be a number read off a tensor
        check_int("seq_len", seq_len, 0)
    if may_look(cu_seqlens):
        _check_cu_seqlens(cu_seqlens, seq_len)
    seq_len = int(cu_seqlens[-1]) if seq_len is None else seq_len
    token = torch.arange(seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=True)[None]


def cu_seqlens_from_document_ids(document_ids: Tensor) -> Tensor:
    """List where the documents begin when all rows are laid end to end; synchronises to count them.

    Args:
        document_ids: int ``(B, S)``, never decreasing along a row. Documents never go on in the next row.

    Returns:
        int32 ``(D + 1,)``, from 0 to ``B * S``.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, without values, or decreasing (which is seen on a CPU).
    """
    begins = _begins(document_ids).flatten()
    check_has_values("document_ids", document_ids)
    return F.pad(begins, (0, 1), value=True).nonzero()[:, 0].to(torch.int32)


def position_ids_from_document_ids(document_ids: Tensor) -> Tensor:
    """Count the tokens of each document from 0, int32 ``(B, S)``; errors as of :func:`next_token_targets`."""
    begins = _begins(document_ids)
    token = torch.arange(begins.shape[1], dtype=torch.int32, device=begins.device)
    return token - torch.where(begins, token, 0).cummax(1).values


def document_ids_from_position_ids(position_ids: Tensor) -> Tensor:
    """Number the documents of each row, int32 ``(B, S)``; a new one begins wherever the position is 0.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, or a position that is neither 0 nor one more than that before it.
    """
    check_integers("position_ids", position_ids, ("B", "S"))
    if may_look(position_ids):
        before = F.pad(position_ids[:, :-1], (1, 0), value=-1)
        _require_all(
            "position_ids",
            (position_ids == 0) | (position_ids == before + 1),
            position_ids,
            "0 or one more than before",
        )
    return (position_ids == 0).cumsum(1, dtype=torch.int32) - 1


def document_ids_from_attention_mask(attention_mask: Tensor) -> Tensor:
    """Number the runs of padding and of real tokens in each row, int32 ``(B, S)``, so that neither sees the other.

    Args:
        attention_mask: bool or int 0 and 1, ``(B, S)``: the real tokens of a row are one run, or none.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, of other values, or with a hole between real tokens.
    """
    mask = _check_attention_mask(attention_mask)
    return _changes(mask, first=False).cumsum(1, dtype=torch.int32)


def pack_padded(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the real tokens of padded rows end to end; synchronises to count them.

    Args:
        x: ``(B, S, ...)``: tokens or what was computed of them, any dtype.
        attention_mask: as in :func:`document_ids_from_attention_mask`.

    Returns:
        The ``T`` real tokens ``(1, T, ...)`` and their int32 ``document_ids (1, T)``, which are the rows' numbers.

    Raises:
        TypeError: not a tensor.
        ValueError: ``attention_mask`` is not a mask or without values, or ``x`` has other rows than it.
    """
    mask = _check_attention_mask(attention_mask)
    check_has_values("attention_mask", mask)
    _check_rows("x", x, mask)
    row = torch.arange(len(mask), dtype=torch.int32, device=mask.device)
    return x[mask][None], row[:, None].expand_as(mask)[mask][None]


def unpack_padded(packed: Tensor, attention_mask: Tensor) -> Tensor:
    """Undo :func:`pack_padded`: ``(1, T, ...)`` to ``(B, S, ...)``, with 0 in the padding.

    Raises:
        TypeError: not a tensor.
        ValueError: ``attention_mask`` is not a mask, or ``packed`` holds another number of tokens than it.
    """
    mask = _check_attention_mask(attention_mask)
    check_type("packed", packed, Tensor)
    if not is_dense(packed) or packed.dim() < 2 or len(packed) != 1 or packed.device != mask.device:
        raise ValueError(f"packed: expected a tensor (1, T, ...) on {mask.device}, got {describe(packed)}")
    if may_look(mask) and packed.shape[1] != mask.sum():
        raise ValueError(f"packed: expected the {int(mask.sum())} tokens of attention_mask, got {packed.shape[1]}")
    mask = mask.view(*mask.shape, *[1] * (packed.dim() - 2))
    return packed.new_zeros(*mask.shape[:2], *packed.shape[2:]).masked_scatter(mask, packed)


def next_token_targets(tokens: Tensor, document_ids: Tensor) -> Tensor:
    """Give what each position has to predict: the next token, or -100 where its document ends.

    Args:
        tokens: int ``(B, S)``.
        document_ids: int ``(B, S)``.

    Returns:
        int64 ``(B, S)``, for ``torch.nn.functional.cross_entropy``.

    Raises:
        TypeError: not a tensor.
        ValueError: of another shape or dtype, or ``document_ids`` decreases (which is seen on a CPU).
    """
    begins = _begins(document_ids)
    check_integers("tokens", tokens, tuple(begins.shape), like=begins, as_of="document_ids")
    next_begins = begins.roll(-1, dims=1)  # behind the last token comes the first, which begins a document too
    return tokens.roll(-1, dims=1).to(torch.int64).masked_fill(next_begins, IGNORED)


def _begins(document_ids: Tensor) -> Tensor:
    """Tell which tokens are the first of their document, bool ``(B, S)``."""
    check_integers("document_ids", document_ids, ("B", "S"))
    check_document_ids(document_ids, "B", "S")
    return _changes(document_ids, first=True)


def _changes(x: Tensor, *, first: bool) -> Tensor:
    """Tell where a row differs from the entry before, bool ``(B, S)``; ``first`` stands at its start."""
    start = torch.full_like(x[:, :1], first, dtype=torch.bool)
    return torch.cat((start, x[:, 1:] != x[:, :-1]), dim=1)


def _check_cu_seqlens(cu_seqlens: Tensor, seq_len: int | None) -> None:
    if cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {int(cu_seqlens[0])}")
    _require_all("cu_seqlens", cu_seqlens <= LARGEST_SIZE, cu_seqlens, f"at most {LARGEST_SIZE}")
    rises = cu_seqlens >= F.pad(cu_seqlens[:-1], (1, 0))
    _require_all("cu_seqlens", rises, cu_seqlens, "no less than before")
    if seq_len is not None and cu_seqlens[-1] != seq_len:
        raise ValueError(f"cu_seqlens: expected to end at seq_len={seq_len}, got {int(cu_seqlens[-1])}")


def _check_attention_mask(attention_mask: Tensor) -> Tensor:
    """Demand one run of real tokens a row, and give the mask as booleans."""
    check_tensor("attention_mask", attention_mask, ("B", "S"), dtype=getattr(attention_mask, "dtype", None))
    if attention_mask.dtype not in (torch.bool, torch.int32, torch.int64):
        raise ValueError(f"attention_mask: expected dtype bool, int32 or int64, got {attention_mask.dtype}")
    mask = attention_mask != 0
    if may_look(attention_mask):
        _require_all("attention_mask", attention_mask == mask, attention_mask, "0 or 1")
        runs_before = (_changes(mask, first=False) & ~mask).cumsum(1)
        _require_all("attention_mask", ~mask | (runs_before == 0), attention_mask, "one run of real tokens a row")
    return mask


def _check_rows(name: str, x: Tensor, mask: Tensor) -> None:
    check_type(name, x, Tensor)
    if not is_dense(x) or x.shape[:2] != mask.shape or x.device != mask.device:
        expected = f"a tensor {tuple(mask.shape)} + (...) on {mask.device}, as attention_mask"
        raise ValueError(f"{name}: expected {expected}, got {describe(x)}")


def _require_all(name: str, holds: Tensor, values: Tensor, expected: str) -> None:
    wrong = (~holds).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(f"{name}: expected {expected}, got {values[at].item()} at {list(at)}")
