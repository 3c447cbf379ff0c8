"""Sizes of a decoding step, and the memory that only its kernels use."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexnsa.attention.step import StepInputs
from flexnsa.attention.tiles.device import multiprocessors
from flexnsa.attention.tiles.step import StepTiles, step_tiles
from flexnsa.attention.triton.selection import aligned


@dataclass(frozen=True, slots=True)
class StepScratch:
    """Sizes, and the memory that only the kernels of one step use.

    Args:
        batch: ``B``.
        num_tokens: ``T``.
        kv_heads: ``Hkv``.
        group: query heads of a kv head.
        dk: of queries and keys.
        dv: of values.
        slots: tokens or compressed tokens of a sequence that each kind of buffer holds.
        tiles: how keys are divided.
        where: int32 ``(3, B, T)``: positions of the new tokens, whether they exceed the capacity, and 0.
        q: rotated, ``(B, Hq, T, Dk)``.
        scores: fp32 ``(B, Hkv, T, G, N)``, powers of two, of the compressed tokens that a query sees.
        part: fp32 ``(splits, B, Hq, T, Dv)``; the splits of all branches one after the other.
        top: fp32 ``(splits, B, Hq, T)``.
        total: fp32 ``(splits, B, Hq, T)``.
    """

    batch: int
    num_tokens: int
    kv_heads: int
    group: int
    dk: int
    dv: int
    slots: dict[str, int]
    tiles: StepTiles
    where: Tensor
    q: Tensor
    scores: Tensor
    part: Tensor
    top: Tensor
    total: Tensor

    @property
    def heads(self) -> int:
        """``B * Hq``."""
        return self.batch * self.kv_heads * self.group

    def first_split(self, tag: str) -> int:
        """Return the index of a branch's first partial output."""
        return {"cmp": 0, "win": self.tiles.cmp, "slc": self.tiles.cmp + self.tiles.win}[tag]

    @classmethod
    def of(cls, inputs: StepInputs) -> StepScratch:
        """Compute the sizes, and allocate."""
        batch, num_tokens = (operator.index(x) for x in inputs.q.shape[:2])
        buffers, q = inputs.buffers, inputs.q
        kv_heads = next(iter(buffers.values())).shape[1]
        group = inputs.num_heads // kv_heads
        dk = q.shape[2] // inputs.num_heads
        dv = next(iter(inputs.v.values())).shape[2] // kv_heads
        slots = {name.partition("_")[2]: buffer.shape[2] - 1 for name, buffer in buffers.items()}
        counts = slots.get("cmp", 0), slots.get("win", 0)
        tiles = step_tiles(
            multiprocessors(q),
            q.dtype,
            heads=batch * kv_heads,
            group=group,
            num_tokens=num_tokens,
            dims=(dk, dv),
            num_keys=counts,
            num_selected=inputs.config.num_selected_blocks,
            block_size=inputs.config.select_block_size,
        )
        rows = tiles.cmp + tiles.slc + tiles.win, batch, inputs.num_heads, num_tokens
        width = aligned(counts[0]) if "slc" in inputs.k and inputs.index is None else 0
        new = partial(torch.empty, dtype=torch.float32, device=q.device)
        return cls(
            batch,
            num_tokens,
            kv_heads,
            group,
            dk,
            dv,
            slots,
            tiles,
            where=torch.empty(3, batch, num_tokens, dtype=torch.int32, device=q.device),
            q=q.new_empty(batch, inputs.num_heads, num_tokens, dk),
            scores=new(batch, kv_heads, num_tokens, group, width),
            part=new(*rows, dv),
            top=new(rows),
            total=new(rows),
        )
