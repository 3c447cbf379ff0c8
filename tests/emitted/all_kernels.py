"""Every kernel that attention launches on a GPU, compiled for the pretended one: FlexAttention's and our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa.attention.implementations import FLEX_CACHED
from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed
from flexnsa.positions import Positions
from tests.emitted.calls import BRANCHES, arguments, attention, cached_attention
from tests.emitted.emit import emit
from tests.emitted.machine_code import Resources, compiling_launches, resources

CONFIG = NSAConfig()
GROUP, KV_HEADS, LENGTH = 16, 4, 4096
FEW, MANY = 1, 64
"""Queries of a step on a cache: those that divide the keys among programs, and those that do not."""

Compile = Callable[[], list[tuple[str, Resources]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What tiles depend on: head dimensions and dtype."""

    dims: tuple[int, int]
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.dims[0] ** -0.5


def calls(shape: Shape) -> Iterator[tuple[str, Compile]]:
    """Name every call that attention may make, and give what compiles its kernels."""
    for branch in BRANCHES:
        yield f"flex {branch}", partial(_flex, branch, shape)
        for queries in (FEW, MANY):
            yield f"flex {branch}, {queries} cached", partial(_flex_cached, branch, queries, shape)
    for function in (_select, _select_few, _selected, _selected_of_documents):
        yield function.__name__.removeprefix("_").replace("_", " "), partial(_own, function, shape)


def _flex(branch: str, shape: Shape) -> list[tuple[str, Resources]]:
    function = attention(branch, CONFIG, shape.scale)
    make = partial(arguments, branch, CONFIG, GROUP, LENGTH, shape.dims, shape.dtype, heads=KV_HEADS)
    return [(kernel.direction, resources(kernel)) for kernel in emit(function, make).kernels if kernel.is_template]


def _flex_cached(branch: str, queries: int, shape: Shape) -> list[tuple[str, Resources]]:
    def make() -> tuple[Tensor, ...]:
        q, k, v = arguments(branch, CONFIG, GROUP, LENGTH, shape.dims, shape.dtype, heads=KV_HEADS)[:3]
        token = torch.zeros(1, queries, dtype=torch.int32)
        chosen = torch.zeros(1, KV_HEADS, queries, CONFIG.num_selected_blocks, dtype=torch.int32)
        return q.detach()[:, :, :queries], k.detach(), v.detach(), token, chosen

    kernels = emit(cached_attention(FLEX_CACHED, branch, config=CONFIG), make, backward=False).kernels
    return [(kernel.direction, resources(kernel)) for kernel in kernels if kernel.is_template]


def _own(launch: Callable[[Shape], None], shape: Shape) -> list[tuple[str, Resources]]:
    with FakeTensorMode(), torch.device("cuda"), compiling_launches() as found:
        launch(shape)
    return [(needed.kernel.removeprefix("_"), needed) for needed in found]


def _queries_and_compressed(shape: Shape, queries: int) -> tuple[Tensor, Tensor]:
    q = torch.empty(1, KV_HEADS * GROUP, queries, shape.dims[0], dtype=shape.dtype)
    return q, q.new_empty(1, KV_HEADS, num_compressed(LENGTH, CONFIG), shape.dims[0])


def _select(shape: Shape) -> None:
    from flexnsa.attention.triton.select import launch_selection

    launch_selection(*_queries_and_compressed(shape, LENGTH), None, None, config=CONFIG, scale=shape.scale)


def _select_few(shape: Shape) -> None:
    from flexnsa.attention.triton.select import launch_selection

    token = torch.zeros(1, FEW, dtype=torch.int32)
    positions = Positions(token, token, token)
    launch_selection(*_queries_and_compressed(shape, FEW), None, positions, config=CONFIG, scale=shape.scale)


def _selected(shape: Shape, token: Tensor | None = None) -> None:
    from flexnsa.attention.tiles.device import device_of
    from flexnsa.attention.tiles.selected import backward_tiles, forward_tiles
    from flexnsa.attention.triton import selected
    from flexnsa.attention.triton.selected_backward import backward
    from flexnsa.attention.triton.selected_forward import forward
    from flexnsa.attention.triton.selected_lists import build_lists

    new = partial(torch.empty, dtype=shape.dtype)
    q, out = (new(1, KV_HEADS * GROUP, LENGTH, dim) for dim in shape.dims)
    k, v = (new(1, KV_HEADS, LENGTH, dim) for dim in shape.dims)
    lse, size = new(1, KV_HEADS * GROUP, LENGTH, dtype=torch.float32), CONFIG.select_block_size
    blocks = new(1, KV_HEADS, LENGTH, CONFIG.num_selected_blocks, dtype=torch.int32)
    selection = selected.selection_of(blocks, token, token, size, LENGTH)
    lists = build_lists(selection, selected.CHUNK, selected.LIST_ROWS // GROUP)
    chosen = (device_of(q), shape.dtype, *shape.dims, size)
    options: dict[str, Any] = {"scale": shape.scale, "precision": "ieee"}
    forward(q, k, v, selection, lists, out, lse, tiles=forward_tiles(*chosen), **options)
    grads = (out, *map(torch.empty_like, (q, k, v)))
    backward(q, k, v, selection, lists, out, lse, *grads, grad_lse=lse, tiles=backward_tiles(*chosen), **options)


def _selected_of_documents(shape: Shape) -> None:
    _selected(shape, torch.zeros(1, LENGTH, dtype=torch.int32))
