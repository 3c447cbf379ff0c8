"""Native Sparse Attention as FlexAttention: Inductor compiles each branch to Triton on CUDA and to C++ on a CPU.

The compressed and the window branch are intervals of keys (:mod:`flexnsa.masks.intervals`). The selected branch folds
the heads of a group into rows, so that a tile of queries is one token and the blocks that it selected *are* its list
of key tiles (:mod:`flexnsa.masks.selected`). Memory is linear in the sequence length, in backward too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import interval_block_mask, tiles_touched
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.sliding_window import window_intervals
from flexnsa.scoring_triton import select_blocks_triton
from flexnsa.selection import select_in_chunks

TILE = 128
"""Queries and keys of a tile in the dense branches: the size that FlexAttention's kernels are tuned for."""

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

Result = tuple[Tensor, Tensor | None]


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, positions: Positions | None, *, config: NSAConfig, scale: float
) -> Result:
    """Attend to the compressed tokens that are complete (NSA paper, section 3.3.1).

    Args:
        q: ``(B, Hq, T, Dk)``; float32, bfloat16 or float16, like all of the inputs.
        k_cmp: ``(B, Hkv, N, Dk)``.
        v_cmp: ``(B, Hkv, N, Dv)``.
        positions: of the queries; None for one whole sequence from token 0.
        config: block sizes.
        scale: factor of the scores.

    Returns:
        The output ``(B, Hq, T, Dv)`` and the natural log-sum-exp of the scores, float32 ``(B, Hq, T)``. The latter is
        None on a CPU, where FlexAttention cannot give it.

    Raises:
        ValueError: a dtype, head dimension or gradient that FlexAttention cannot take on this device.
    """
    _check(q, k_cmp, v_cmp)
    num_keys = (k_cmp.shape[2] // TILE + 1) * TILE
    mask = _interval_mask(_compressed_mask, q, num_keys, positions, config)
    return _compile_once(_compressed)(q, k_cmp, v_cmp, mask, scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
) -> Result:
    """Attend to the tokens of the selected blocks, up to the query's own (NSA paper, section 3.3.2).

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1.
        positions: see :func:`compressed_attention`; so are ``config``, ``scale``, what is returned and raised.
        config: gives the block size.
        scale: factor of the scores.
    """
    _check(q, k, v)
    if q.is_cuda and config.select_block_size % 16:
        raise ValueError(
            "select_block_size: expected a multiple of 16, the smallest tile of the tensor cores, "
            f"got {config.select_block_size}"
        )
    token, start = (None, None) if positions is None else (positions.token, positions.start)
    return _compile_once(_selected)(q, k, v, block_indices, token, start, config, scale)


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions | None, *, config: NSAConfig, scale: float
) -> Result:
    """Attend to the last ``window_size`` tokens, the query's own included (NSA paper, section 3.3.3).

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        positions: see :func:`compressed_attention`; so are ``config``, ``scale``, what is returned and raised.
        config: gives the window.
        scale: factor of the scores.
    """
    _check(q, k, v)
    mask = _interval_mask(_window_mask, q, k.shape[2], positions, config)
    return _compile_once(_window)(q, k, v, mask, scale)


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, positions: Positions | None, *, config: NSAConfig, scale: float
) -> Tensor:
    """Choose the ``n`` best blocks of each query (NSA paper, Eq. 8 to 12): two Triton kernels on CUDA.

    Elsewhere, products of a chunk of queries: FlexAttention has no lse on a CPU, and without it cannot add up scores.
    """
    if q.is_cuda:
        return select_blocks_triton(q, k_cmp, lse, positions, config=config, scale=scale)
    return select_in_chunks(q, k_cmp, lse, positions_of(q, positions), config=config, scale=scale)


