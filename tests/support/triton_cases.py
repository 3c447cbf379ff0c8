"""The calls of the branches with which Triton's kernels are tested."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.mods import ScoreMod, soft_cap
from tests.support.inputs import spread


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: documents packed one after the other; ``garbage`` puts into the selection what is no block.

    With a ``window_size`` it is one of the window and not of the selected branch, and with ``compressed``, the length
    and the stride of keys, one of the compressed branch. With ``gates`` it is the sum of the branches, without the
    window where this has no size; the one that is ``ungated`` has weight 1, and no bit depends on those to
    ``recompute``. ``cached`` are the rows of a cache that holds so many keys: how many tokens each has, and how many of
    its ``new`` ones are real. On Hopper the kernels named in ``hopper`` run; on a CPU they do, too
    (:mod:`tests.support.gluon`).
    """

    group: int
    dims: tuple[int, int] = (16, 16)
    documents: tuple[int, ...] = (100,)
    block_size: int = 16
    num_selected: int = 4
    batch: int = 1
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    every: int = 1
    ahead: int = 0
    order: str = "bhtd"
    missing: float = 0.1
    garbage: bool = False
    lse_only: bool = False
    rows: int = 128
    limits: tuple[tuple[str, int], ...] = ()
    scale: float | None = None
    mod: ScoreMod | None = None
    window_size: int | None = None
    compressed: tuple[int, int] | None = None
    gates: bool = False
    ungated: str | None = None
    recompute: tuple[str, ...] = ()
    cached: tuple[tuple[int, int], ...] = ()
    new: int = 0
    hopper: tuple[str, ...] = ()

    @property
    def config(self) -> NSAConfig:
        length, stride = self.compressed or (self.block_size, self.block_size)
        sizes: dict[str, Any] = {"compress_block_size": length, "compress_stride": stride}
        sizes |= {"select_block_size": self.block_size, "num_selected_blocks": self.num_selected}
        return NSAConfig(**sizes, num_init_blocks=0, num_local_blocks=0, window_size=self.window_size or 1)

    @property
    def factor(self) -> float:
        return self.dims[0] ** -0.5 if self.scale is None else self.scale

    def positions(self) -> Positions | None:
        """None if every token of one document is a query; else every so manieth token, not the first."""
        if self.cached:
            before, real = (x[:, None] for x in torch.tensor(self.cached, dtype=torch.int32).unbind(1))
            token = torch.minimum(before + torch.arange(self.new, dtype=torch.int32), before + real - 1)
            start = torch.zeros_like(token)
            if self.window_size is not None:  # its keys are the last ones before, and the new ones
                start += self.window_size - 1 - before
            return Positions(token + start, start, torch.zeros_like(token))
        if len(self.documents) == 1 and self.every == 1 and not self.ahead:
            return None
        lengths = torch.tensor(self.documents, dtype=torch.int32)
        keys = torch.tensor([num_compressed(length, self.config) for length in self.documents], dtype=torch.int32)
        start, first = ((x.cumsum(0) - x).repeat_interleave(lengths).int() for x in (lengths, keys))
        token = torch.arange(len(start), dtype=torch.int32) + self.ahead
        return Positions(*(x[self.every - 1 :: self.every][None] for x in (token, start, first)))

    def real(self, device: str) -> Tensor:
        """Which queries are no padding, bool ``(B or 1, 1, T or 1)``."""
        if not self.cached:
            return torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        return (torch.arange(self.new) < torch.tensor([[[real]] for _, real in self.cached])).to(device)

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Draw q, k, v, block_indices and the gradients of out and lse."""
        generator = torch.Generator().manual_seed(0)
        tokens = sum(self.documents)
        of_tokens = self.gates or not self.compressed
        keys = tokens if of_tokens else sum(num_compressed(x, self.config) for x in self.documents)
        where = self.positions() or Positions.of_sequence(tokens)
        queries, q_heads = where.token.shape[1], self.kv_heads * self.group

        def rand(heads: int, length: int, dim: int) -> Tensor:
            if self.order == "sliced":  # rows that are neither packed nor aligned
                x = torch.randn(self.batch, heads, length + 3, dim + 5, generator=generator)[:, :, 2:-1, 3:-2]
                return x.to(self.dtype).to(device)
            if self.order == "bthd":
                x = torch.randn(self.batch, length, heads, dim, generator=generator).to(self.dtype).to(device)
                return x.transpose(1, 2)
            x = torch.randn(self.batch, heads, length, dim, generator=generator).to(self.dtype).to(device)
            if self.order == "columns":
                return x.mT.contiguous().mT
            return spread(x) if self.order == "spread" else x

        blocks = -(-tokens // self.block_size)
        own = (where.token - where.start)[:, None, :, None] // self.block_size
        worth = torch.rand(self.batch, self.kv_heads, queries, blocks, generator=generator)
        block = torch.arange(blocks)
        worth = torch.where((block == own) & (worth < 0.9), 2.0, worth).masked_fill(block > own, -1.0)
        worth = worth.masked_fill(torch.rand(worth.shape, generator=generator) < self.missing, -1.0)
        worth[:, :, queries // 2] = -1.0
        best = worth.topk(min(self.num_selected, blocks), -1)
        chosen = torch.where(best.values < 0, blocks, best.indices).sort(-1).values
        chosen = torch.where(chosen == blocks, -1, chosen).int()
        chosen = torch.nn.functional.pad(chosen, (0, self.num_selected - chosen.shape[-1]), value=-1)
        if self.garbage:
            junk = torch.tensor([2**31 - 1, blocks + 5, -(2**31), -7, blocks - 1, 10**6])
            junk = junk[torch.randint(6, chosen.shape[:-1], generator=generator)].int()
            chosen[..., -1] = torch.where((chosen == junk[..., None]).any(-1), -1, junk)
        return {
            "q": rand(q_heads, queries, self.dims[0]),
            "k": rand(self.kv_heads, keys, self.dims[0]),
            "v": rand(self.kv_heads, keys, self.dims[1]),
            "block_indices": chosen.to(device),
            "grad_out": rand(q_heads, queries, self.dims[1]),
            "grad_lse": torch.randn(self.batch, q_heads, queries, generator=generator).to(device),
            "gates": rand(q_heads, queries, 3).sigmoid() * (rand(q_heads, queries, 3) < 1),  # some are closed
        }


def chunks(size: int, queries: int = 512, rows: int = 2048) -> tuple[tuple[str, int], ...]:
    """Limits that cut a call into chunks of a size, whose programs serve so many queries, or rows if these are more."""
    return ("CHUNK", size), ("LEAST_CHUNK", size), ("LIST_QUERIES", queries), ("LEAST_LIST_ROWS", rows)


BF16, FP16, BOTH = torch.bfloat16, torch.float16, ("cmp", "win")
gated = partial(Case, gates=True, window_size=24, compressed=(8, 4))
gathered = partial(Case, num_selected=65, block_size=2, dtype=BF16)
tiled = partial(Case, block_size=64, dims=(64, 64), dtype=BF16)
FEW_ROWS, ONE_HEAD = (("LIST_ROWS", 4),), (("WORKSPACE_BYTES", 2**18),)
ON_HOPPER = ("hopper_forward_parts", "hopper_backward_parts")
ON_HOPPER += ("hopper_forward", "hopper_backward_queries", "hopper_backward_keys")
hopper = partial(gated, block_size=64, dims=(64, 64), dtype=BF16, compressed=(16, 8), hopper=ON_HOPPER)
CASES = {
    "one-token": Case(group=4, documents=(1,), num_selected=2, missing=0),
    "g1-block-less-one": Case(group=1, documents=(15,), kv_heads=3, dims=(24, 16)),
    "g2-one-block-bf16": Case(group=2, documents=(16,), dims=(64, 64), dtype=BF16, batch=2),
    "g4-fp16": Case(group=4, documents=(33,), dims=(80, 64), dtype=FP16),
    "g6-paper-block": tiled(group=6, documents=(200,), num_selected=2),
    "g8-192-128": Case(group=8, documents=(70,), block_size=32, dims=(192, 128), num_selected=2),
    "g16-bf16": tiled(group=16, documents=(129,), dims=(128, 128), num_selected=2),
    "g32-dv24": Case(group=32, documents=(40,), dims=(96, 24)),
    "g4-256": Case(group=4, documents=(50,), dims=(256, 256), dtype=FP16, batch=2, kv_heads=2),
    "g1-long": Case(group=1, documents=(1001,), num_selected=3, block_size=48),
    "g3-block-48-holes": Case(group=3, documents=(170,), block_size=48, missing=0.5, dims=(16, 80)),
    "g5-block-128": Case(group=5, documents=(290,), block_size=128, num_selected=2),
    "more-blocks-than-there-are": Case(group=2, documents=(60,), num_selected=7, missing=0),
    "heads-of-two-tiles": Case(group=24, documents=(37,), rows=16, dims=(24, 80), dtype=BF16),
    "token-major": Case(group=2, documents=(90,), batch=2, kv_heads=2, order="bthd", dims=(32, 16)),
    "sliced-rows": Case(group=2, documents=(90,), batch=2, kv_heads=2, order="sliced", dims=(24, 80)),
    "columns": Case(group=2, documents=(90,), batch=2, kv_heads=2, order="columns", dims=(24, 80)),
    "rows-beyond-32-bits": Case(group=2, documents=(40,), batch=2, kv_heads=2, order="spread", dtype=FP16),
    "garbage": Case(group=2, documents=(90,), garbage=True, kv_heads=2),
    "negative-scale": Case(group=2, documents=(90,), scale=-0.3),
    "scale-of-zero": Case(group=2, documents=(90,), scale=0.0),
    "lse-alone": Case(group=2, documents=(60,), lse_only=True),
    "chunks-and-copies": Case(
        group=4, documents=(140,), dims=(32, 48), limits=(*chunks(64), ("LIST_ROWS", 48), ("SCRATCH_BYTES", 1))
    ),
    "one-head-at-a-time": Case(group=2, documents=(70,), batch=2, kv_heads=3, limits=ONE_HEAD),
    "one-row-at-a-time": Case(group=2, documents=(70,), batch=3, kv_heads=2, limits=(("WORKSPACE_BYTES", 2**20),)),
    "documents": Case(group=2, documents=(40, 3, 7, 50, 1, 33, 16, 30), kv_heads=2, dims=(32, 16)),
    "documents-bf16-g8": tiled(group=8, documents=(3, 70, 64, 65, 1, 40)),
    "documents-garbage-chunks": Case(
        group=6, documents=(40, 70, 5, 20), garbage=True, batch=2, limits=(*chunks(64), ("LIST_ROWS", 72))
    ),
    "some-of-the-tokens": Case(group=4, documents=(130,), every=3, batch=2),
    "some-tokens-of-documents": Case(group=1, documents=(50, 9, 64, 70), every=5, kv_heads=2, limits=FEW_ROWS),
    "cached": Case(group=4, documents=(200,), batch=3, new=70, cached=((110, 70), (0, 70), (37, 41)), kv_heads=2),
    "cached-bf16-nothing-new": Case(
        group=2, documents=(161,), batch=3, new=66, cached=((0, 0), (95, 66), (50, 1)), dims=(64, 64), dtype=BF16
    ),
    "blocks-of-4": Case(group=12, documents=(60, 3, 38), dims=(256, 256), dtype=BF16, block_size=4, num_selected=9),
    "cached-blocks-of-4": Case(
        group=2, documents=(161,), batch=3, new=3, cached=((110, 3), (0, 2), (37, 1)), block_size=4, num_selected=9
    ),
    "gathered": gathered(group=3, documents=(140,), kv_heads=2, missing=0.3, dims=(16, 40)),
    "gathered-documents": gathered(group=8, documents=(60, 3, 38), garbage=True, block_size=1, dims=(256, 256)),
    "gathered-chunks": gathered(
        group=4, documents=(90,), every=2, ahead=3, block_size=4, order="sliced", limits=(*chunks(32), *FEW_ROWS)
    ),
    "gathered-cached": gathered(group=2, documents=(161,), batch=3, new=66, cached=((95, 66), (0, 0), (50, 1))),
    "window-cached": Case(
        group=2, documents=(93,), batch=3, new=70, cached=((110, 70), (0, 70), (9, 41)), kv_heads=2, window_size=24
    ),
    "window": Case(group=3, documents=(77,), kv_heads=2, batch=2, window_size=24),
    "window-of-one": Case(group=2, documents=(40,), dims=(16, 48), window_size=1),
    "window-longer-than-all": Case(group=1, documents=(100,), dims=(24, 16), kv_heads=2, window_size=500),
    "window-rows-beyond-32-bits": Case(group=2, documents=(40,), kv_heads=2, order="spread", dtype=FP16, window_size=9),
    "window-of-tiles-bf16": Case(group=2, documents=(400,), dims=(64, 64), dtype=BF16, window_size=150),
    "window-128-fp16": Case(group=2, documents=(300,), dims=(128, 96), dtype=FP16, window_size=100, order="bthd"),
    "window-192-128": Case(group=2, documents=(90,), dims=(192, 128), window_size=33),
    "window-256": Case(group=2, documents=(90,), dims=(256, 256), dtype=BF16, window_size=33),
    "window-sliced-rows": Case(group=2, documents=(90,), batch=2, kv_heads=2, order="sliced", window_size=20),
    "window-of-whole-tiles": Case(group=2, documents=(200,), kv_heads=2, window_size=128),
    "window-a-key-short-of-tiles": Case(group=2, documents=(260,), kv_heads=2, batch=2, window_size=127),
    "window-of-parts-of-a-group": Case(group=4, documents=(260,), kv_heads=4, window_size=24),
    "window-documents-a-query-beyond-tiles": Case(group=2, documents=(150, 90), window_size=66),
    "window-negative-scale": Case(group=2, documents=(90,), window_size=24, scale=-0.3),
    "window-scale-of-zero": Case(group=2, documents=(90,), window_size=24, scale=0.0),
    "window-of-two": Case(group=1, documents=(150,), window_size=2),
    "window-columns": Case(group=2, documents=(90,), batch=2, kv_heads=2, order="columns", window_size=20),
    "window-lse-alone": Case(group=2, documents=(60,), lse_only=True, window_size=20),
    "window-beyond-all-keys": Case(group=2, documents=(150,), ahead=100, window_size=24),
    "window-documents": Case(group=2, documents=(40, 3, 7, 50, 1, 33, 16, 30), kv_heads=2, window_size=24),
    "window-some-of-the-tokens": Case(group=4, documents=(230,), every=3, batch=2, window_size=70),
    "window-some-tokens-of-documents": Case(group=1, documents=(50, 9, 64, 70), every=5, kv_heads=2, window_size=30),
    "compressed": Case(group=3, documents=(377,), kv_heads=2, batch=2, compressed=(32, 16)),
    "compressed-of-many-tiles": Case(group=1, documents=(777,), dims=(16, 48), compressed=(4, 2)),
    "compressed-without-overlap-bf16": Case(group=6, documents=(500,), dims=(64, 64), dtype=BF16, compressed=(8, 8)),
    "compressed-128-fp16": Case(group=2, documents=(400,), dims=(128, 96), dtype=FP16, order="bthd", compressed=(8, 4)),
    "compressed-shorter-than-a-key": Case(group=2, documents=(31,), compressed=(32, 16)),
    "compressed-sliced-rows": Case(group=4, documents=(190,), batch=2, order="sliced", compressed=(16, 8)),
    "compressed-lse-alone": Case(group=2, documents=(160,), lse_only=True, compressed=(8, 4)),
    "compressed-negative-scale": Case(group=2, documents=(160,), compressed=(8, 4), scale=-0.3),
    "compressed-documents": Case(group=2, documents=(40, 3, 7, 150, 1, 33, 16, 130), kv_heads=2, compressed=(8, 4)),
    "compressed-some-of-the-tokens": Case(group=4, documents=(430,), every=3, batch=2, compressed=(8, 8)),
    "compressed-some-tokens-of-documents": Case(group=1, documents=(50, 9, 164, 70), every=5, compressed=(16, 8)),
    "tiles-of-64-rows-bf16": tiled(group=6, documents=(390,), num_selected=3, batch=2, order="bthd"),
    "tiles-of-64-rows-fp16-chunks-and-copies": tiled(
        group=4, documents=(205,), dims=(128, 128), dtype=FP16, kv_heads=2, num_selected=3, limits=chunks(128, 16, 64)
    ),
    "tiles-of-64-rows-block-48": tiled(
        group=3, documents=(300,), block_size=48, dims=(64, 128), num_selected=3, missing=0.4
    ),
    "tiles-of-64-rows-group-64": tiled(group=64, documents=(70,)),
    "window-128-bf16": Case(group=4, documents=(330,), dims=(128, 128), dtype=BF16, window_size=64, order="bthd"),
    "window-64-128-longer-than-all": Case(group=2, documents=(200,), dims=(64, 128), dtype=FP16, window_size=500),
    "window-64-of-one": Case(group=1, documents=(130,), dims=(64, 64), dtype=BF16, window_size=1, batch=2),
    "compressed-128-bf16": Case(group=4, documents=(700,), dims=(128, 128), dtype=BF16, compressed=(8, 4)),
    "compressed-64-fp16": Case(
        group=3, documents=(401,), dims=(64, 64), dtype=FP16, kv_heads=2, batch=2, compressed=(32, 16), order="bthd"
    ),
    "compressed-64-one-key": Case(group=2, documents=(33,), dims=(64, 64), dtype=BF16, compressed=(32, 16)),
    "compressed-64-no-key": Case(group=2, documents=(31,), dims=(64, 64), dtype=BF16, compressed=(32, 16)),
    "gated-128-bf16": gated(
        group=4, documents=(260,), block_size=64, dims=(128, 128), dtype=BF16, window_size=70, compressed=(16, 8)
    ),
    "gated": gated(group=3, documents=(177,), kv_heads=2, batch=2),
    "gated-token-major-bf16": gated(
        group=4, documents=(150,), dims=(64, 64), dtype=BF16, order="bthd", window_size=40, compressed=(8, 8)
    ),
    "gated-but-for-selected": gated(
        group=2, documents=(90,), dims=(24, 40), window_size=20, compressed=(16, 8), ungated="slc", recompute=BOTH
    ),
    "gated-documents": gated(group=2, documents=(40, 3, 70, 1, 33), kv_heads=2, recompute=BOTH),
    "gated-one-head-at-a-time": gated(group=2, documents=(70,), batch=2, kv_heads=3, limits=ONE_HEAD),
    "gated-gathered": gated(group=2, documents=(90,), kv_heads=2, block_size=4, num_selected=65),
    "gated-without-window": gated(group=3, documents=(130,), kv_heads=2, window_size=None, recompute=("cmp",)),
    "gated-documents-without-window": gated(group=2, documents=(40, 3, 70), window_size=None),
    "gated-shorter-than-a-key": gated(group=2, documents=(31,), window_size=9, compressed=(32, 16), recompute=("win",)),
    "gated-negative-scale": gated(group=2, documents=(90,), scale=-0.3, order="sliced", recompute=BOTH),
    "hopper": hopper(
        group=3,
        documents=(290,),
        kv_heads=2,
        num_selected=3,
        window_size=20,
        garbage=True,
        recompute=BOTH,
        limits=chunks(256, 100, 200),
        hopper=(*ON_HOPPER, "hopper_combine", "hopper_sum_slots"),
    ),
    "hopper-128": hopper(
        group=4,
        documents=(260,),
        batch=2,
        block_size=40,
        dims=(128, 128),
        order="bthd",
        window_size=70,
        compressed=(8, 8),
        limits=(("WORKSPACE_BYTES", 2**20),),
        hopper=(*ON_HOPPER, "hopper_sum_slots"),
    ),
    "hopper-without-window": hopper(
        group=1, documents=(200,), num_selected=2, dims=(64, 128), dtype=FP16, window_size=None
    ),
    "hopper-window": Case(group=2, documents=(130,), dims=(64, 64), dtype=BF16, window_size=33, hopper=ON_HOPPER[2:]),
    "compressed-cached": Case(
        group=2, documents=(393,), batch=3, new=70, cached=((110, 70), (0, 70), (9, 41)), kv_heads=2, compressed=(8, 4)
    ),
}
AT_POSITIONS: dict[str, dict[str, Any]] = {
    "hopper": {"documents": (40, 3, 64, 1, 65, 90, 27)},
    "hopper-128": {"documents": (31, 32, 33, 100, 64)},
    "hopper-without-window": {"documents": (65, 128, 7)},
    "hopper-window": {"documents": (63, 67)},
}
for name in ("window-cached", "window-beyond-all-keys", "window-some-tokens-of-documents", "compressed-cached"):
    AT_POSITIONS[name] = {"dims": (64, 64), "dtype": BF16, "hopper": ON_HOPPER[2:]}
for name in ("cached", "some-tokens-of-documents", "documents-garbage-chunks"):
    AT_POSITIONS[name] = {"dims": (64, 64), "dtype": BF16, "block_size": 40, "hopper": ON_HOPPER[:2]}
CASES |= {f"{name}-at-positions": replace(CASES[name], **changes) for name, changes in AT_POSITIONS.items()}
CAPPED = (
    *("g4-fp16", "documents-bf16-g8", "negative-scale", "scale-of-zero", "gathered-documents", "window", "compressed"),
    *("g1-block-less-one", "window-of-parts-of-a-group", "gated", "gated-documents", "gated-negative-scale", "hopper"),
    *("hopper-128", "hopper-without-window", "hopper-window"),
)
CASES |= {f"{name}-capped": replace(CASES[name], mod=soft_cap(300.0 if name == "window" else 1.5)) for name in CAPPED}
