"""Selected attention as one opaque operator.

The operator also returns the lists of queries that forward builds, for backward to use.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call
from flexnsa.attention.operators import empty_gradients, empty_outputs, with_rows
from flexnsa.attention.tiles.device import cdiv
from flexnsa.attention.triton.operators import check_call, precision, require_device, rows_of, with_positive_scale
from flexnsa.attention.triton.selected_sizes import Part, is_whole, num_key_tiles
from flexnsa.config import NSAConfig
from flexnsa.operators import opaque_operator

if TYPE_CHECKING:
    from flexnsa.attention.triton.kernels.selected_bwd import OtherGradients, WindowQueries
    from flexnsa.attention.triton.kernels.selected_fwd import GatedBranches
    from flexnsa.attention.triton.kernels.selected_lists import Lists, Selection

WORKSPACE_BYTES = 9 * 2**28
"""Limit of partial outputs and sums; heads that do not fit run later. A chunk of one head is the least.

All heads of 64 query and 4 key heads of 128 fit: in two parts `forward_parts` took 11 % longer at 8k (H100)."""
CHUNK = 8192
"""Upper bound of the queries that share lists: many, so that keys are read rarely."""
LEAST_CHUNK = 256
LEAST_DIM, LARGEST_DIM = 16, 256
LIST_QUERIES = 512
"""Queries of a replica; a block that more queries selected has several. The fastest number for groups of 4 to 16 on an
H200, where 1,024 took 4 % longer."""
LEAST_LIST_ROWS, LIST_ROWS = 2048, 8192
"""Bounds of its (query, head) rows: fewer would read keys too often, and more of a large group leave few programs."""
FLOAT32_LIST_ROWS = 512
"""The upper bound for float32, in which long sums would not be accurate enough."""


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the past tokens of the selected blocks (NSA paper, section 3.3.2).

    Products of float32 inputs are exact (IEEE) unless ``torch.set_float32_matmul_precision`` allows TensorFloat-32.
    Repeated calls return equal bits, gradients included. The queries' tokens must increase strictly.

    Args:
        q: float32, bfloat16 or float16 ``(B, Hq, T, Dk)`` on a CUDA device.
        k: ``(B, Hkv, S, Dk)``; ``Hkv`` divides ``Hq``.
        v: ``(B, Hkv, S, Dv)``.
        block_indices: int32 ``(B, Hkv, T, n)``, unique in a row; indices of no past block are ignored.
        call: see :class:`flexnsa.attention.interface.Call`.

    Returns:
        The output in the memory order of q, and the log-sum-exp, which is differentiable too.

    Raises:
        ValueError: there is a score_mod, or the batch has too many kv heads in all.
    """
    check_call(call, "k", k)
    positions = call.positions
    token, start = (None, None) if positions is None else (positions.token, positions.start)
    sizes = sizes_of(q, k, v, block_indices, call.config)
    q, scale = with_positive_scale(q, call.scale)
    out, lse, _, _ = _selected_attention(q, k, v, block_indices, token, start, scale, *sizes)
    return BranchOutput(out, lse)


