"""Attention of all requests that decode, at once, through their block tables; nothing waits for the device.

On a GPU the kernels of a decoding step read pages in place. Elsewhere PyTorch reads compressed and index keys page by
page, those of selected blocks block by block, and of the window the pages that it reaches into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.scoring import block_scores
from flexnsa.attention.selection import top_blocks
from flexnsa.attention.step import StepInputs
from flexnsa.attention.triton.operators import runs_kernels
from flexnsa.attention.triton.step import step_in_pages
from flexnsa.config import NSAConfig, num_blocks, num_compressed
from flexnsa.positions import Positions
from flexnsa.vllm.batch import Batch, first_state, last_tokens
from flexnsa.vllm.buffers import PagedBuffer


class PagedLayer(NamedTuple):
    """A layer as its buffers and queries see it.

    Args:
        sizes: of the branches.
        branches: of the layer, in the order of :data:`flexnsa.config.BRANCHES`.
        kinds: sizes of the compressed tokens that it keeps: ``cmp``, ``index``.
        buffers: for each of these, ``slc``, ``win``, and ``tail`` for raw keys and values.
        num_kv_heads: on this rank.
        scale: factor on the scores.
    """

    sizes: NSAConfig
    branches: tuple[str, ...]
    kinds: Mapping[str, NSAConfig]
    buffers: Mapping[str, PagedBuffer]
    num_kv_heads: int
    scale: float


class Decoding:
    """The queries of ``R`` requests with up to ``T`` new tokens each, and their ``blocks``, if those are chosen."""

    def __init__(self, layer: PagedLayer, batch: Batch, blocks: Tensor | None) -> None:
        self.layer, self.batch, self.blocks = layer, batch, blocks
        self.row, self.position = batch.decodes  # (R, T)

    def attend(self, q: Tensor, q_index: Tensor | None, gates: Tensor) -> Tensor:
        """Attend from the requests' tokens of ``q (T, Hq, Dk)``, and return theirs alone, ``(T, Hq, Dv)``."""
        if runs_kernels(q):
            return self._attend_in_pages(q, q_index, gates)
        layer, grouped = self.layer, self._group(q)
        out: dict[str, Tensor] = {}
        probs = None
        if "cmp" in layer.kinds:
            probs, values = self._score("cmp", grouped)
            if values is not None:
                out["cmp"] = (probs.to(values.dtype).flatten(2, 3) @ values).unflatten(2, grouped.shape[2:4])
        if "slc" in layer.branches:
            if q_index is not None:
                probs, _ = self._score("index", self._group(q_index))
            self.blocks = self._select(given(probs)) if self.blocks is None else self.blocks
            out["slc"] = self._attend_to_blocks(grouped, self.blocks)
        if "win" in layer.branches:
            out["win"] = self._attend_to_window(grouped)
        weights = zip(layer.branches, gates.unbind(-1), strict=True)
        terms = [out[tag] * self._group(weight[..., None]).to(out[tag].dtype) for tag, weight in weights]
        total = sum(terms[1:], terms[0])  # (R, Hkv, T, G, Dv)
        return total.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)[self.batch.decoded_rows]

    def _attend_in_pages(self, q: Tensor, q_index: Tensor | None, gates: Tensor) -> Tensor:
        layer, row = self.layer, self.row
        buffers: dict[str, Tensor] = {}
        tables: dict[str, Tensor] = {}
        for kind, buffer in layer.buffers.items():
            if kind != "tail":
                buffers |= zip((f"k_{kind}", f"v_{kind}"), buffer.kv_cache.split(buffer.widths, -1), strict=False)
                tables[kind] = given(buffer.batch).block_table[: len(row)]
        longest = 1 << (self.batch.longest_decode - 1).bit_length()  # few sizes, for few variants of kernels
        index = None if q_index is None else q_index[row]
        sizes = {"max_seq_len": longest, "config": layer.sizes, "scale": layer.scale, "block_indices": self.blocks}
        inputs = StepInputs.in_pages(q[row], index, gates[row], buffers, tables, **sizes)
        out, blocks = step_in_pages(inputs, self.batch.decoded_tokens)
        self.blocks = blocks if inputs.chooses else self.blocks
        return out.flatten(0, 1).unflatten(-1, (q.shape[1], -1))[self.batch.decoded_rows]

    def _group(self, x: Tensor) -> Tensor:
        """Return heads ``(T, H, D)`` of the requests as ``(R, Hkv, T, G, D)``."""
        return x[self.row].unflatten(2, (self.layer.num_kv_heads, -1)).transpose(1, 2)

    def _score(self, kind: str, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities of compressed keys ``(R, Hkv, T, G, N)``, and their values (Eq. 8)."""
        sizes, buffer = self.layer.kinds[kind], self.layer.buffers[kind]
        longest = self.batch.longest_decode
        count, first = num_compressed(longest, sizes), first_state(sizes)
        pages = -(-(first + count) * sizes.compress_stride // buffer.page_size)
        page = torch.arange(max(1, pages), device=q.device)
        parts = buffer.take_pages(given(buffer.batch), page.expand(len(q), -1))
        k, *v = (part[:, :, first : first + count] for part in parts)
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(dtype) * self.layer.scale).flatten(2, 3) @ k.to(dtype).mT
        last = last_tokens(torch.arange(count, device=q.device), sizes)
        hidden = (last > self.position[..., None])[:, None, :, None]
        scores = scores.unflatten(2, q.shape[2:4]).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1).masked_fill(hidden, 0), v[0] if v else None

    def _select(self, probs: Tensor) -> Tensor:
        """Choose blocks ``(R, Hkv, T, n)`` (Eq. 9 to 12)."""
        sizes, zero = self.layer.sizes.scoring, torch.zeros_like(self.position)
        count = num_blocks(self.batch.longest_decode, sizes)
        scores = block_scores(probs.sum(3).float(), None, num_blocks=count, config=sizes)
        return top_blocks(scores, Positions(self.position, zero, zero), config=sizes)

    def _attend_to_blocks(self, q: Tensor, block: Tensor) -> Tensor:
        size, buffer = self.layer.sizes.select_block_size, self.layer.buffers["slc"]
        key = (block[..., None] * size + torch.arange(size, device=q.device)).flatten(3)
        seen = (key >= 0) & (key <= self.position[:, None, :, None])
        k, v = buffer.take_blocks(given(buffer.batch), block.clamp_min(0), size)
        mask = seen[:, :, :, None].flatten(0, 1)
        out = F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=mask, scale=self.layer.scale
        )
        return out.unflatten(0, q.shape[:2])

    def _attend_to_window(self, q: Tensor) -> Tensor:
        size, buffer = self.layer.sizes.window_size, self.layer.buffers["win"]
        batch = given(buffer.batch)
        count = (size + q.shape[2] - 3 + buffer.page_size) // buffer.page_size + 1
        first = (self.position[:, :1] - size + 1).clamp_min(0) // buffer.page_size
        page = first + torch.arange(min(count, batch.block_table.shape[1]), device=q.device)
        k, v = buffer.take_pages(batch, page.clamp_max(batch.block_table.shape[1] - 1))
        key = (page[..., None] * buffer.page_size + torch.arange(buffer.page_size, device=q.device)).flatten(1)
        position = self.position[..., None]
        seen = (key[:, None] <= position) & (key[:, None] > position - size)  # (R, T, K)
        mask = seen[:, None, :, None].expand(-1, -1, -1, q.shape[3], -1).flatten(2, 3)
        out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=self.layer.scale)
        return out.unflatten(2, q.shape[2:4])
