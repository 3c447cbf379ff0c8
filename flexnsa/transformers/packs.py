"""Packed documents in transformers, which are marked by positions that restart.

Without a mask and a cache, transformers starts a document wherever a position is not the one before plus 1, and its
mask has the documents. With either it has not. We then start a document where a position is lower than the one before;
a gap continues the document.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.checks.primitives import describe, may_look
from flexnsa.packing import document_ids_from_starts
from flexnsa.transformers.marks import Alignment


def document_ids(
    begins: Tensor | None,
    cu_seqlens: Tensor | None,
    batch_size: int,
    num_tokens: int,
    *,
    found: Tensor | None = None,
    alignment: Alignment | None = None,
) -> Tensor | None:
    """Return the document ids of whole sequences, int32 ``(B, T)``; None where each is known to be one document.

    On a GPU that is never known, because reading the values would synchronise.

    Args:
        begins: from :func:`document_begins`.
        cu_seqlens: int ``(D + 1,)``, the starts of the documents of a single sequence; takes precedence.
        batch_size: ``B``.
        num_tokens: ``T``.
        found: int32 ``(B, T)``, the documents that transformers found; takes precedence over ``begins``.
        alignment: of padded sequences, whose padding ``cu_seqlens`` counts.

    Raises:
        ValueError: ``cu_seqlens`` with several sequences, or of another length.
    """
    if cu_seqlens is not None:
        if batch_size != 1:
            raise ValueError(f"cu_seq_lens_q: expected one packed row, got {batch_size}")
        ids = document_ids_from_starts("cu_seq_lens_q", cu_seqlens, num_tokens)
        return ids if alignment is None else alignment.align_queries(ids, dim=1).cummax(1).values
    if found is not None:
        return found
    if begins is None or (may_look(begins) and not begins.any()):
        return None
    return begins.cumsum(1, dtype=torch.int32).expand(batch_size, -1)


def demand_no_pack(begins: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check on a CPU that no document starts among new tokens of a cache.

    Raises:
        ValueError: one does.
    """
    if cu_seqlens is not None or (begins is not None and may_look(begins) and begins.any()):
        name = "position_ids" if cu_seqlens is None else "cu_seq_lens_q"
        raise ValueError(f"{name}: expected one sequence a row with a cache, got several; pack with use_cache=False")


def demand_one_document(position_ids: Tensor | None, past: Tensor, real: Tensor | None) -> None:
    """Check on a CPU that new tokens continue the one document that a cache holds.

    Args:
        position_ids: int ``(B or 1, T)``, of the new tokens, padding last.
        past: int ``(B or 1, 1)``, number of tokens before the first of them.
        real: int ``(B,)``, number of new tokens that are not padding; by default all.

    Raises:
        ValueError: their document started after the first token of the cache.
    """
    if position_ids is None or not may_look(position_ids):
        return
    wrong = position_ids[:, :1] < past
    wrong = wrong if real is None else wrong & (real > 0)[:, None]
    if wrong.any():
        row = int(wrong.any(1).nonzero()[0])
        first, before = (int(x.expand(len(wrong), -1)[row, 0]) for x in (position_ids, past))
        raise ValueError(
            f"position_ids: expected those of one sequence behind a cache, got {first} behind {before} tokens "
            f"in row {row}; pack with use_cache=False"
        )


def document_begins(
    position_ids: Tensor | None,
    num_tokens: int,
    real: Tensor | None = None,
    *,
    gaps: Literal["keep", "cut", "refuse"] = "keep",
) -> Tensor | None:
    """Return which of ``T`` tokens start a document after another, bool ``(B or 1, T)``: those with a lower position.

    Args:
        position_ids: int ``(B or 1, T)``, padding last.
        num_tokens: ``T``.
        real: int ``(B,)``, number of tokens that are not padding; by default all.
        gaps: what happens where a position is neither lower nor the one before plus 1: the document continues
            (``"keep"``), another starts (``"cut"``), or an error is raised on a CPU (``"refuse"``, for layers that
            count positions themselves).

    Raises:
        ValueError: ``position_ids`` has another shape, or a gap.
    """
    if position_ids is None or num_tokens == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != num_tokens:
        raise ValueError(f"position_ids: expected (B, {num_tokens}), got {describe(position_ids)}")
    step = F.pad(position_ids.diff(dim=1), (1, 0), value=1)
    if real is not None:
        step = step.where(torch.arange(num_tokens, device=step.device) < real[:, None], 1)
    if gaps == "refuse" and may_look(step):
        _demand_counted(position_ids, (step >= 0) & (step != 1))
    return step != 1 if gaps == "cut" else step < 0


def one_axis(position_ids: Tensor) -> Tensor:
    """Reduce positions ``(A, B, T)`` on image axes to ``(B, T)``, which fall where all axes fall.

    Within an image and after a video, one axis falls while another rises. At a new document all of them fall.
    """
    falls = F.pad(position_ids.diff(dim=2).amax(0) < 0, (1, 0))
    num_tokens = position_ids.shape[2]
    return torch.arange(num_tokens, device=falls.device) - num_tokens * falls.cumsum(1)


def _demand_counted(position_ids: Tensor, is_gap: Tensor) -> None:
    """Check that no position is skipped or repeated."""
    if is_gap.any():
        row, token = is_gap.nonzero()[0].tolist()
        before, position = position_ids.expand(len(is_gap), -1)[row, token - 1 : token + 1].tolist()
        raise ValueError(
            f"position_ids: expected each to be the one before plus 1, as NSA layers count, or to start a document, "
            f"got {position} after {before} in row {row}"
        )
