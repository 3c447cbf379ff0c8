"""Who decodes: NSA's layer, its attention and the parts of that, and a dense layer on SDPA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.setting import Setting
from flexnsa import NativeSparseAttention
from flexnsa.attention.implementations import attend, choose_implementation
from flexnsa.attention.seam import Call, Keys
from flexnsa.layers.rope import apply_rope, rope_tables
from flexnsa.models import DenseAttention
from flexnsa.positions import Positions

Timed = Callable[[], object]


def place(setting: Setting, layer: nn.Module) -> Any:
    """Put a layer on the device, frozen."""
    return layer.to(setting.device, setting.dtype).requires_grad_(False)


class Sparse:
    """NSA's layer, and its attention alone, at any context."""

    def __init__(self, setting: Setting, batch: int, capacity: int) -> None:
        self.setting = setting
        self.layer = place(setting, NativeSparseAttention(*setting.heads, config=setting.config, impl=setting.impl))
        self.cache = self.layer.new_cache(batch, capacity)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.x = setting.random(batch, 1, setting.heads[0])
        self.q = setting.random(batch, setting.num_heads, 1, setting.head_dim)
        self.gates = torch.rand(batch, setting.num_heads, 1, 3, dtype=setting.dtype, device=setting.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int32, device=setting.device)
        lse = torch.full((batch, setting.num_heads, 1), 8.0, device=setting.device)
        self.lse = lse if setting.impl in ("flex", "triton") else None
        chosen = setting.config.num_selected_blocks
        self.blocks = torch.zeros(batch, setting.num_kv_heads, 1, chosen, dtype=torch.int32, device=setting.device)
        self.implementation = choose_implementation(setting.impl, self.q, modded=False, cached=True)
        self.scale = setting.head_dim**-0.5
        self.compiled_layer = setting.compile(self.layer)

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.cache.lengths.fill_(context)
        self.token.fill_(context)
        last = context // self.setting.config.select_block_size
        self.blocks.copy_(torch.linspace(0, last, self.blocks.shape[-1], device=self.blocks.device))

    def calls(self) -> dict[str, dict[str, Timed]]:
        """What to time, by part and mode."""
        return {
            "layer": {
                "eager": lambda: self.layer(self.x, cache=self.cache),
                "compiled": lambda: self.compiled_layer(self.x, cache=self.cache),
            },
            "attention": {"eager": self._attention, "compiled": self.setting.compile(self._attention)},
            "cmp": {"compiled": self.setting.compile(self._compressed)},
            "select": {"compiled": self.setting.compile(self._select)},
            "slc": {"compiled": self.setting.compile(self._selected)},
            "win": {"compiled": self.setting.compile(self._window)},
        }

    def _call(self) -> Call:
        zero, config = torch.zeros_like(self.token), self.setting.config
        window = Positions(self.token.clamp_max(config.window_size - 1), zero, zero)
        return Call(config, self.scale, None, Positions(self.token, zero, zero), window)

    def _window_keys(self) -> tuple[Tensor, Tensor]:
        return self.cache.buffers["k_win"][:, :, :-1], self.cache.buffers["v_win"][:, :, :-1]

    def _attention(self) -> Tensor:
        k_win, v_win = self._window_keys()
        kept = {name: self.cache.buffers[name] for name in ("k_cmp", "v_cmp", "k_slc", "v_slc")}
        keys = Keys(**kept, k_win=k_win, v_win=v_win)
        out, _ = attend(self.implementation, self.q, keys, self.gates, self._call())
        return out

    def _compressed(self) -> Tensor:
        k, v = self.cache.buffers["k_cmp"], self.cache.buffers["v_cmp"]
        return self.implementation.compressed(self.q, k, v, self._call()).out

    def _select(self) -> Tensor:
        return self.implementation.select(self.q, self.cache.buffers["k_cmp"], self._call(), self.lse, None)

    def _selected(self) -> Tensor:
        k, v = self.cache.buffers["k_slc"], self.cache.buffers["v_slc"]
        return self.implementation.selected(self.q, k, v, self.blocks, self._call()).out

    def _window(self) -> Tensor:
        return self.implementation.window(self.q, *self._window_keys(), self._call()).out


class Dense:
    """A dense layer whose cache is as full as the context, so that flash SDPA needs no mask.

    ``folded`` lays the heads of a group in rows, so that each key is read once.
    """

    def __init__(self, setting: Setting, batch: int, capacity: int, *, folded: bool) -> None:
        self.setting, self.folded, self.context = setting, folded, 0
        self.layer = place(setting, DenseAttention(*setting.heads))
        self.k, self.v = setting.random(2, batch, setting.num_kv_heads, capacity, setting.head_dim).unbind()
        self.x = setting.random(batch, 1, setting.heads[0])
        self.q = setting.random(batch, setting.num_heads, 1, setting.head_dim)
        self.token = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self.project, self.w_o = setting.compile(self._project), self.layer.w_o

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.context = context
        self.token.fill_(context)

    def calls(self) -> dict[str, dict[str, Timed]]:
        """What to time: SDPA is a kernel already, and what is around it in a layer is compiled."""
        return {
            "layer": {"compiled": lambda: self.w_o(self._attend(self.project()).transpose(1, 2).flatten(2))},
            "attention": {"eager": lambda: self._attend(self.q)},
        }

    def _project(self) -> Tensor:
        """Put the token's key and value into the cache; give its query."""
        layer = self.layer
        q, k, v = (
            linear(self.x).unflatten(-1, (-1, self.setting.head_dim)).transpose(1, 2)
            for linear in (layer.w_q, layer.w_k, layer.w_v)
        )
        tables = rope_tables(self.token, self.setting.head_dim, layer.rope_base)
        self.k[:, :, self.token] = apply_rope(k, tables)
        self.v[:, :, self.token] = v
        return apply_rope(q, tables)

    def _attend(self, q: Tensor) -> Tensor:
        k, v = (x[:, :, : self.context + 1] for x in (self.k, self.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
            if not self.folded:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(rows, k, v).reshape(q.shape)
