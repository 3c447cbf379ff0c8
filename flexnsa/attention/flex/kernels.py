"""FlexAttention's kernels as this package calls them: what differs between devices and versions stands here alone."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexnsa.attention.seam import Attended, given
from flexnsa.attention.tiles.device import Device, device_of
from flexnsa.attention.tiles.flex import KernelOptions, dense_tiles
from flexnsa.config import NSAConfig
from flexnsa.custom_ops import opaque_operator, refuse_transforms
from flexnsa.masks.intervals import DENSE_TILE, stored
from flexnsa.masks.user_mods import ScoreMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_input(name: str, x: Tensor) -> None:
    """Refuse what FlexAttention cannot take, in words that say so.

    Raises:
        ValueError: a dtype, head dimension or gradient that it has no kernel for on this device.
    """
    if not torch.compiler.is_compiling():
        refuse_transforms("impl='flex'", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: expected float32, bfloat16 or float16 with impl='flex', got {x.dtype}")
    if x.device.type == "cpu" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected no gradient with impl='flex' on a CPU, where FlexAttention has no backward, "
            "got a tensor that requires one; use impl='sdpa' or torch.no_grad()"
        )
    if x.device.type == "cuda" and x.dim() == 4 and x.shape[-1] < 16:
        raise ValueError(f"{name}: expected a head dimension of at least 16 with impl='flex', got {x.shape[-1]}")


def check_blocks(q: Tensor, config: NSAConfig) -> None:
    """Refuse blocks that tensor cores cannot tile."""
    if q.is_cuda and config.select_block_size % 16:
        raise ValueError(
            "select_block_size: expected a multiple of 16, the smallest tile of the tensor cores, "
            f"got {config.select_block_size}"
        )


def check_heads(q: Tensor, v: Tensor, rows: int = 1) -> None:
    """Refuse heads of which the device cannot hold the smallest tiles, and those too long for the kernels' integers.

    Args:
        q: ``(B, H, T, Dk)``.
        v: ``(B, H, S, Dv)``.
        rows: of a query, where heads are folded into rows.

    Raises:
        ValueError: the device has no tile of them, or one head has 2^31 numbers.
    """
    if not q.is_cuda:
        return
    dense_tiles(*sizes_of_tiles(q, v))
    longest = max(q.shape[2] * rows, v.shape[2])
    if not _reaches(longest, max(q.shape[-1], v.shape[-1])):
        raise ValueError(
            f"q: expected fewer than 2^31 numbers in one head with impl='flex' and torch {torch.__version__}, "
            f"got {longest} rows of {max(q.shape[-1], v.shape[-1])}"
        )


def sizes_of_tiles(q: Tensor, v: Tensor) -> tuple[Device, torch.dtype, int, int]:
    """Give what the tiles of :mod:`flexnsa.attention.tiles.flex` depend on; a compiler takes it for constant."""
    return device_of(q), q.dtype, operator.index(q.shape[-1]), operator.index(v.shape[-1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float,
    options: KernelOptions,
    score_mod: ScoreMod | None = None,
) -> Attended:
    """Call FlexAttention: the output, and the natural log-sum-exp where the device can give it.

    ``options`` are those of :mod:`flexnsa.attention.tiles.flex`; ``score_mod`` is in the kernel's own coordinates.
    """
    # Lengths are those of the tensors: a compiler would take integers that are kept in a mask for constants.
    mask, options = _fit_to_kernels(mask, (q.shape[2], k.shape[2]), options, q.device)
    q, k, v = (x if _reaches(x.shape[2], x.stride(2)) or not x.is_cuda else x.contiguous() for x in (q, k, v))
    attention = functools.partial(
        flex_attention,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=cast("FlexKernelOptions", options),
    )
    if q.device.type == "cpu":
        # The CPU kernel's choice of tiles reads the shape beneath a view of q: this copy is no view. It also refuses
        # tensors that require a gradient where nobody asks for one.
        return Attended(_unfused(attention(_unfused(q).detach(), k.detach(), v.detach())), None)
    out, aux = attention(q, k, v, return_aux=AuxRequest(lse=True))
    return Attended(out, aux.lse)


def _reaches(rows: int, stride: int) -> bool:
    """Tell whether the kernels find the last of a head's rows: before 2.14 they multiply row and stride in 32 bits."""
    return TORCH >= (2, 14) or rows * stride < 2**31


@opaque_operator("unfused")
def _unfused(x: Tensor) -> Tensor:
    """Copy ``x`` behind a compiler's back: Inductor would fuse what follows into the CPU kernel, and then fails."""
    return x.clone(memory_format=torch.contiguous_format)


@_unfused.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fit_to_kernels(
    mask: BlockMask, lengths: tuple[int, int], options: KernelOptions, device: torch.device
) -> tuple[BlockMask, KernelOptions]:
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
        num_tiles = -(-lengths[1] // mask.BLOCK_SIZE[1])
        if options.get("BLOCKS_ARE_CONTIGUOUS"):
            step = torch.arange(num_tiles, dtype=torch.int32)
            kv_indices = kv_indices + step
            full_kv_indices = None if full_kv_indices is None else full_kv_indices + step
        else:
            kv_indices = _overlapping(kv_indices, num_tiles)
        options = {}
    else:
        options = {"BACKEND": "TRITON", **options}
        if TORCH < (2, 14) and block_size != (DENSE_TILE, DENSE_TILE):
            options |= {"SPARSE_Q_BLOCK_SIZE": block_size[0], "SPARSE_KV_BLOCK_SIZE": block_size[1]}
            block_size = (DENSE_TILE, DENSE_TILE)

    def kept(table: Tensor | None) -> Tensor | None:
        return stored(table) if table is not None and device.type == "cuda" else table

    fitted = BlockMask(
        lengths,
        given(kept(mask.kv_num_blocks)),
        given(kept(kv_indices)),
        kept(mask.full_kv_num_blocks),
        kept(full_kv_indices),
        kept(mask.q_num_blocks),
        kept(mask.q_indices),
        kept(mask.full_q_num_blocks),
        kept(mask.full_q_indices),
        block_size,
        mask.mask_mod,
    )
    return fitted, options


def _overlapping(indices: Tensor, width: int) -> Tensor:
    """View lists ``(B, H, R, n)`` as ``(B, H, R, width)``: behind its own entries, each shows those of the next."""
    flat = F.pad(indices.flatten(), (0, width))
    return flat.as_strided((*indices.shape[:3], width), indices.stride())


def rows_of_query(q: Tensor, k: Tensor) -> int:
    """Count the rows that the heads of a group take: tensor cores want a multiple of 16, a CPU any number."""
    groups = operator.index(q.shape[1] // k.shape[1])  # a constant to a compiler, as tiles have to be
    return -(-groups // 16) * 16 if q.is_cuda else groups


def fold_heads(q: Tensor, rows: int, groups: int) -> Tensor:
    """Lay the heads of a group below each other: ``(B, Hq, T, D)`` to ``(B, Hkv, T * rows, D)``, padded with zeros."""
    grouped = torch.unflatten(q, 1, (-1, groups)).transpose(2, 3)
    return F.pad(grouped, (0, 0, 0, rows - groups)).flatten(2, 3)


def unfold_heads(folded: Attended, rows: int, groups: int) -> Attended:
    """Undo :func:`fold_heads` of an output and its log-sum-exp."""

    def unfold(x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (-1, rows))[:, :, :, :groups].transpose(2, 3).flatten(1, 2)

    return Attended(unfold(folded.out), None if folded.lse is None else unfold(folded.lse))
