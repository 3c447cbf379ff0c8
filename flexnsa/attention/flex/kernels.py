"""Calls of FlexAttention, with all that differs between devices and versions of torch."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexnsa.attention.interface import BranchOutput
from flexnsa.attention.plan import LEAST_BLOCK
from flexnsa.attention.tiles.device import Device, device_of
from flexnsa.attention.tiles.flex import KernelOptions, dense_tiles
from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import DENSE_TILE, stored
from flexnsa.masks.user_mods import ScoreMod
from flexnsa.operators.opaque import opaque_operator, refuse_transforms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn.attention.flex_attention import FlexKernelOptions

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_input(name: str, x: Tensor) -> None:
    """Check that FlexAttention has a kernel for an input.

    Raises:
        ValueError: it has none for this dtype, head dimension or gradient on this device.
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
    """Check that tensor cores can tile the selection blocks."""
    if q.is_cuda and config.select_block_size % LEAST_BLOCK:
        expected = f"a multiple of {LEAST_BLOCK}, the smallest tile of the tensor cores"
        raise ValueError(f"select_block_size: expected {expected}, got {config.select_block_size}")


def check_heads(q: Tensor, v: Tensor, rows: int = 1) -> None:
    """Check that tiles of the heads fit the device, and that offsets in a head fit the kernels' integers.

    Args:
        q: ``(B, H, T, Dk)``.
        v: ``(B, H, S, Dv)``.
        rows: kernel rows per query, where heads are folded.

    Raises:
        ValueError: no tile fits, or a head has 2^31 elements.
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
    """Return what the tiles of :mod:`flexnsa.attention.tiles.flex` depend on, constants under ``torch.compile``."""
    return device_of(q), q.dtype, operator.index(q.shape[-1]), operator.index(v.shape[-1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float,
    options: KernelOptions,
    score_mod: ScoreMod | None = None,
) -> BranchOutput:
    """Call FlexAttention for the output and, except on a CPU, the natural log-sum-exp.

    ``options`` are those of :mod:`flexnsa.attention.tiles.flex`; ``score_mod`` takes the kernel's own indices.
    """
    if q.device.type == "cpu":
        # The CPU kernel (torch 2.13) computes wrong scores for a tile of 8 or 24 keys, and others that its vectors
        # divide but its columns do not. Whole tiles are right.
        k, v = (F.pad(x, (0, 0, 0, -x.shape[2] % mask.BLOCK_SIZE[1])) for x in (k, v))
    # Lengths come from the tensors, because torch.compile treats integers stored in a mask as constants.
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
        # The CPU kernel chooses tiles by the shape of the base of a view, so q is copied. It also raises for tensors
        # that require a gradient, even under torch.no_grad().
        return BranchOutput(_unfused(attention(_unfused(q).detach(), k.detach(), v.detach())), None)
    out, aux = attention(q, k, v, return_aux=AuxRequest(lse=True))
    return BranchOutput(out, aux.lse)


def _reaches(rows: int, stride: int) -> bool:
    """Return whether the kernels can address all rows of a head: before 2.14 they use 32-bit offsets."""
    return TORCH >= (2, 14) or rows * stride < 2**31


@opaque_operator("unfused")
def _unfused(x: Tensor) -> Tensor:
    """Copy ``x`` in an opaque operator: Inductor would fuse neighbouring operations into the CPU kernel and fail."""
    return x.clone(memory_format=torch.contiguous_format)


@_unfused.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fit_to_kernels(
    mask: BlockMask, lengths: tuple[int, int], options: KernelOptions, device: torch.device
) -> tuple[BlockMask, KernelOptions]:
    """Adapt a mask and options to the kernels of a device and version of torch.

    - The CPU kernel ignores options and has no backward. Its lists must contain all tiles, and be as wide as there are
      key tiles.
    - On CUDA the kernel for long queries must be used at any length; the one for decoding reads the lists differently.
    - CUDA kernels compute the batch stride of lists from the stride of heads, but Inductor may pad the batch stride. It
      does not pad the input of ``as_strided``.
    - Before 2.14, backward on CUDA compares BLOCK_SIZE with its default tiles even if others are set, and finds none
      for tiles below 128. So BLOCK_SIZE is set to 128, and options give the kernels the true size.
    """
    block_size, kv_indices, full_kv_indices = mask.BLOCK_SIZE, mask.kv_indices, mask.full_kv_indices
    if device.type == "cpu":
        num_tiles = -(-lengths[1] // mask.BLOCK_SIZE[1])
        if options.get("BLOCKS_ARE_CONTIGUOUS"):
            step = torch.arange(num_tiles, dtype=torch.int32)
            kv_indices = kv_indices + step
            full_kv_indices = None if full_kv_indices is None else full_kv_indices + step
        else:
            flat = F.pad(kv_indices.flatten(), (0, num_tiles))  # after its own entries each list overlaps the next ones
            kv_indices = flat.as_strided((*kv_indices.shape[:3], num_tiles), kv_indices.stride())
        options = {}
    else:
        options = {"BACKEND": "TRITON", **options}
        if TORCH < (2, 14) and block_size != (DENSE_TILE, DENSE_TILE):
            options |= {"SPARSE_Q_BLOCK_SIZE": block_size[0], "SPARSE_KV_BLOCK_SIZE": block_size[1]}
            block_size = (DENSE_TILE, DENSE_TILE)

    def stored_on_gpu(table: Tensor | None) -> Tensor | None:
        return stored(table) if table is not None and device.type == "cuda" else table

    of_rows = mask.kv_num_blocks, kv_indices, mask.full_kv_num_blocks, full_kv_indices
    of_columns = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
    tables = cast("Iterable[Tensor]", map(stored_on_gpu, of_rows + of_columns))  # of which some may be None
    return BlockMask(lengths, *tables, BLOCK_SIZE=block_size, mask_mod=mask.mask_mod), options


def rows_of_query(q: Tensor, k: Tensor) -> int:
    """Return the kernel rows per query: the size of a group, on a GPU padded to a multiple of 16 for tensor cores."""
    groups = operator.index(q.shape[1] // k.shape[1])  # tiles must be constants under torch.compile
    return -(-groups // 16) * 16 if q.is_cuda else groups


def fold_heads(q: Tensor, rows: int, groups: int) -> Tensor:
    """Fold the heads of a group into rows: ``(B, Hq, T, D)`` to ``(B, Hkv, T * rows, D)``, padded with zeros."""
    grouped = torch.unflatten(q, 1, (-1, groups)).transpose(2, 3)
    return F.pad(grouped, (0, 0, 0, rows - groups)).flatten(2, 3)


def unfold_heads(folded: BranchOutput, rows: int, groups: int) -> BranchOutput:
    """Undo :func:`fold_heads` of an output and its log-sum-exp."""

    def unfold(x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (-1, rows))[:, :, :, :groups].transpose(2, 3).flatten(1, 2)

    return BranchOutput(unfold(folded.out), None if folded.lse is None else unfold(folded.lse))
