"""Selected attention as one opaque operator.

The operator also returns the lists of queries that forward builds, for backward to use. Where a query has many blocks,
forward gathers its keys, and backward builds the lists.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call
from flexnsa.attention.plan import LARGEST_DIM, LEAST_DIM, Plan, gathers_keys
from flexnsa.attention.tiles.device import cdiv
from flexnsa.attention.tiles.selected import Part, is_whole, num_key_tiles
from flexnsa.attention.triton import arguments
from flexnsa.attention.triton.arguments import Factors, precision, require_device
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import tensors_of
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.results import empty_gradients, empty_outputs, fake_gradients, with_rows

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
LIST_QUERIES = 512
"""Queries of a replica; a block that more queries selected has several. The fastest number for groups of 4 to 16 on an
H200, where 1,024 took 4 % longer."""
LEAST_LIST_ROWS, LIST_ROWS = 2048, 8192
"""Bounds of its (query, head) rows: fewer would read keys too often, and more of a large group leave few programs."""
FLOAT32_LIST_ROWS = 512
"""The upper bound for float32, in which long sums would not be accurate enough."""


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the past tokens of the selected blocks on a CUDA device, in float32, bfloat16 or float16.

    Products of float32 inputs are exact (IEEE) unless ``torch.set_float32_matmul_precision`` allows TensorFloat-32.
    Repeated calls return equal bits, gradients included. The queries' tokens must increase strictly; blocks must be
    unique in a row, and indices of no past block are ignored. The output is in the memory order of q, and the
    log-sum-exp is differentiable too.

    Raises:
        ValueError: there is a score_mod that is no soft cap, or the batch has too many kv heads in all.
    """
    arguments.check_call(call, "k", k)
    token, start, _ = tensors_of(call.positions)
    size = call.config.select_block_size
    if token is None and Plan.of(q, k, v, block_size=size).halves_blocks:
        block_indices, size = in_halves(block_indices, cdiv(k.shape[2], size // 2)), size // 2
    _, *limits = sizes_of(q, k, v, block_indices, call.config)
    q, factors = arguments.with_positive_scale(q, arguments.factors_of(call))
    out, lse, _, _ = _selected_attention(SelectedInputs(q, k, v, block_indices, token, start, factors, size, *limits))
    return BranchOutput(out, lse)


def in_halves(block_indices: Tensor, count: int) -> Tensor:
    """List both halves of each block, ``(..., 2n)``, of the ``count`` that a sequence has."""
    part = torch.arange(2, dtype=block_indices.dtype, device=block_indices.device)
    halves = (2 * block_indices[..., None] + part).flatten(-2).clamp_min(-1)
    return halves.where(halves < count, -1)


class SelectedInputs(NamedTuple):
    """Queries ``(B, Hq, T, Dk)``, keys and values ``(B, Hkv, S, D)``, and the blocks that a query selected.

    ``block_indices`` is int32 ``(B, Hkv, T, n)``. The positions are int ``(B or 1, T)``, or None for one whole sequence
    from token 0. At most ``chunk`` queries share lists, and ``capacity`` queries a program.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    token: Tensor | None
    start: Tensor | None
    factors: Factors
    block_size: int
    chunk: int
    capacity: int

    @property
    def are_gathered(self) -> bool:
        """Whether kernels gather the keys of each query; there are no lists in forward then."""
        return gathers_keys(self.block_indices.shape[-1])

    def with_rows(self) -> SelectedInputs:
        """Make rows contiguous."""
        return self._replace(q=with_rows(self.q), k=with_rows(self.k), v=with_rows(self.v))

    def selection(self) -> Selection:
        """Return the selection from which lists are built."""
        from flexnsa.attention.triton.kernels.selected_lists import Selection

        token, start = self.token, self.start
        if token is not None and start is not None:
            token, start = arguments.rows_of(token, start)
        return Selection(self.block_indices.contiguous(), token, start, self.block_size, self.k.shape[2])


def sizes_of(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig) -> tuple[int, int, int]:
    """Return the block size, and the largest numbers of queries in a chunk and in a program."""
    group, n = operator.index(q.shape[1] // k.shape[1]), operator.index(block_indices.shape[-1])
    dims = operator.index(q.shape[-1]), operator.index(v.shape[-1])
    chunk = chunk_of(0 if gathers_keys(n) else group * n * max(dims) * q.element_size())
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
def _selected_attention(inputs: SelectedInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, and both tensors of the lists."""
    if inputs.are_gathered:
        from flexnsa.attention.triton.kernels.selected_gather import launch_gather

        require_device(inputs.q)
        outputs = empty_selected(inputs)
        of_queries = *outputs[:2], inputs.q
        launch_gather(*inputs.with_rows()[:3], inputs.selection(), of_queries, inputs.factors, backward=False)
        return outputs
    out, lse = empty_outputs(inputs.q, inputs.v.shape[-1])
    lists = attend_to_blocks(inputs, out, lse)
    return out, lse, lists.order, lists.replicas


def attend_to_blocks(
    inputs: SelectedInputs, out: Tensor, lse: Tensor, gated: GatedBranches | None = None, *, window: int | None = None
) -> Lists:
    """Compute out and lse, and with ``gated`` the sum of the branches, also the window if given; return the lists."""
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.selected import forward_tiles
    from flexnsa.attention.triton.kernels.selected_fwd import forward, forward_bytes
    from flexnsa.attention.triton.kernels.selected_lists import build_lists

    require_device(inputs.q)
    selection = inputs.selection()
    lists = build_lists(selection, inputs.chunk, inputs.capacity)
    q, k, v = inputs.with_rows()[:3]
    tiles = forward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], inputs.block_size)
    for part in parts_of(k, forward_bytes(q, k, v, selection.block_indices.shape[-1], inputs.chunk)):
        q_part, k_part, v_part, out_part, lse_part = (_of_heads(x, k, part) for x in (q, k, v, out, lse))
        some = selection.of_heads(part), lists.of_heads(part)
        branches = gated and gated._make(_of_heads(x, k, part) if isinstance(x, Tensor) else x for x in gated)
        forward(
            q_part, k_part, v_part, *some, out_part, lse_part, branches,
            factors=inputs.factors, precision=precision(), tiles=tiles, window=window,
        )  # fmt: skip
    return lists


