"""What the masks of a pack weigh follows from its length alone, however many documents there are."""

from __future__ import annotations

import torch

from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.compressed import compressed_mask
from flexnsa.masks.document import document_positions
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.window import window_mask
from tests.support.block_masks import mask_bytes

CONFIG = NSAConfig()


def sizes(document_ids: torch.Tensor) -> list[int]:
    """Bytes of the masks of the three branches, and of selected tokens; each query selects the block it stands in."""
    positions = document_positions(document_ids, CONFIG)
    seq_len = document_ids.shape[1]
    blocks = torch.full((1, 1, seq_len, CONFIG.num_selected_blocks), -1, dtype=torch.int32)
    blocks[..., 0] = (positions.token - positions.start) // CONFIG.select_block_size
    num_keys = num_compressed(seq_len, CONFIG)
    selected = selected_mask(blocks, positions, seq_len, rows=16, config=CONFIG)
    masks = [
        compressed_mask(positions, seq_len, num_keys, CONFIG, document_ids.device),
        window_mask(positions, seq_len, seq_len, CONFIG, document_ids.device),
        selected.block_mask,
    ]
    return [*(mask_bytes(mask) for mask in masks), selected.tokens.untyped_storage().nbytes()]


def packs(seq_len: int) -> list[torch.Tensor]:
    """One document, one a token, and documents of random lengths."""
    token = torch.arange(seq_len)[None]
    boundaries = torch.rand(1, seq_len, generator=torch.Generator().manual_seed(0)) < 0.01
    return [torch.zeros_like(token), token, boundaries.cumsum(1)]


def test_bytes_are_linear_in_the_sequence_whatever_the_documents() -> None:
    short, long = ([sizes(ids) for ids in packs(seq_len)] for seq_len in (2**12, 2**13))
    assert short[0] == short[1] == short[2]
    assert long[0] == long[1] == long[2]
    for before, after in zip(short[0], long[0], strict=True):
        assert after <= 2.05 * before