def _compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, mask: BlockMask, scale: float) -> Result:
    # Compressed keys are few, so backward has few programs. Repeating the keys gives it Hq / Hkv times as many.
    groups = q.shape[1] // k_cmp.shape[1]
    padding = mask.seq_lengths[1] - k_cmp.shape[2]
    k, v = (F.pad(x, (0, 0, 0, padding)).repeat_interleave(groups, dim=1) for x in (k_cmp, v_cmp))
    return _attend(q, k, v, mask, scale, _dense_options(q, v, stages=3) | {"BLOCKS_ARE_CONTIGUOUS": True})


def _selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    config: NSAConfig,
    scale: float,
) -> Result:
    heads = k.shape[1]
    groups = operator.index(q.shape[1] // heads)  # a constant to a compiler, as tiles have to be
    rows = -(-groups // 16) * 16 if q.is_cuda else groups  # tensor cores want 16 rows, a CPU any number
    positions = None if token is None or start is None else Positions(token, start, start)
    selected = selected_mask(block_indices, positions, k.shape[2], rows=rows, config=config)
    k, v = (_gather(x, selected.tokens) for x in (k, v))
    q = q.unflatten(1, (heads, groups)).transpose(2, 3)
    q = F.pad(q, (0, 0, 0, rows - groups)).flatten(2, 3)
    options = _selected_options(*selected.block_mask.BLOCK_SIZE, q.dtype)
    out, lse = _attend(q, k, v, selected.block_mask, scale, options)
    return _unfold(out, rows, groups), None if lse is None else _unfold(lse, rows, groups)


def _window(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Result:
    return _attend(q, k, v, mask, scale, _dense_options(q, v, stages=2))


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Pick rows ``tokens (B, H, V)`` of ``x (B, H, S, D)``.

    As an embedding, because its backward sums the rows that were picked more than once in float32.
    """
    batch, heads, length, dim = x.shape
    offset = torch.arange(batch * heads, dtype=torch.int32, device=x.device).view(batch, heads, 1) * length
    return F.embedding(tokens + offset, x.reshape(-1, dim))


def _unfold(x: Tensor, rows: int, groups: int) -> Tensor:
    """Undo the folding of heads into rows: ``(B, Hkv, T * rows, ...)`` to ``(B, Hq, T, ...)``."""
    return x.unflatten(2, (-1, rows))[:, :, :, :groups].transpose(2, 3).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, options: dict[str, Any]) -> Result:
    mask, options = _fit_to_kernels(mask, options, q.device)
    kwargs: dict[str, Any] = {"block_mask": mask, "scale": scale, "kernel_options": options}
    kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.device.type == "cpu":
        # The CPU kernel's choice of tiles reads the shape beneath a view of q; a sum is not a view.
        return _unfused(flex_attention(q + 0, k, v, **kwargs)), None
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **kwargs)
    return out, aux.lse


@torch.library.custom_op("flexnsa::unfused", mutates_args=())
def _unfused(x: Tensor) -> Tensor:
    """Copy ``x`` behind a compiler's back: Inductor would fuse what follows into the CPU kernel, and then fails."""
    return x.clone()


@_unfused.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _fit_to_kernels(mask: BlockMask, options: dict[str, Any], device: torch.device) -> tuple[BlockMask, dict[str, Any]]:
    """Hide what differs between devices and versions of torch; nothing else here asks for either.

    - A CPU ignores kernel options and has no backward. Its lists must spell tiles out, and must look as long as there
      are key tiles.
    - CUDA must use the kernel for long queries at any length: the one for decoding reads the lists differently.
    - CUDA's kernels find a batch's lists at multiples of the heads' stride, but Inductor may pad the stride of a batch.
      What is viewed by strides it stores as it is.
    - Before 2.14, CUDA's backward compares BLOCK_SIZE with its own default tiles even where others are set by hand, and
      finds none that fit a tile below 128. So BLOCK_SIZE claims 128, and the kernels are told the true size.
    """
    block_size, kv_indices, full_kv_indices = mask.BLOCK_SIZE, mask.kv_indices, mask.full_kv_indices
    if device.type == "cpu":
        num_tiles = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
        if options.get("BLOCKS_ARE_CONTIGUOUS"):
            step = torch.arange(num_tiles, dtype=torch.int32)
            kv_indices = kv_indices + step
            full_kv_indices = None if full_kv_indices is None else full_kv_indices + step
        else:
            kv_indices = _overlapping(kv_indices, num_tiles)
        options = {}
    else:
        options = {"BACKEND": "TRITON", **options}
        if TORCH < (2, 14) and block_size != (TILE, TILE):
            options["SPARSE_Q_BLOCK_SIZE"], options["SPARSE_KV_BLOCK_SIZE"] = block_size
            block_size = (TILE, TILE)
    lists: list[Any] = [mask.kv_num_blocks, kv_indices, mask.full_kv_num_blocks, full_kv_indices]
    lists += [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]
    if device.type == "cuda":
        lists = [None if x is None else x.as_strided(x.shape, x.stride()) for x in lists]
    arguments: list[Any] = [mask.seq_lengths, *lists, block_size, mask.mask_mod]
    return BlockMask(*arguments), options


def _overlapping(indices: Tensor, width: int) -> Tensor:
    """View lists ``(B, H, R, n)`` as ``(B, H, R, width)``: behind its own entries, each shows those of the next."""
    flat = F.pad(indices.flatten(), (0, width))
    return flat.as_strided((*indices.shape[:3], width), indices.stride())


def _dense_options(q: Tensor, v: Tensor, stages: int) -> dict[str, Any]:
    """Choose smaller tiles than FlexAttention's own where those spill registers, pipelined as far as none spills."""
    if q.dtype.itemsize > 2 or max(q.shape[-1], v.shape[-1]) > 128:
        return {}
    tiles = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32}
    return tiles | {"fwd_num_warps": 8, "bwd_num_warps": 4, "bwd_num_stages": stages}


def _selected_options(rows: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """Choose the kernels' tiles within sparse tiles of ``rows`` by ``keys``, as measured on an H200.

    Such tiles are small: one warp each, and many, beats fewer large programs. 4-byte numbers fill more registers.
    """
    warps = 1 if dtype.itemsize == 2 else 4
    forward = {"fwd_BLOCK_M": rows & -rows, "fwd_BLOCK_N": min(keys & -keys, 64)}  # the powers of two in them
    backward = {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16}
    launch = {"fwd_num_warps": warps, "fwd_num_stages": 2, "bwd_num_warps": warps, "bwd_num_stages": 3}
    return forward | backward | launch


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


def _compile_once(branch: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a branch, unless a compiler is at work already.

    FlexAttention must never run uncompiled: it then computes every score, and applies the mask function to tiles that
    were not selected. ``fullgraph`` makes that an error instead.
    """
    return branch if torch.compiler.is_compiling() else functools.partial(_call_compiled, branch)


def _call_compiled(branch: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Result:
    # Batch and lengths may vary from call to call. Heads, head dimensions and block sizes are architecture: tiles are
    # chosen from them, so each choice is compiled anew.
    for x in (q, k, v):
        torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(x, 3)
    with torch._dynamo.config.patch(specialize_int=True):
        return _compiled(branch)(q, k, v, *args)


@functools.cache
def _compiled(branch: Callable[..., Result]) -> Callable[..., Result]:
    return torch.compile(branch, fullgraph=True)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what FlexAttention cannot do, in words that say so."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: impl='flex' expects float32, bfloat16 or float16, got {x.dtype}")
        if x.device.type == "cpu" and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: FlexAttention has no backward on a CPU; use impl='sdpa' or torch.no_grad()")
        if x.device.type == "cuda" and x.shape[-1] < 16:
            raise ValueError(f"{name}: impl='flex' expects a head dimension of at least 16 on CUDA, got {x.shape[-1]}")
