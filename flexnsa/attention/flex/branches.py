"""The branches as FlexAttention: Inductor compiles each to Triton on CUDA and to C++ on a CPU.

The compressed branch and the window are intervals of keys (:mod:`flexnsa.masks.intervals`). The selected branch folds
the heads of a group into rows, so that a query tile is one token, and its list of key tiles is the blocks that it
selected (:mod:`flexnsa.masks.selected`). Memory is linear in the sequence length, in backward too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.attention.compilation import compile_once
from flexnsa.attention.flex import kernels
from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.attention.tiles.flex import dense_tiles, sparse_tiles
from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_mask
from flexnsa.masks.intervals import DENSE_TILE, stored
from flexnsa.masks.positions import Positions
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.user_mods import mod_of_compressed, mod_of_tokens
from flexnsa.masks.window import window_mask

P = ParamSpec("P")
T = TypeVar("T")

ENOUGH_PROGRAMS = 2048
"""Programs of unequal lengths that keep all multiprocessors busy to the end: about 16 for each of an H200."""


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """Attend to the compressed tokens that are complete; no branch has a log-sum-exp on a CPU, nor a backward there.

    Raises:
        ValueError: the device has no tile for heads of this size.
    """
    kernels.check_heads(q, v_cmp)
    num_keys = k_cmp.shape[2] + _padding(k_cmp)
    mask = _interval_mask(compressed_mask, q, num_keys, call.positions, call.config)
    return Compressed(*compiled(_compressed, q, call.positions)(q, k_cmp, v_cmp, mask, call))


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the tokens of the selected blocks, up to the query's own.

    Raises:
        ValueError: the device has no tile for blocks or heads of this size.
    """
    kernels.check_blocks(q, call.config)
    kernels.check_heads(q, v, kernels.rows_of_query(q, k))
    return compiled(_selected, q, call.positions)(q, k, v, block_indices, call)


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend to the last ``window_size`` tokens; errors as of :func:`compressed`."""
    kernels.check_heads(q, v)
    mask = _interval_mask(window_mask, q, k.shape[2], call.window_positions, call.config)
    return compiled(_window, q, call.window_positions)(q, k, v, mask, call)


def compiled(branch: Callable[P, T], q: Tensor, positions: Positions | None) -> Callable[P, T]:
    """Compile a branch for queries at ``positions``.

    On a CPU it is compiled for each length: with dynamic lengths and a mask that reads tables, FlexAttention's kernel
    confuses sizes and is silently wrong (torch 2.13).
    """
    return compile_once(branch, each_length=positions is not None and not q.is_cuda)


def _compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, mask: BlockMask, call: Call) -> BranchOutput:
    # Backward has a program for each key tile, too few with few compressed keys. Repeating the keys for all query heads
    # gives it Hq / Hkv times as many; with enough programs it would only cost memory.
    tiles = k_cmp.shape[0] * k_cmp.shape[1] * (k_cmp.shape[2] // DENSE_TILE + 1)
    groups = q.shape[1] // k_cmp.shape[1] if tiles < ENOUGH_PROGRAMS else 1
    k, v = (F.pad(x, (0, 0, 0, _padding(x))).repeat_interleave(groups, dim=1) for x in (k_cmp, v_cmp))
    kernel_mod = call.score_mod and mod_of_compressed(call.score_mod, call.positions, config=call.config)
    options = {**dense_tiles(*kernels.sizes_of_tiles(q, v), stages=3), "BLOCKS_ARE_CONTIGUOUS": True}
    return kernels.attend(q, k, v, mask, call.scale, options, kernel_mod)


def _selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    groups, rows = operator.index(q.shape[1] // k.shape[1]), kernels.rows_of_query(q, k)
    mask = selected_mask(block_indices, call.positions, k.shape[2], rows=rows, config=call.config)
    kernel_mod = call.score_mod and mod_of_tokens(
        call.score_mod, call.positions, tokens=stored(mask.tokens), rows=rows, groups=groups
    )
    k, v = (_gather(x, mask.tokens) for x in (k, v))
    options = sparse_tiles(*kernels.sizes_of_tiles(q, v), *mask.block_mask.BLOCK_SIZE)
    folded = kernels.attend(kernels.fold_heads(q, rows, groups), k, v, mask.block_mask, call.scale, options, kernel_mod)
    return kernels.unfold_heads(folded, rows, groups)


def _window(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, call: Call) -> BranchOutput:
    kernel_mod = call.score_mod and mod_of_tokens(call.score_mod, call.window_positions)
    options = dense_tiles(*kernels.sizes_of_tiles(q, v), stages=2)
    if call.window_positions is not None and not call.window_positions.consecutive:
        options = {**options, "BLOCKS_ARE_CONTIGUOUS": True}
    return kernels.attend(q, k, v, mask, call.scale, options, kernel_mod)


def _padding(k_cmp: Tensor) -> int:
    """Return the rows that fill the last key tile; at least one, so that there is always a tile."""
    return (k_cmp.shape[2] // DENSE_TILE + 1) * DENSE_TILE - k_cmp.shape[2]


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Gather rows ``tokens (B, H, V)`` of ``x (B, H, S, D)``.

    It is an embedding, because that sums the gradients of rows that are gathered more than once in float32.
    """
    batch, heads, length, dim = x.shape
    offset = torch.arange(batch * heads, dtype=torch.int32, device=x.device).view(batch, heads, 1) * length
    return F.embedding(tokens + offset, x.reshape(-1, dim))


def _interval_mask(
    build: Callable[..., BlockMask], q: Tensor, num_keys: int, positions: Positions | None, config: NSAConfig
) -> BlockMask:
    """Return the mask of a dense branch, from a cache if it is that of one whole sequence."""
    if positions is not None or torch.compiler.is_compiling():
        return build(positions, q.shape[2], num_keys, config, q.device)
    return _cached_mask(build, q.shape[2], num_keys, config, q.device)


@functools.lru_cache(maxsize=16)
def _cached_mask(
    build: Callable[..., BlockMask], seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    with torch.inference_mode(False):  # an inference tensor in the cache would break training later
        return build(None, seq_len, num_keys, config, device)
