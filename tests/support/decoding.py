"""A small layer, tokens for it, and how they are decoded in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import or_masks

from flexnsa import NativeSparseAttention, NSACache, NSAConfig, mods
from flexnsa.config import BRANCHES
from tests.support.inputs import SMALL, sizes

BRANCH_SETS = [BRANCHES, ("cmp",), ("slc",), ("win",)]
CONFIGS = {
    "paper's proportions": SMALL,
    "no overlap": sizes(4, 4, 8, 4, 1, 2, 5),
    "all sizes 1": sizes(1, 1, 1, 3, 1, 1, 1),
    "compressed longer than selected": sizes(12, 2, 4, 5, 1, 2, 7),
    "index keys": replace(SMALL, index_heads=2, index_block_size=4, index_stride=4),
    "index keys that overlap": replace(SMALL, index_heads=1, index_block_size=12, index_stride=2),
    "best keys": NSAConfig.msa(select_block_size=8, num_selected_blocks=3),
    "units": NSAConfig.qsa(num_selected_blocks=5),
}


def make_layer(impl: str = "sdpa", **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    options = {"config": SMALL, "v_head_dim": 12, "impl": impl} | options
    return taught(NativeSparseAttention(32, 4, 2, 8, **options)).requires_grad_(False)


def taught(layer: NativeSparseAttention) -> NativeSparseAttention:
    """Draw the parameters of an indexer, which otherwise begins as the mean of the layer's keys."""
    if layer.indexer is not None:
        for parameter in layer.indexer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def mods_of_heads(num_heads: int) -> dict[str, Any]:
    """Return a score_mod and a mask_mod that depend on the head and on both positions."""
    return {
        "score_mod": mods.chain(mods.soft_cap(3.0), mods.alibi(mods.alibi_slopes(num_heads))),
        "mask_mod": or_masks(mods.prefix_lm(5, 40), lambda b, h, q_idx, kv_idx: h == 1),  # noqa: ARG005
    }


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))


def decode(layer: NativeSparseAttention, x: Tensor, chunks: list[int], cache: NSACache | None = None) -> Tensor:
    cache = layer.new_cache(len(x), x.shape[1]) if cache is None else cache
    return torch.cat([layer(part, cache=cache) for part in x.split(chunks, dim=1)], dim=1)


def chunks_of(size: int, length: int) -> list[int]:
    return [size] * (length // size) + [length % size] * (length % size > 0)


def assert_equal_to_whole(out: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-5)


def assert_same_state(cache: NSACache, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in cache.state_dict().items())
