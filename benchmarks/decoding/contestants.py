"""Who decodes on a GPU: NSA's layer, its attention and the parts of that, and a dense layer on flash SDPA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.functional import attend, implementation
from flexnsa.masks.positions import Positions
from flexnsa.models import DenseAttention

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer; the default is the shape of published NSA times on an H200, the width that of the paper's model."""

    dim: int = 2560
    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    config: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    impl: str = "flex"
    backend: str = "inductor"

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """First arguments of a layer."""
        return self.dim, self.num_heads, self.num_kv_heads, self.head_dim

    def compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """One graph, for this batch size."""
        return torch.compile(call, fullgraph=True, dynamic=False, backend=self.backend)

    def place(self, layer: nn.Module) -> Any:
        """Put a layer on the device, frozen."""
        return layer.to(self.device, self.dtype).requires_grad_(False)

    def draw(self, *shape: int) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


class Sparse:
    """NSA's layer, and its attention alone, at any context."""

    def __init__(self, shape: Shape, batch: int, capacity: int) -> None:
        self.shape = shape
        self.layer = shape.place(NativeSparseAttention(*shape.heads, config=shape.config, impl=shape.impl))
        self.cache = self.layer.new_cache(batch, capacity)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.x = shape.draw(batch, 1, shape.dim)
        self.q = shape.draw(batch, shape.num_heads, 1, shape.head_dim)
        self.gates = torch.rand(batch, shape.num_heads, 1, 3, dtype=shape.dtype, device=shape.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int32, device=shape.device)
        self.lse = torch.full((batch, shape.num_heads, 1), 8.0, device=shape.device) if shape.impl == "flex" else None
        chosen = shape.config.num_selected_blocks
        self.blocks = torch.zeros(batch, shape.num_kv_heads, 1, chosen, dtype=torch.int32, device=shape.device)
        self.attention = implementation(shape.impl, self.q, cached=True)
        self.options: dict[str, Any] = {"config": shape.config, "scale": shape.head_dim**-0.5}
        self.compiled_layer = shape.compile(self.layer)

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.cache.lengths.fill_(context)
        self.token.fill_(context)
        last = context // self.shape.config.select_block_size
        self.blocks.copy_(torch.linspace(0, last, self.blocks.shape[-1], device=self.blocks.device))

    def calls(self) -> dict[str, dict[str, Call]]:
        """What to time, by part and mode."""
        return {
            "layer": {
                "eager": lambda: self.layer(self.x, cache=self.cache),
                "compiled": lambda: self.compiled_layer(self.x, cache=self.cache),
            },
            "attention": {"eager": self._attention, "compiled": self.shape.compile(self._attention)},
            "cmp": {"compiled": self.shape.compile(self._compressed)},
            "select": {"compiled": self.shape.compile(self._select)},
            "slc": {"compiled": self.shape.compile(self._selected)},
            "win": {"compiled": self.shape.compile(self._window)},
        }

    def _positions(self) -> Positions:
        zero = torch.zeros_like(self.token)
        return Positions(self.token, zero, zero)

    def _window_keys(self) -> tuple[Tensor, Tensor, Positions]:
        zero = torch.zeros_like(self.token)
        positions = Positions(self.token.clamp_max(self.shape.config.window_size - 1), zero, zero)
        return self.cache.buffers["k_win"][:, :, :-1], self.cache.buffers["v_win"][:, :, :-1], positions

    def _attention(self) -> Tensor:
        k_win, v_win, window_positions = self._window_keys()
        buffers = self.cache.buffers
        out, _ = attend(
            self.attention,
            self.q,
            buffers["k_slc"],
            buffers["v_slc"],
            self.gates,
            k_cmp=buffers["k_cmp"],
            v_cmp=buffers["v_cmp"],
            k_win=k_win,
            v_win=v_win,
            positions=self._positions(),
            window_positions=window_positions,
            **self.options,
        )
        return out

    def _compressed(self) -> Tensor:
        k, v = self.cache.buffers["k_cmp"], self.cache.buffers["v_cmp"]
        return self.attention.compressed_attention(self.q, k, v, self._positions(), **self.options)[0]

    def _select(self) -> Tensor:
        k_cmp = self.cache.buffers["k_cmp"]
        return self.attention.select_blocks(self.q, k_cmp, self.lse, self._positions(), **self.options)

    def _selected(self) -> Tensor:
        k, v = self.cache.buffers["k_slc"], self.cache.buffers["v_slc"]
        return self.attention.selected_attention(self.q, k, v, self.blocks, self._positions(), **self.options)[0]

    def _window(self) -> Tensor:
        k, v, positions = self._window_keys()
        return self.attention.sliding_window_attention(self.q, k, v, positions, **self.options)[0]


class Dense:
    """A dense layer whose cache is as full as the context, so that flash SDPA needs no mask.

    ``folded`` lays the heads of a group in rows, so that each key is read once.
    """

    def __init__(self, shape: Shape, batch: int, capacity: int, *, folded: bool) -> None:
        self.shape, self.folded, self.context = shape, folded, 0
        self.layer = shape.place(DenseAttention(*shape.heads))
        self.k, self.v = shape.draw(2, batch, shape.num_kv_heads, capacity, shape.head_dim).unbind()
        self.x = shape.draw(batch, 1, shape.dim)
        self.q = shape.draw(batch, shape.num_heads, 1, shape.head_dim)
        self.token = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.project, self.w_o = shape.compile(self._project), self.layer.w_o

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.context = context
        self.token.fill_(context)

    def calls(self) -> dict[str, dict[str, Call]]:
        """What to time: SDPA is a kernel already, and what is around it in a layer is compiled."""
        return {
            "layer": {"compiled": lambda: self.w_o(self._attend(self.project()).transpose(1, 2).flatten(2))},
            "attention": {"eager": lambda: self._attend(self.q)},
        }

    def _project(self) -> Tensor:
        q, k, v = self.layer._project(self.x, self.token)
        self.k[:, :, self.token], self.v[:, :, self.token] = k, v
        return q

    def _attend(self, q: Tensor) -> Tensor:
        k, v = (x[:, :, : self.context + 1] for x in (self.k, self.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            if not self.folded:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(rows, k, v).reshape(q.shape)