@opaque_operator("selected_attention_triton_backward", launches_kernels=True)
def _selected_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: SelectedInputs,
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    replicas: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.output_rows import stats_of_rows

    stats = stats_of_rows(grad_out, out, lse, grad_lse, inputs.factors[0], inputs.k.shape[1], gathered=True)
    return selected_gradients(inputs, order, replicas, stats, grad_out)


def selected_gradients(
    inputs: SelectedInputs,
    order: Tensor,
    replicas: Tensor,
    stats: Tensor,
    grad_out: Tensor,
    others: OtherGradients | WindowQueries | None = None,
    *,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        inputs: of forward.
        order: of its lists.
        replicas: of its lists.
        stats: as :mod:`flexnsa.attention.triton.kernels.output_rows` describes.
        grad_out: ``(B, Hq, T, Dv)``.
        others: what the other branches add to the gradient of q; gradients are in memory as those of
            :func:`empty_gradients`.
        window: its size, for :class:`~flexnsa.attention.triton.kernels.selected_bwd.WindowQueries`.
    """
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.selected import backward_tiles
    from flexnsa.attention.triton.kernels.selected_bwd import backward, backward_bytes
    from flexnsa.attention.triton.kernels.selected_gather import launch_gather
    from flexnsa.attention.triton.kernels.selected_lists import Lists, build_lists

    selection, size, chunk, capacity = inputs.selection(), inputs.block_size, inputs.chunk, inputs.capacity
    grads = empty_gradients(*inputs[:3])
    (q, k, v), grad_out = inputs.with_rows()[:3], with_rows(grad_out)
    lists = Lists(order, replicas, chunk, capacity)
    if inputs.are_gathered:
        lists = build_lists(selection, chunk, capacity)
        launch_gather(q, k, v, selection, (grad_out, stats, grads[0]), inputs.factors, backward=True)
    tiles = backward_tiles(device_of(q), q.dtype, q.shape[-1], v.shape[-1], size)
    for part in parts_of(k, backward_bytes(q, k, v, selection.block_indices.shape[-1], chunk, capacity, size)):
        q_part, k_part, v_part, *of_grads = (_of_heads(x, k, part) for x in (q, k, v, grad_out, *grads))
        some = selection.of_heads(part), lists.of_heads(part), _of_heads(stats, k, part)
        added = others and others._make(x if x is None else _of_heads(x, k, part) for x in others)
        backward(
            q_part, k_part, v_part, *some, *of_grads,
            factors=inputs.factors, precision=precision(), tiles=tiles, others=added, window=window,
        )  # fmt: skip
    return grads


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
def empty_selected(inputs: SelectedInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what the operator returns; lists are empty where backward builds them."""
    from flexnsa.attention.triton.kernels.selected_lists import empty_lists

    outputs = empty_outputs(inputs.q, inputs.v.shape[-1])
    if inputs.are_gathered:
        return *outputs, inputs.block_indices.new_empty(0), inputs.block_indices.new_empty(0)
    key_tiles = num_key_tiles(inputs.k.shape[2], inputs.block_size, has_positions=inputs.token is not None)
    lists = empty_lists(inputs.block_indices, key_tiles, inputs.chunk, inputs.capacity)
    return *outputs, lists.order, lists.replicas


_selected_attention_backward.register_fake(fake_gradients)
_selected_attention.register_backward(_selected_attention_backward)
