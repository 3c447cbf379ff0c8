"""Documents packed in one row, as transformers tells of them: by positions that begin anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.packing import document_ids_from_cu_seqlens
from flexnsa.validation import describe, may_look


def document_ids(begins: Tensor | None, cu_seqlens: Tensor | None, batch_size: int, num_tokens: int) -> Tensor | None:
    """Number the documents of whole rows, int32 ``(B, T)``; None where each row is known to be one.

    On a GPU it is never known: to look would wait for the device.

    Args:
        begins: of :func:`document_begins`.
        cu_seqlens: int ``(D + 1,)``, where the documents of a single row begin, in place of that.
        batch_size: ``B``.
        num_tokens: ``T``.

    Raises:
        ValueError: there are several rows, or ``cu_seqlens`` does not fit them.
    """
    if cu_seqlens is not None:
        if batch_size != 1:
            raise ValueError(f"cu_seq_lens_q: expected one packed row, got {batch_size}")
        return document_ids_from_cu_seqlens(cu_seqlens, num_tokens)
    if begins is None or (may_look(begins) and not begins.any()):
        return None
    return begins.cumsum(1, dtype=torch.int32).expand(batch_size, -1)


def demand_no_pack(begins: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Demand that the tokens which follow a cache follow one another too, where looking is free.

    Raises:
        ValueError: a document begins among them.
    """
    if cu_seqlens is not None or (begins is not None and may_look(begins) and begins.any()):
        name = "position_ids" if cu_seqlens is None else "cu_seq_lens_q"
        raise ValueError(f"{name}: expected one sequence a row with a cache, got several; pack with use_cache=False")


def demand_one_document(position_ids: Tensor | None, past: Tensor, real: Tensor | None) -> None:
    """Demand that all tokens of a cache are of the sequence that new ones go on, where looking is free.

    Args:
        position_ids: int ``(B or 1, T)``, of the new tokens, padding behind them.
        past: int ``(B or 1, 1)``, how many tokens stand before the first of them.
        real: int ``(B,)``, how many of a row's are no padding; by default all.

    Raises:
        ValueError: they go on a document that began later than the cache.
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


def document_begins(position_ids: Tensor | None, num_tokens: int, real: Tensor | None = None) -> Tensor | None:
    """Tell which of ``T`` tokens do not follow the one before, bool ``(B or 1, T)``; of the first it is not asked.

    Args:
        position_ids: int ``(B or 1, T)``, tokens first and padding behind them.
        num_tokens: ``T``.
        real: int ``(B,)``, how many of a row's are no padding; by default all.

    Raises:
        ValueError: ``position_ids`` is of another shape.
    """
    if position_ids is None or num_tokens == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != num_tokens:
        raise ValueError(f"position_ids: expected (B, {num_tokens}), got {describe(position_ids)}")
    begins = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    if real is None:
        return begins
    return begins & (torch.arange(num_tokens, device=begins.device) < real[:, None])
