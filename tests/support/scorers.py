"""Scorers of blocks: their sizes, and arguments of the loss that teaches them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.config import num_compressed
from tests.support.inputs import SMALL, TINY

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
INDEX = replace(SMALL, index_block_size=4, index_stride=4, index_heads=1)
TWO_HEADS = replace(SMALL, index_block_size=8, index_stride=4, index_heads=2)
NOT_FORCED = replace(INDEX, num_init_blocks=0, num_local_blocks=0)
BEST_KEYS = NSAConfig.msa(select_block_size=16, num_selected_blocks=4)
UNITS = NSAConfig.qsa(select_block_size=16, num_selected_blocks=4)
LONG_KEYS = replace(SMALL, compress_block_size=32)
CONFIGS = {
    "compressed keys": SMALL,
    "keys longer than blocks": LONG_KEYS,
    "one index head": INDEX,
    "two index heads, keys that overlap": TWO_HEADS,
    "nothing forced": NOT_FORCED,
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
scores = pytest.mark.parametrize("config", [*CONFIGS.values(), BEST_KEYS, UNITS], ids=[*CONFIGS, "best keys", "units"])
"""Those that take no mod too."""
TINY_CONFIGS = {
    "compressed keys": replace(TINY, num_selected_blocks=4),
    "keys longer than blocks": replace(TINY, compress_block_size=16, num_selected_blocks=4),
    "one index head": replace(TINY, index_block_size=2, index_stride=2, index_heads=1),
    "two index heads, keys that overlap": replace(TINY, index_block_size=4, index_stride=2, index_heads=2),
    "nothing forced": replace(TINY, index_heads=1, num_init_blocks=0, num_local_blocks=0),
}
"""For loops over every number."""
tiny_configs = pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
TINY_PRODUCTS = [
    make_config(select_block_size=8, num_selected_blocks=4) for make_config in (NSAConfig.msa, NSAConfig.qsa)
]
tiny_scores = pytest.mark.parametrize(
    "config", [*TINY_CONFIGS.values(), *TINY_PRODUCTS], ids=[*TINY_CONFIGS, "best keys", "units"]
)


def make(
    seq_len: int,
    config: NSAConfig,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    dtype: torch.dtype = FP64,
    documents: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Arguments of a loss; ``k_cmp`` and ``q_index`` require a gradient."""
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64).to(dtype)

    heads, num_keys = kv_heads * group, num_compressed(seq_len, config.scoring)
    made: dict[str, Any] = {"q": randn(batch, heads, seq_len, dim) * 2, "k": randn(batch, kv_heads, seq_len, dim)}
    own = kv_heads if config.index_score is None else 1
    made |= {"k_cmp": randn(batch, own, num_keys, dim).requires_grad_(), "config": config}
    if config.index_heads is not None:
        made["q_index"] = randn(batch, kv_heads * config.index_heads, seq_len, dim).requires_grad_()
    if documents:
        made["document_ids"] = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).expand(batch, -1)
    return made


def learners(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x[name] for name in ("k_cmp", "q_index") if name in x}
