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
from flexnsa.attention import dispatch as implementations
from flexnsa.attention.dispatch import choose_implementation
from flexnsa.attention.interface import Call, Keys
from flexnsa.attention.step import StepInputs
from flexnsa.layers.indexer import SharedIndex
from flexnsa.layers.rope import apply_rope, rope_tables
from flexnsa.lm import DenseAttention
from flexnsa.masks.positions import Positions

Timed = Callable[[], object]


def place(setting: Setting, layer: nn.Module) -> Any:
    return layer.to(setting.device, setting.dtype).requires_grad_(False)


class Sparse:
    """NSA's layer of a preset, and its attention alone, at any context.

    Attention is what follows when the new token is in the cache: scores, selection, the three branches and their sum.
    A layer that ``follows`` gets random blocks of the context from the one that it follows, and selects none.
    """

    def __init__(
        self, setting: Setting, batch: int, capacity: int, preset: str = "paper", *, follows: bool = False
    ) -> None:
        self.setting = setting
        options: Any = {"config": setting.config} if preset == "paper" else {}  # the other has sizes of its own
        options["follows"] = follows
        self.layer = place(setting, NativeSparseAttention(*setting.heads, preset=preset, impl=setting.impl, **options))
        self.cache = self.layer.new_cache(batch, capacity)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.x = setting.random(batch, 1, setting.heads[0])
        self.q = setting.random(batch, setting.num_heads, 1, setting.head_dim)
        self.gates = torch.rand(batch, setting.num_heads, 1, 3, dtype=setting.dtype, device=setting.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int32, device=setting.device)
        self.implementation = choose_implementation(setting.impl, self.q, modded=False, cached=True)
        self.scale = setting.head_dim**-0.5
        self.place: Timed = lambda: None
        chosen = batch, setting.num_kv_heads, 1, self.layer.config.num_selected_blocks
        self.block_indices = torch.zeros(chosen, dtype=torch.int32, device=setting.device) if follows else None
        self.index = None if self.block_indices is None else SharedIndex(self.block_indices)

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.cache.lengths.fill_(context)
        self.token.fill_(context)
        if self.block_indices is not None:
            blocks = torch.arange(context // self.layer.config.select_block_size + 1, device=self.setting.device)
            scores = torch.rand(*self.block_indices.shape[:3], len(blocks), device=self.setting.device)
            count = min(len(blocks), self.block_indices.shape[3])
            self.block_indices.fill_(-1)[..., :count] = scores.topk(count).indices.sort().values
        self.place()

    def calls(self) -> dict[str, dict[str, Timed]]:
        """What to time, by part and mode. Kernels that take a step at once leave a compiler nothing to do."""
        if self.implementation.step is not None:
            layer = {"eager": lambda: self.layer(self.x, cache=self.cache, index=self.index)}
            return {"layer": layer, "attention": {"eager": self._attention_at_once()}}
        layer = self.setting.compile(self.layer)
        calls: dict[str, dict[str, Timed]] = {
            "layer": {"compiled": lambda: layer(self.x, cache=self.cache, index=self.index)}
        }
        if self.layer.config.index_heads is not None:
            return calls
        return calls | {"attention": {"eager": self._attention, "compiled": self.setting.compile(self._attention)}}

    def _attention_at_once(self) -> Timed:
        from flexnsa.attention.triton.kernels.step import StepScratch, attend, place

        inputs = self.layer.step_inputs(self.x, self.cache, block_indices=self.block_indices)
        scratch, results = StepScratch.of(inputs), inputs.empty_results()

        def call() -> None:
            attend(inputs, scratch, *results)

        self.place = lambda: place(inputs, scratch)
        return call

    def _attention(self) -> Tensor:
        zero, config = torch.zeros_like(self.token), self.setting.config
        window = Positions(self.token.clamp_max(config.window_size - 1), zero, zero)
        call = Call(config, self.scale, None, Positions(self.token, zero, zero), window)
        ring = {name: self.cache.buffers[name][:, :, :-1] for name in ("k_win", "v_win")}
        full = {name: self.cache.buffers[name] for name in ("k_cmp", "v_cmp", "k_slc", "v_slc")}
        gates = implementations.by_branch(self.gates)
        out, _ = implementations.attend(self.implementation, self.q, Keys(**full, **ring), gates, call)
        return out


class Paged:
    """The attention of a layer, as :class:`Sparse` has it, whose keys and values stand in pages of random order."""

    def __init__(self, like: Sparse, page_size: int) -> None:
        setting, config = like.setting, like.layer.config
        batch, _, capacity, _ = like.cache.buffers["k_slc"].shape
        pages, heads, dim = -(-capacity // page_size), setting.num_heads, setting.head_dim
        buffers: dict[str, Tensor] = {}
        tables: dict[str, Tensor] = {}
        strides = {kind: of_kind.compress_stride for kind, of_kind in config.compressed.items()}
        for kind in ("slc", "win", *strides):
            widths = [dim] * (1 if kind == "index" else 2)
            pool = setting.random(batch * pages, setting.num_kv_heads, page_size // strides.get(kind, 1), sum(widths))
            buffers |= zip((f"k_{kind}", f"v_{kind}"), pool.split(widths, -1), strict=False)
            tables[kind] = torch.randperm(batch * pages, dtype=torch.int32, device=setting.device).view(batch, -1)
        q_index = None
        if config.index_heads is not None:
            q_index = setting.random(batch, 1, setting.num_kv_heads * config.index_heads, dim)
        self.tokens = torch.zeros(3, batch, 1, dtype=torch.int32, device=setting.device)
        self.inputs = StepInputs.in_pages(
            setting.random(batch, 1, heads, dim),
            q_index,
            like.gates.transpose(1, 2),
            buffers,
            tables,
            max_seq_len=capacity - 1,
            config=config,
            scale=like.scale,
        )

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the pages."""
        self.tokens[0].fill_(context)

    def calls(self) -> dict[str, dict[str, Timed]]:
        """What to time: kernels take a step at once."""
        from flexnsa.attention.triton.kernels.step import StepScratch, attend

        scratch, results = StepScratch.of(self.inputs, self.tokens), self.inputs.empty_results()
        return {"attention": {"eager": lambda: attend(self.inputs, scratch, *results)}}


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
