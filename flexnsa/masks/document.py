"""Positions in packed documents: everything restarts at a document's first token, block grids included."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions
from flexnsa.operators.search import searchsorted


def document_positions(document_ids: Tensor, config: NSAConfig) -> Positions:
    """Return positions with the start of each token's document, in tokens and in compressed tokens.

    Args:
        document_ids: int ``(B, S)``, never decreasing along a sequence.
        config: provides ``l`` and ``d``.
    """
    token = torch.arange(document_ids.shape[1], dtype=torch.int32, device=document_ids.device).expand_as(document_ids)
    ids = document_ids.contiguous()
    start = searchsorted(ids, ids)  # cummax reads a long row on one multiprocessor
    completed = _completes_block(token - start, config).cumsum(1, dtype=torch.int32)
    before_document = torch.nn.functional.pad(completed, (1, 0)).gather(1, start.to(torch.int64))
    return Positions(token.contiguous(), start, before_document, document=document_ids)


def first_tokens(positions: Positions, num_compressed: int, config: NSAConfig) -> Tensor:
    """Return the first token of every compressed token of packed documents, int32 ``(B, N)``.

    Documents have at most as many compressed tokens as the undivided sequence. Spare entries are 0; no query sees them.
    """
    completes = _completes_block(positions.token - positions.start, config)
    slot = torch.where(completes, completes.cumsum(1) - 1, num_compressed)
    first = positions.token - (config.compress_block_size - 1)
    listed = torch.zeros_like(first[:, :1]).repeat(1, num_compressed + 1).scatter(1, slot, first)
    return listed[:, :num_compressed]


def _completes_block(own_position: Tensor, config: NSAConfig) -> Tensor:
    """Return whether a token, by its position in its document, is the last of a compressed token."""
    beyond = own_position - (config.compress_block_size - 1)
    return (beyond >= 0) & (beyond % config.compress_stride == 0)
