"""Padding, positions and packed documents: what a model tells of its tokens, read once for every kind of layer.

Without a mask and a cache, transformers starts a document wherever a position is not the one before plus 1, and its
mask has the documents. With either it has not. We then start a document where a position is lower than the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.packing import document_ids_from_starts
from flexnsa.primitives import describe, may_look
from flexnsa.transformers.mask_functions import NEW, VALID, read_mask

Gaps = Literal["keep", "cut", "refuse"]
"""Where a position is neither lower nor the one before plus 1, the document continues (``"keep"``), another starts
(``"cut"``), or an error is raised on a CPU (``"refuse"``, for layers that count positions themselves)."""


def count_valid(attention_mask: Any, batch_size: int) -> Tensor | None:
    """Count the tokens of each row of a mask ``(B, S)``, int64 ``(B,)``; None of anything else."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
        return None
    return attention_mask.to(torch.bool).sum(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens of each sequence: moved in front of their padding, with the documents that they belong to.

    Args:
        num_tokens: ``T``.
        cached: whether they follow the tokens of a cache.
        num_valid: int ``(B,)``, number of new tokens that are not padding; None for all.
        position_ids: int ``(B or 1, T)``, padding last; None if they say nothing of a cache's length.
        documents: int32 ``(B, T)``, document ids of whole sequences; None where each is known to be one document.
        padding_mask: int8 ``(B, 1, 1, S)``; None without padding, and then nothing is moved.
        first: int64 ``(B, 1)``, slot of each sequence's first token.
        past: int64 ``(B, 1)``, slot of the first new token.
    """

    num_tokens: int
    cached: bool
    num_valid: Tensor | None
    position_ids: Tensor | None
    documents: Tensor | None
    padding_mask: Tensor | None = None
    first: Tensor | None = None
    past: Tensor | None = None

    @classmethod
    def of(
        cls,
        mask: Any,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int, int],
        *,
        cached: bool | None = None,
        gaps: Gaps = "keep",
        num_valid: Tensor | None = None,
    ) -> Rows:
        """Read what a model hands to its layers.

        On a GPU no sequence is known to be one document, because reading the values would synchronise.

        Args:
            mask: from :func:`make_padding_mask`. Documents in it take precedence over ``position_ids``.
            position_ids: int ``(B or 1, T)``; or ``(A, B or 1, T)`` with image axes, where gaps are kept.
            cu_seqlens: int ``(D + 1,)``, the starts of the documents of a single sequence; takes precedence.
            shape: ``(B, T, S)``.
            cached: whether the keys are those of a cache; by default where there are more than new tokens.
            gaps: what a gap in ``position_ids`` means.
            num_valid: int ``(B,)``, of tokens whose padding comes last, without a mask.

        Raises:
            ValueError: an argument has another shape, positions have a gap, ``cu_seqlens`` comes with several
                sequences, or a document starts behind a cache.
        """
        batch_size, num_tokens, num_keys = shape
        cached = num_tokens != num_keys if cached is None else cached
        padding_mask, documents = read_mask(mask, batch_size, num_keys)
        position_ids = None if documents is not None else position_ids
        has_axes = False
        if gaps == "keep" and position_ids is not None and position_ids.dim() == 3:
            position_ids, has_axes = _one_axis(position_ids), True
        first = past = None
        if padding_mask is not None:
            valid, new = ((padding_mask[:, 0, 0] & flag) != 0 for flag in (VALID, NEW))
            first, past = (x.to(torch.int8).argmax(1, keepdim=True) for x in (valid, new))
            num_valid = (valid & new).sum(1, dtype=torch.int32)
        moved = cls(num_tokens, cached, num_valid, None, None, padding_mask, first, past)
        if position_ids is not None:
            position_ids = moved.align(position_ids, dim=1)
        starts = _document_starts(position_ids, num_tokens, num_valid, gaps)
        if cached:
            documents = None
            _check_one_document(starts, cu_seqlens)
        elif cu_seqlens is not None:
            if batch_size != 1:
                raise ValueError(f"cu_seq_lens_q: expected one packed row, got {batch_size}")
            documents = document_ids_from_starts("cu_seq_lens_q", cu_seqlens, num_tokens)
            documents = documents if first is None else moved.align(documents, dim=1).cummax(1).values
        elif starts is not None and not (may_look(starts) and not starts.any()):
            documents = starts.cumsum(1, dtype=torch.int32).expand(batch_size, -1)
        position_ids = None if has_axes else position_ids  # an image has fewer positions than tokens
        return cls(num_tokens, cached, num_valid, position_ids, documents, padding_mask, first, past)

    @property
    def positions(self) -> Tensor | None:
        """Positions of the new tokens, int32 ``(B, T)``; None without padding, where they are the last."""
        if self.first is None or self.past is None:
            return None
        token = torch.arange(self.num_tokens, device=self.first.device)
        return ((self.past - self.first).clamp_min(0) + token).to(torch.int32)

    def align_keys(self, x: Tensor) -> Tensor:
        """Move the tokens of ``x (B, H, S, D)`` to the front."""
        return x if self.first is None else _roll_rows(x, self.first, dim=2)

    def align(self, x: Tensor, *, dim: int) -> Tensor:
        """Move the new tokens of ``x (B or 1, ...)`` to the front of dimension ``dim``, and padding after them."""
        if self.first is None:
            return x
        return _roll_rows(x.expand(self.first.shape[0], *x.shape[1:]), self._padding, dim=dim)

    def restore(self, x: Tensor, *, dim: int) -> Tensor:
        """Undo :meth:`align`."""
        return x if self.first is None else _roll_rows(x, -self._padding, dim=dim)

    @property
    def _padding(self) -> Tensor:
        """Number of padding queries before the first token, ``(B, 1)``."""
        assert self.first is not None
        assert self.past is not None
        return (self.first - self.past).clamp(0, self.num_tokens)

    def check_cache(self, lengths: Tensor) -> None:
        """Check on a CPU that a cache has as many tokens, ``lengths (B,)``, as come before the new ones.

        Raises:
            ValueError: the mask has more or fewer, or positions are those of a document that started later.
        """
        if self.padding_mask is not None and may_look(self.padding_mask):
            flags = self.padding_mask[:, 0, 0]
            before = (((flags & VALID) != 0) & ((flags & NEW) == 0)).sum(1)
            row = (before != lengths).nonzero()
            if len(row):
                b = int(row[0])
                expected = f"{int(lengths[b])} tokens before the new ones in row {b}, as the cache has them"
                raise ValueError(f"attention_mask: expected {expected}, got {int(before[b])}")
        self.check_positions(lengths[:, None])

    def check_positions(self, past: Tensor) -> None:
        """Check on a CPU that new tokens continue the document of the ``past``, int ``(B or 1, 1)``, tokens before.

        Raises:
            ValueError: their document started after the first token of the cache.
        """
        if self.position_ids is None or not may_look(self.position_ids):
            return
        wrong = self.position_ids[:, :1] < past
        wrong = wrong if self.num_valid is None else wrong & (self.num_valid > 0)[:, None]
        if wrong.any():
            row = int(wrong.any(1).nonzero()[0])
            first, before = (int(x.expand(len(wrong), -1)[row, 0]) for x in (self.position_ids, past))
            got = f"{first} behind {before} tokens in row {row}; pack with use_cache=False"
            raise ValueError(f"position_ids: expected those of one sequence behind a cache, got {got}")


def _document_starts(
    position_ids: Tensor | None, num_tokens: int, num_valid: Tensor | None, gaps: Gaps
) -> Tensor | None:
    """Return which tokens start a document after another, bool ``(B or 1, T)``: those with a lower position."""
    if position_ids is None or num_tokens == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != num_tokens:
        raise ValueError(f"position_ids: expected (B, {num_tokens}), got {describe(position_ids)}")
    step = F.pad(position_ids.diff(dim=1), (1, 0), value=1)
    if num_valid is not None:
        step = step.where(torch.arange(num_tokens, device=step.device) < num_valid[:, None], 1)
    if gaps == "refuse" and may_look(step):
        _check_counted(position_ids, (step >= 0) & (step != 1))
    return step != 1 if gaps == "cut" else step < 0


def _check_counted(position_ids: Tensor, is_gap: Tensor) -> None:
    """Check that no position is skipped or repeated."""
    if is_gap.any():
        row, token = is_gap.nonzero()[0].tolist()
        before, position = position_ids.expand(len(is_gap), -1)[row, token - 1 : token + 1].tolist()
        expected = "each to be the one before plus 1, as NSA layers count, or to start a document"
        raise ValueError(f"position_ids: expected {expected}, got {position} after {before} in row {row}")


def _check_one_document(starts: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Check on a CPU that no document starts among new tokens of a cache."""
    if cu_seqlens is not None or (starts is not None and may_look(starts) and starts.any()):
        name = "position_ids" if cu_seqlens is None else "cu_seq_lens_q"
        raise ValueError(f"{name}: expected one sequence a row with a cache, got several; pack with use_cache=False")


def _one_axis(position_ids: Tensor) -> Tensor:
    """Reduce positions ``(A, B, T)`` on image axes to ``(B, T)``, which fall where all axes fall.

    Within an image and after a video, one axis falls while another rises. At a new document all of them fall.
    """
    falls = F.pad(position_ids.diff(dim=2).amax(0) < 0, (1, 0))
    num_tokens = position_ids.shape[2]
    return torch.arange(num_tokens, device=falls.device) - num_tokens * falls.cumsum(1)


def _roll_rows(x: Tensor, shift: Tensor, *, dim: int) -> Tensor:
    """Roll each batch element of ``x (B, ...)`` towards the front of ``dim`` by its own ``shift (B, 1)``."""
    size = x.shape[dim]
    index = (torch.arange(size, device=x.device) + shift) % size
    shape = [size if d == dim else x.shape[0] if d == 0 else 1 for d in range(x.dim())]
    return x.gather(dim, index.expand(x.shape[0], -1).reshape(shape).expand_as(x))