def sizes_of(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig) -> tuple[int, int, int]:
    """Return the block size, and the largest numbers of queries in a chunk and in a program."""
    group, n = operator.index(q.shape[1] // k.shape[1]), operator.index(block_indices.shape[-1])
    dims = operator.index(q.shape[-1]), operator.index(v.shape[-1])
    chunk = chunk_of(group * n * max(dims) * q.element_size())
    return operator.index(config.select_block_size), chunk, capacity_of(group, q.element_size())


def check_input(name: str, x: Tensor) -> None:
    """Check that there is a kernel for an input.

    Raises:
        ValueError: there is none for this dtype, head dimension or device.
    """
    require_device(x, name)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: expected float32, bfloat16 or float16 with impl='triton', got {x.dtype}")
    if x.dim() == 4 and not LEAST_DIM <= x.shape[-1] <= LARGEST_DIM:
        expected = f"a head dimension of {LEAST_DIM} .. {LARGEST_DIM}"
        raise ValueError(f"{name}: expected {expected} with impl='triton', got {x.shape[-1]}")


def chunk_of(bytes_of_query: int) -> int:
    """Return how many queries' partial outputs fit the workspace, for one kv head: a power of two."""
    chunk = CHUNK
    while chunk > LEAST_CHUNK and chunk * bytes_of_query > WORKSPACE_BYTES // 2:
        chunk //= 2
    return chunk


def capacity_of(group: int, number_bytes: int) -> int:
    """Return how many queries one program serves, at most, with numbers of 2 or 4 bytes."""
    most = min(LIST_ROWS, FLOAT32_LIST_ROWS) if number_bytes == torch.float32.itemsize else LIST_ROWS
    return max(1, min(max(LIST_QUERIES * group, LEAST_LIST_ROWS), most) // group)


@opaque_operator("selected_attention_triton", launches_kernels=True)
def _selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    scale: float,
    block_size: int,
    chunk: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, and both tensors of the lists."""
    selection = selection_of(block_indices, token, start, block_size, k.shape[2])
    out, lse = empty_outputs(q, v.shape[-1])
    lists = attend_to_blocks(q, k, v, selection, out, lse, scale=scale, chunk=chunk, capacity=capacity)
    return out, lse, lists.order, lists.replicas


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    out: Tensor,
    lse: Tensor,
    gated: GatedBranches | None = None,
    *,
    scale: float,
    chunk: int,
    capacity: int,
    window: int | None = None,
) -> Lists:
    """Compute out and lse, and with ``gated`` the sum of the branches, also the window if given; return the lists."""
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.selected import forward_tiles
    from flexnsa.attention.triton.kernels.selected_fwd import forward, forward_bytes
    from flexnsa.attention.triton.kernels.selected_lists import build_lists

    require_device(q)
    lists = build_lists(selection, chunk, capacity)
    q, k, v = (with_rows(x) for x in (q, k, v))
    tiles = forward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], selection.block_size)
    for part in parts_of(k, forward_bytes(q, k, v, selection.block_indices.shape[-1], chunk)):
        q_part, k_part, v_part, out_part, lse_part = (_of_heads(x, k, part) for x in (q, k, v, out, lse))
        some = selection.of_heads(part), lists.of_heads(part)
        branches = gated and gated._make(x if x is None else _of_heads(x, k, part) for x in gated)
        outputs = out_part, lse_part, branches
        forward(q_part, k_part, v_part, *some, *outputs, scale=scale, precision=precision(), tiles=tiles, window=window)
    return lists


@opaque_operator("selected_attention_triton_backward", launches_kernels=True)
def _selected_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    replicas: Tensor,
    scale: float,
    block_size: int,
    chunk: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import stats_of_rows
    from flexnsa.attention.triton.kernels.selected_lists import Lists

    selection = selection_of(block_indices, token, start, block_size, k.shape[2])
    lists = Lists(order, replicas, chunk, capacity)
    stats = stats_of_rows(grad_out, out, lse, grad_lse, scale, k.shape[1], gathered=True)
    return selected_gradients(stats, grad_out, q, k, v, selection, lists, scale=scale)


def selected_gradients(
    stats: Tensor,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    lists: Lists,
    *,
    scale: float,
    others: OtherGradients | WindowQueries | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        stats: of :func:`flexnsa.attention.triton.kernels.output_rows.stats_of_rows`.
        grad_out: ``(B, Hq, T, Dv)``.
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        selection: of the queries.
        lists: of forward.
        scale: factor on the scores.
        others: what the other branches add to the gradient of q; gradients are in memory as those of
            :func:`empty_gradients`.
        window: its size, for :class:`~flexnsa.attention.triton.kernels.selected_bwd.WindowQueries`.
    """
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.selected import backward_tiles
    from flexnsa.attention.triton.kernels.selected_bwd import backward, backward_bytes

    grads = empty_gradients(grad_out, None, q, k, v)
    q, k, v, grad_out = (with_rows(x) for x in (q, k, v, grad_out))
    size = selection.block_size
    tiles = backward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], size)
    n = selection.block_indices.shape[-1]
    for part in parts_of(k, backward_bytes(q, k, v, n, lists.chunk, lists.capacity, size)):
        q_part, k_part, v_part, *given = (_of_heads(x, k, part) for x in (q, k, v, grad_out, *grads))
        some = selection.of_heads(part), lists.of_heads(part), _of_heads(stats, k, part)
        added = others and others._make(x if x is None else _of_heads(x, k, part) for x in others)
        options = {"scale": scale, "precision": precision(), "tiles": tiles, "others": added, "window": window}
        backward(q_part, k_part, v_part, *some, *given, **options)
    return grads


def selection_of(
    block_indices: Tensor, token: Tensor | None, start: Tensor | None, block_size: int, num_keys: int
) -> Selection:
    """Return the selection from which lists are built."""
    from flexnsa.attention.triton.kernels.selected_lists import Selection

    if token is not None and start is not None:
        token, start = rows_of(token, start)
    return Selection(block_indices.contiguous(), token, start, block_size, num_keys)


def parts_of(k: Tensor, bytes_of_head: int) -> Iterator[Part]:
    """Split ``(B, Hkv)`` into parts that fit the workspace: some batch elements, or some heads of one."""
    batch, heads = k.shape[:2]
    elements, of_one = sizes_of_parts(batch, heads, bytes_of_head)
    for b in range(0, batch, elements):
        for head in range(0, heads, of_one):
            yield slice(b, min(b + elements, batch)), slice(head, min(head + of_one, heads))


def sizes_of_parts(batch: int, heads: int, bytes_of_head: int) -> tuple[int, int]:
    """Return the batch elements and the heads of a part: as few parts as fit, and these about equally large."""
    at_once = max(1, WORKSPACE_BYTES // bytes_of_head)
    if at_once >= heads:
        return cdiv(batch, max(1, cdiv(batch, at_once // heads))) or 1, heads
    return 1, cdiv(heads, cdiv(heads, at_once))


def _of_heads(x: Tensor, k: Tensor, part: Part) -> Tensor:
    """Return the heads of ``x (B, Hq or Hkv, ...)`` that belong to a part of the heads of k."""
    if is_whole(part, k):
        return x
    group = x.shape[1] // k.shape[1]
    return x[part[0], part[1].start * group : part[1].stop * group]


@_selected_attention.register_fake
def empty_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    token: Tensor | None,
    start: Tensor | None,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    block_size: int,
    chunk: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what the operator returns."""
    from flexnsa.attention.triton.kernels.selected_lists import empty_lists

    key_tiles = num_key_tiles(k.shape[2], block_size, has_positions=token is not None)
    lists = empty_lists(block_indices, key_tiles, chunk, capacity)
    return *empty_outputs(q, v.shape[-1]), lists.order, lists.replicas


_selected_attention_backward.register_fake(empty_gradients)
_selected_attention.register_backward(_selected_attention_backward)
