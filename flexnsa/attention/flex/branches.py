"""Native Sparse Attention as FlexAttention: Inductor compiles each branch to Triton on CUDA and to C++ on a CPU.

The compressed and the window branch are intervals of keys (:mod:`flexnsa.masks.intervals`). The selected branch folds
the heads of a group into rows, so that a tile of queries is one token and the blocks that it selected *are* its list
of key tiles (:mod:`flexnsa.masks.selected`). Memory is linear in the sequence length, in backward too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.attention.flex.kernels import (
    TILE,
    Result,
    attend,
    compile_once,
    dense_options,
    selected_options,
    unfold_heads,
)
from flexnsa.attention.scoring import group_probabilities
from flexnsa.attention.selection import select_in_chunks, select_openly
from flexnsa.attention.triton.select import select_blocks_triton
from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import interval_block_mask, stored, tiles_touched
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.user_mods import ScoreMod, mod_of_compressed, mod_of_tokens
from flexnsa.masks.window import window_intervals
from flexnsa.positions import Positions, positions_of

MODIFIED_SCORES = 2**26
"""Scores that a chunk of queries may have in memory for a mod to change: 256 MB."""


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Result:
    """Attend to the compressed tokens that are complete (NSA paper, section 3.3.1).

    Args:
        q: ``(B, Hq, T, Dk)``; float32, bfloat16 or float16, like all of the inputs.
        k_cmp: ``(B, Hkv, N, Dk)``.
        v_cmp: ``(B, Hkv, N, Dv)``.
        positions: of the queries; None for one whole sequence from token 0.
        config: block sizes.
        scale: factor of the scores.
        score_mod: of the user, in token positions.

    Returns:
        The output ``(B, Hq, T, Dv)`` and the natural log-sum-exp of the scores, float32 ``(B, Hq, T)``. The latter is
        None on a CPU, where FlexAttention cannot give it.

    Raises:
        ValueError: a dtype, head dimension or gradient that FlexAttention cannot take on this device.
    """
    num_keys = (k_cmp.shape[2] // TILE + 1) * TILE
    mask = _interval_mask(_compressed_mask, q, num_keys, positions, config)
    return compile_once(_compressed)(q, k_cmp, v_cmp, mask, positions, config, scale, score_mod)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Result:
    """Attend to the tokens of the selected blocks, up to the query's own (NSA paper, section 3.3.2).

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1.
        positions: see :func:`compressed_attention`; so are the others, what is returned and raised.
        config: gives the block size.
        scale: factor of the scores.
        score_mod: of the user.
    """
    if q.is_cuda and config.select_block_size % 16:
        raise ValueError(
            "select_block_size: expected a multiple of 16, the smallest tile of the tensor cores, "
            f"got {config.select_block_size}"
        )
    return compile_once(_selected)(q, k, v, block_indices, positions, config, scale, score_mod)


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Result:
    """Attend to the last ``window_size`` tokens, the query's own included (NSA paper, section 3.3.3).

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        positions: see :func:`compressed_attention`; so are the others, what is returned and raised.
        config: gives the window.
        scale: factor of the scores.
        score_mod: of the user.
    """
    mask = _interval_mask(_window_mask, q, k.shape[2], positions, config)
    return compile_once(_window)(q, k, v, mask, positions, scale, score_mod)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Choose the ``n`` best blocks of each query (NSA paper, Eq. 8 to 12): two Triton kernels on CUDA.

    Those cannot take a score_mod: with one, products of a chunk of queries are compiled with it. On a CPU it is
    products of a chunk in any case.
    """
    if q.is_cuda and score_mod is None:
        return select_blocks_triton(q, k_cmp, lse, positions, config=config, scale=scale)
    positions = positions_of(q, positions)
    if score_mod is None:
        return select_in_chunks(q, k_cmp, lse, positions, config=config, scale=scale)
    compiled = compile_once(group_probabilities) if q.is_cuda else group_probabilities
    probabilities = functools.partial(compiled, config=config, scale=scale, score_mod=score_mod)
    chunk = max(TILE, MODIFIED_SCORES // (q.shape[0] * q.shape[1] * max(1, k_cmp.shape[2])) // TILE * TILE)
    return select_openly(q, k_cmp, lse, positions, config=config, probabilities=probabilities, chunk=chunk)


def _compressed(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mask: BlockMask,
    positions: Positions | None,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None,
) -> Result:
    # Compressed keys are few, so backward has few programs. Repeating the keys gives it Hq / Hkv times as many.
    groups = q.shape[1] // k_cmp.shape[1]
    padding = mask.seq_lengths[1] - k_cmp.shape[2]
    k, v = (F.pad(x, (0, 0, 0, padding)).repeat_interleave(groups, dim=1) for x in (k_cmp, v_cmp))
    kernel_mod = score_mod and mod_of_compressed(score_mod, positions, config=config)
    options = dense_options(q, v, stages=3) | {"BLOCKS_ARE_CONTIGUOUS": True}
    return attend(q, k, v, mask, scale, options, kernel_mod)


def _selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions | None,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None,
) -> Result:
    heads = k.shape[1]
    groups = operator.index(q.shape[1] // heads)  # a constant to a compiler, as tiles have to be
    rows = -(-groups // 16) * 16 if q.is_cuda else groups  # tensor cores want 16 rows, a CPU any number
    selected = selected_mask(block_indices, positions, k.shape[2], rows=rows, config=config)
    kernel_mod = score_mod and mod_of_tokens(
        score_mod, positions, tokens=stored(selected.tokens), rows=rows, groups=groups
    )
    k, v = (_gather(x, selected.tokens) for x in (k, v))
    q = q.unflatten(1, (heads, groups)).transpose(2, 3)
    q = F.pad(q, (0, 0, 0, rows - groups)).flatten(2, 3)
    options = selected_options(*selected.block_mask.BLOCK_SIZE, q.dtype)
    out, lse = attend(q, k, v, selected.block_mask, scale, options, kernel_mod)
    return unfold_heads(out, rows, groups), None if lse is None else unfold_heads(lse, rows, groups)


def _window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    positions: Positions | None,
    scale: float,
    score_mod: ScoreMod | None,
) -> Result:
    kernel_mod = score_mod and mod_of_tokens(score_mod, positions)
    return attend(q, k, v, mask, scale, dense_options(q, v, stages=2), kernel_mod)


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Pick rows ``tokens (B, H, V)`` of ``x (B, H, S, D)``.

    As an embedding, because its backward sums the rows that were picked more than once in float32.
    """
    batch, heads, length, dim = x.shape
    offset = torch.arange(batch * heads, dtype=torch.int32, device=x.device).view(batch, heads, 1) * length
    return F.embedding(tokens + offset, x.reshape(-1, dim))


def _interval_mask(
    build: Callable[..., BlockMask], q: Tensor, num_keys: int, positions: Positions | None, config: NSAConfig
) -> BlockMask:
    """Build the mask of a dense branch, or take it from the cache if it is that of a whole sequence."""
    if positions is not None or torch.compiler.is_compiling():
        return build(positions, q.shape[2], num_keys, config, q.device)
    return _cached_mask(build, q.shape[2], num_keys, config, q.device)


@functools.lru_cache(maxsize=16)
def _cached_mask(
    build: Callable[..., BlockMask], seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    with torch.inference_mode(False):  # an inference tensor in the cache would break training later
        return build(None, seq_len, num_keys, config, device)


def _compressed_mask(
    positions: Positions | None, seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    length, stride = operator.index(config.compress_block_size), operator.index(config.compress_stride)

    def complete(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return kv_idx * stride + length - 1 <= q_idx

    rows = positions or Positions.of_sequence(seq_len, device)
    mask_mod = complete if positions is None else None
    return interval_block_mask(compressed_intervals(rows, config), num_keys, widths=None, mask_mod=mask_mod)


def _window_mask(
    positions: Positions | None, seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    window = operator.index(config.window_size)

    def recent(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx <= q_idx) & (q_idx < kv_idx + window)

    rows = positions or Positions.of_sequence(seq_len, device)
    mask_mod = recent if positions is None else None
    widest = tiles_touched(TILE + window - 1, TILE)
    return interval_block_mask(window_intervals(rows, config), num_keys, widths=(widest, widest), mask_mod=mask_mod)
