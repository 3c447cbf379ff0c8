"""A decoding step over keys and values in pages, in PyTorch: all sequences at once, nothing waits for the device.

Compressed and index keys are read page by page, those of selected blocks block by block, and of the window the pages
that it reaches into. Where these are and what hides them is found once for all layers of equal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.selection import Ranking
from flexnsa.config import BRANCHES, NSAConfig


class Pages(NamedTuple):
    """Keys and values of one kind, in pages; a state holds those of one token, or of several that end with its last.

    Args:
        states: ``(pages, Hkv, states, width)``.
        table: int ``(R, P)``, the pages of each sequence.
        widths: of keys and, if there are any, values, which lie side by side.
        tokens: of a state.
    """

    states: Tensor
    table: Tensor
    widths: tuple[int, ...]
    tokens: int

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.states.shape[2] * self.tokens

    def find(self, size: int, sequence: Tensor, token: Tensor) -> Tensor:
        """Find runs of ``size`` tokens, which lie in one page, by any of their tokens ``(...,)``: ``(..., Hkv)``."""
        page_step, run_step, head_step, _, unit = self._rows_of(size)
        page = self.table[sequence, (token // self.size).clamp_max(self.table.shape[1] - 1)].to(torch.int64)
        run = page * (page_step // unit) + token % self.size // size * (run_step // unit)
        return run[..., None] + torch.arange(self.states.shape[1], device=run.device) * (head_step // unit)

    def load(self, size: int, run: Tensor) -> tuple[Tensor, ...]:
        """Load the parts ``(..., states, width)`` of runs ``(...,)`` of ``size`` tokens."""
        (*_, rows, unit), states, width = self._rows_of(size), size // self.tokens, self.states.shape[3]
        # A CPU copies rows of a table ten times as fast as entries of several indices. Rows may overlap.
        table = self.states.as_strided((rows, states * width), (unit, 1), self.states.storage_offset())
        return table.index_select(0, run.view(-1)).view(*run.shape, states, width).split_with_sizes(self.widths, -1)

    def _rows_of(self, size: int) -> tuple[int, int, int, int, int]:
        return _rows_of_runs(self.states.shape, self.states.stride(), size // self.tokens)


@lru_cache
def _rows_of_runs(shape: Sequence[int], strides: Sequence[int], states: int) -> tuple[int, int, int, int, int]:
    """Return the strides of pages, runs and heads, the number of rows, and the elements from one row to the next."""
    steps = strides[0], states * strides[2], strides[1]
    unit = gcd(*steps)
    last = sum((count - 1) * step for count, step in zip((shape[0], shape[2] // states, shape[1]), steps, strict=True))
    return *steps, last // unit + 1, unit


class PagedStep:
    """Up to ``T`` new tokens of each of ``R`` sequences, and where the keys are that they see.

    Args:
        config: of the layers.
        pages: of one of the layers, by kind: ``cmp``, ``index``, ``slc``, ``win``. The others' have equal sizes,
            strides and tables. Compressed tokens are in the page of their last token.
        position: of the new tokens, int64 ``(R, T)``.
        longest: at least the tokens of each sequence, the new ones included.
    """

    def __init__(self, config: NSAConfig, pages: Mapping[str, Pages], position: Tensor, longest: int) -> None:
        self.position, size, page_size = position, config.select_block_size, next(iter(pages.values())).size
        step, self.piece = lcm(page_size, size), gcd(page_size, size)
        token = torch.arange(-(-longest // step) * step, device=position.device)
        self.runs: dict[str, Tensor] = {}
        self.hidden: dict[str, tuple[Tensor, Tensor]] = {}
        for kind, sizes in config.compressed.items():
            if kind in pages:
                self.runs[kind] = self._find(pages[kind], page_size, token[None])
                self.hidden[kind] = self._hide(sizes, token[: len(token) // sizes.compress_stride])
        if "slc" in pages:
            runs = self._find(pages["slc"], self.piece, token[None])
            self.runs["slc"] = runs.unflatten(2, (-1, size // self.piece))  # (R, Hkv, M, pieces of a block)
            self.ranking, self.token = Ranking(position, len(token) // size, config=config.scoring), token[:size]
        if "win" in pages:
            count = (config.window_size + position.shape[1] - 3 + page_size) // page_size + 1
            first = (position[:, :1] - config.window_size + 1).clamp_min(0) // page_size * page_size
            token = first + torch.arange(count * page_size, device=first.device)
            ago = position[..., None] - token[:, None]
            self.runs["win"] = self._find(pages["win"], page_size, token)
            outside = ((ago < 0) | (ago >= config.window_size))[:, None, :, None]
            self.outside = _hiding(outside, -torch.inf)  # (R, 1, T, 1, K)

    def _find(self, pages: Pages, size: int, token: Tensor) -> Tensor:
        """Find the runs ``(R, Hkv, K)`` of ``size`` tokens that hold tokens ``(R or 1, K * size)``."""
        sequence = torch.arange(len(self.position), device=token.device)[:, None]
        return pages.find(size, sequence, token[:, ::size]).transpose(1, 2).contiguous()

    def _hide(self, sizes: NSAConfig, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what hides compressed tokens ``(R, 1, T, 1, N)``, and where a token sees none ``(R, 1, T, 1, 1)``."""
        last = (state + 1) * sizes.compress_stride - 1
        hidden = (last > self.position[..., None]) | (last < sizes.compress_block_size - 1)
        hidden = hidden[:, None, :, None]
        return _hiding(hidden, -1e30), hidden.all(-1, keepdim=True)  # a softmax over infinities alone would be NaN

    def attend(
        self,
        pages: Mapping[str, Pages],
        q: Tensor,
        q_index: Tensor | None,
        gates: Tensor,
        blocks: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the new tokens in one layer.

        Args:
            pages: of the layer.
            q: ``(R, T, Hq, Dk)``, rotated.
            q_index: ``(R, T, Hkv * H, Dk)``, if the layer has an indexer.
            gates: the weights of the branches, ``(R, T, Hq, branches)``.
            blocks: ``(R, Hkv, T, n)``, where they need not be chosen.
            scale: factor on the scores.

        Returns:
            The heads' outputs ``(R, T, Hq, Dv)``, and the blocks, in any order, if the layer has that branch.
        """
        num_heads, (q, gates) = q.shape[2], (_grouped(x, pages) for x in (q, gates))
        shape, weights = q.shape[:4], gates.split_with_sizes((1,) * gates.shape[4], -1)
        terms: dict[str, Tensor] = {}
        probs = None
        if "cmp" in pages:
            probs, values = self._score("cmp", pages["cmp"], q, scale)
            if values is not None:
                terms["cmp"] = torch.bmm(_rows(probs.to(values.dtype)), values).view(*shape, -1)
                terms["cmp"].masked_fill_(self.hidden["cmp"][1], 0)
        if "slc" in pages:
            if q_index is not None:
                probs, _ = self._score("index", pages["index"], _grouped(q_index, pages), scale)
            blocks = self.ranking.choose(given(probs).sum(3)) if blocks is None else blocks
            every, size = self.runs["slc"], len(self.token)
            runs = every.gather(2, blocks.flatten(2)[..., None].expand(-1, -1, -1, every.shape[3]))
            last = torch.sub(self.position[:, None, :, None], blocks, alpha=size)[..., None]  # that is seen of a block
            seen = (self.token <= last).view(-1, shape[2], 1, blocks.shape[3] * size)
            states = pages["slc"].load(self.piece, runs)
            terms["slc"] = _attend(q.flatten(0, 1), states, seen, scale).view(*shape, -1)
        if "win" in pages:
            outside = self.outside.expand(-1, -1, -1, shape[3], -1).flatten(2, 3).to(q.dtype)
            states = pages["win"].load(pages["win"].size, self.runs["win"])
            terms["win"] = _attend(q.flatten(2, 3), states, outside, scale).view(*shape, -1)
        first, *others = (tag for tag in BRANCHES if tag in terms)
        out = terms[first] * weights[0]  # (R, Hkv, T, G, Dv)
        for tag, weight in zip(others, weights[1:], strict=True):
            out.addcmul_(terms[tag], weight)
        return out.transpose(1, 2).reshape(shape[0], shape[2], num_heads, -1), blocks

    def _score(self, kind: str, pages: Pages, q: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities ``(R, Hkv, T, G, N)`` of compressed keys, and their values (Eq. 8)."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, *v = (_rows(part) for part in pages.load(pages.size, self.runs[kind]))
        scores = torch.bmm(_rows(q.to(dtype) * scale), k.to(dtype).mT)
        return scores.view(*q.shape[:4], -1).add_(self.hidden[kind][0]).softmax(-1), v[0] if v else None


def _grouped(x: Tensor, pages: Mapping[str, Pages]) -> Tensor:
    """Turn heads ``(R, T, H, D)`` into groups that share keys, ``(R, Hkv, T, G, D)``."""
    return x.view(*x.shape[:2], next(iter(pages.values())).states.shape[1], -1, x.shape[3]).transpose(1, 2)


def _rows(heads: Tensor) -> Tensor:
    """Turn ``(R, Hkv, T, G, D)`` into rows that share keys, ``(R * Hkv, T * G, D)``."""
    return heads.reshape(heads.shape[0] * heads.shape[1], -1, heads.shape[4])


def _attend(q: Tensor, states: tuple[Tensor, ...], seen: Tensor, scale: float) -> Tensor:
    """Attend from ``q (X, Y, rows, Dk)`` to keys and values, whose first dimensions have ``X * Y * K`` entries."""
    k, v = (part.view(*q.shape[:2], -1, part.shape[-1]) for part in states)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def _hiding(hidden: Tensor, value: float) -> Tensor:
    """Return what to add to scores: ``value`` where they are hidden, else 0."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, value)
