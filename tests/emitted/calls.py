"""Branches of FlexAttention as functions of their tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flexnsa.attention.dispatch import FLEX
from flexnsa.attention.interface import Call, Implementation
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.user_mods import ScoreMod
from flexnsa.positions import Positions
from tests.support.inputs import SMALL

TWO_BLOCKS = replace(SMALL, num_selected_blocks=2, num_local_blocks=1)
BRANCHES = ("cmp", "slc", "win")


def attention(branch: str, config: NSAConfig, scale: float) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The branch of a whole sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        call = Call(config, scale)
        if blocks is not None:
            return FLEX.selected(q, k, v, blocks, call)
        attended = FLEX.window(q, k, v, call) if branch == "win" else FLEX.compressed(q, k, v, call)
        return attended.out, attended.lse

    return run


def arguments(
    branch: str, config: NSAConfig, groups: int, seq_len: int, dims: tuple[int, int], dtype: torch.dtype, heads: int = 1
) -> tuple[Tensor, ...]:
    """q, k, v and, of the selected branch, the blocks."""
    num_keys = num_compressed(seq_len, config) if branch == "cmp" else seq_len
    shapes = (heads * groups, seq_len, dims[0]), (heads, num_keys, dims[0]), (heads, num_keys, dims[1])
    batch = 2 if groups == 1 else 1
    q, k, v = (torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    if branch != "slc":
        return q, k, v
    # Every query takes block 0 and its own, so more queries choose block 0 than one copy of it serves.
    own = torch.arange(seq_len, dtype=torch.int32) // config.select_block_size
    blocks = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1)], -1)
    blocks = torch.nn.functional.pad(blocks, (0, config.num_selected_blocks - 2), value=-1)
    return q, k, v, blocks.expand(batch, heads, -1, -1).contiguous()


def cached_attention(
    implementation: Implementation, branch: str, mod: ScoreMod | None = None, config: NSAConfig = SMALL
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor]]:
    """The branch on a cache, whose queries are ``token (B, T)`` and selected the blocks ``chosen``."""

    def run(q: Tensor, k: Tensor, v: Tensor, token: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        zero = torch.zeros_like(token)
        positions = Positions(token, zero, zero)
        call = Call(config, 0.3, mod, positions, positions)
        if branch == "slc":
            attended = implementation.selected(q, k, v, chosen, call)
        elif branch == "win":
            attended = implementation.window(q, k, v, call)
        else:
            attended = implementation.compressed(q, k, v, call)
        return attended.out, attended.lse, chosen  # every argument is a graph's input

    return run
