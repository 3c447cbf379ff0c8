"""A decoding step in few kernels: place, compress, dense branches, score, select, attend, merge."""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from functools import partial
from math import log2

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E, aligned
from flexnsa.attention.step import StepInputs
from flexnsa.attention.tiles.device import HOPPER, cdiv, device_of, multiprocessors, padded
from flexnsa.attention.tiles.step import StepTiles, step_tiles
from flexnsa.attention.triton.arguments import factors_of, precision
from flexnsa.attention.triton.kernels import step_attend, step_compress, step_place
from flexnsa.attention.triton.kernels.importance import Band, Scores
from flexnsa.attention.triton.kernels.top_blocks import check_width, write_top_blocks
from flexnsa.config import gated_branches, num_blocks
from flexnsa.masks.positions import Positions


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
        tokens: int32 ``(3, B, T)``: positions of the new tokens, whether they exceed the capacity, and 0.
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
    tokens: Tensor
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
    def of(cls, inputs: StepInputs, tokens: Tensor | None = None) -> StepScratch:
        """Compute the sizes, and allocate; ``tokens`` are those of a step that attends to pages."""
        batch, num_tokens = (operator.index(x) for x in inputs.q.shape[:2])
        buffers, q = inputs.buffers, inputs.q
        kv_heads = next(iter(buffers.values())).shape[1]
        group = inputs.num_heads // kv_heads
        (dk, dv), slots = inputs.dims, inputs.slots
        counts = slots.get("cmp", 0), slots.get("win", 0)
        heads, config = batch * kv_heads, inputs.config
        wide = inputs.tables is not None and device_of(q).generation >= HOPPER
        tiles = step_tiles(multiprocessors(q), q.dtype, heads, group, num_tokens, (dk, dv), counts, config, wide=wide)
        rows = tiles.cmp + tiles.slc + tiles.win, batch, inputs.num_heads, num_tokens
        width = aligned(counts[0]) if inputs.chooses and inputs.index is None else 0
        new = partial(torch.empty, dtype=torch.float32, device=q.device)
        if tokens is None:
            tokens = torch.empty(3, batch, num_tokens, dtype=torch.int32, device=q.device)
            q = q.new_empty(batch, inputs.num_heads, num_tokens, dk)
        else:
            q = q.view(batch, num_tokens, inputs.num_heads, dk).transpose(1, 2).contiguous()
        return cls(
            batch,
            num_tokens,
            kv_heads,
            group,
            dk,
            dv,
            slots,
            tiles,
            tokens=tokens,
            q=q,
            scores=new(batch, kv_heads, num_tokens, group, width),
            part=new(*rows, dv),
            top=new(rows),
            total=new(rows),
        )


WARPS = 4
"""Warps of a program that attends."""
BLOCK_J = 16
"""Blocks whose importance a program sums: few, so that there are many programs."""
SCORES = 2048
"""Scores that a warp sums in registers."""
SELECTING_WARPS = 8
"""Warps of a program that selects: more than in training, because few programs hide no latency. At 64k 7 us; with 4
warps 10 (H200, one sequence)."""
MERGED = 2048
"""Elements of partial outputs that a warp sums."""


def place(inputs: StepInputs, scratch: StepScratch) -> None:
    """Rotate queries and keys, and write keys and values to their slots."""
    q, k, v, buffers = inputs.q, inputs.k, inputs.v, inputs.buffers
    raw = "cmp" if "cmp" in k else "slc"
    rows = [q, k.get(raw, q), v.get("cmp", q), k.get("slc", q), v.get("slc", q), k.get("win", q), v.get("win", q)]
    rows = [_uniform(x) for x in rows]
    step_place.place[(scratch.batch * scratch.num_tokens, inputs.num_heads + 6 * scratch.kv_heads)](
        *rows, *(x.stride(1) for x in rows),
        inputs.lengths, inputs.lengths if inputs.new_lengths is None else inputs.new_lengths, scratch.tokens, scratch.q,
        *(buffers.get(name, q) for name in ("k_tail", "v_tail", "k_slc", "v_slc", "k_win", "v_win")),
        scratch.batch, scratch.num_tokens, inputs.max_seq_len,
        scratch.slots.get("tail", 1), scratch.slots.get("win", 1),
        *_rope(inputs), HAS_FREQUENCIES=inputs.frequencies is not None,
        HQ=inputs.num_heads, HKV=scratch.kv_heads, DK=scratch.dk, DV=scratch.dv,
        HAS_NEW_LENGTHS=inputs.new_lengths is not None, HAS_K_RAW="k_tail" in buffers, HAS_V_RAW="v_tail" in buffers,
        HAS_SLC="k_slc" in buffers, HAS_WIN="k_win" in buffers,
        BDK=padded(scratch.dk), BDV=padded(scratch.dv), HALF=padded(scratch.dk // 2, least=1),
        num_warps=1,
    )  # fmt: skip


def compress(inputs: StepInputs, scratch: StepScratch) -> None:
    """Compress the blocks that are now complete."""
    phi_k, config, buffers = inputs.phi_k, inputs.config, inputs.buffers
    if phi_k is None:
        return
    phi_v = phi_k if inputs.phi_v is None else inputs.phi_v
    makes_values = inputs.phi_v is not None
    blocks = cdiv(scratch.num_tokens, config.compress_stride)
    num_rows = scratch.batch * blocks * scratch.kv_heads
    widths = [0 if phi.weight is None else phi.weight.shape[0] for phi in (phi_k, phi_v)]
    hidden = [inputs.q.new_empty(num_rows, width) for width in widths]
    tails = [buffers["k_tail"], buffers["v_tail" if makes_values else "k_tail"]]
    sizes = {"HKV": scratch.kv_heads, "E": blocks, "DK": scratch.dk, "DV": scratch.dv, "BM": 16}
    sizes |= {"LENGTH": config.compress_block_size, "STRIDE": config.compress_stride}
    sizes |= {"K_WIDTH": widths[0], "V_WIDTH": widths[1]}
    counts = num_rows, scratch.num_tokens, scratch.slots["tail"]
    if max(widths):
        firsts = [
            x
            for tail, phi, out in zip(tails, (phi_k, phi_v), hidden, strict=True)
            for x in (tail, _or(phi.position, tail), _or(phi.weight, tail), out)
        ]
        step_compress.map_completed[(cdiv(num_rows, 16), cdiv(max(widths), 16), 1 + makes_values)](
            inputs.lengths, scratch.tokens, *firsts, *counts,
            **sizes, BN=16, BDK=padded(scratch.dk), BDV=padded(scratch.dv), PRECISION=precision(),
            num_warps=4,
        )  # fmt: skip
    caches = [buffers["k_cmp"], buffers["v_cmp" if makes_values else "k_cmp"]]
    lasts = [
        x
        for tail, phi, middle, cache in zip(tails, (phi_k, phi_v), hidden, caches, strict=True)
        for x in (tail, middle, _or(phi.out, tail), cache)
    ]
    step_compress.finish_completed[(cdiv(num_rows, 16), 1 + makes_values)](
        inputs.lengths, scratch.tokens, *lasts, *counts, scratch.slots["cmp"], *_rope(inputs),
        HAS_FREQUENCIES=inputs.frequencies is not None, K_KIND=phi_k.kind, V_KIND=phi_v.kind, **sizes,
        K_HALF=padded(cdiv(scratch.dk, 2)), V_HALF=padded(cdiv(scratch.dv, 2)), PRECISION=precision(),
        num_warps=4,
    )  # fmt: skip


def attend(inputs: StepInputs, scratch: StepScratch, out: Tensor, blocks: Tensor) -> None:
    """Attend from tokens that are stored; write the heads' outputs and the selected blocks."""
    _attend_intervals(inputs, scratch)
    if inputs.chooses:
        _select(*_score(inputs, scratch), blocks)
    elif inputs.block_indices is not None:
        blocks = inputs.block_indices.contiguous()
    if "slc" in inputs.branches:
        _attend_selected(inputs, scratch, blocks)
    _merge(inputs, scratch, out)


def _score(inputs: StepInputs, scratch: StepScratch) -> tuple[StepInputs, StepScratch]:
    """Return the step whose scores select the blocks: this one, or that of its indexer, which this stores."""
    if inputs.index is None:
        return inputs, scratch
    scorer = inputs.scorer
    of_scorer = StepScratch.of(scorer, None if scorer.tables is None else scratch.tokens)
    if scorer.tables is None:
        place(scorer, of_scorer)
        compress(scorer, of_scorer)
    _attend_intervals(scorer, of_scorer)
    return scorer, of_scorer


def _attend_intervals(inputs: StepInputs, scratch: StepScratch) -> None:
    """Attend to the compressed tokens and to the window."""
    buffers, tiles, config = inputs.buffers, scratch.tiles, inputs.config
    cmp = tiles.cmp if "k_cmp" in buffers else 0
    win = tiles.win if "k_win" in buffers else 0
    if not cmp + win:
        return
    rows = cdiv(scratch.num_tokens * scratch.group, tiles.rows)
    keys = [buffers.get(name, scratch.q) for name in ("k_cmp", "v_cmp", "k_win", "v_win")]
    scale, inner = factors_of(inputs)
    (of_cmp, cmp_rows), (of_win, win_rows) = (_pages(inputs, scratch, tag) for tag in ("cmp", "win"))
    step_attend.attend_dense[(tiles.cmp + win, scratch.batch * scratch.kv_heads, rows)](
        scratch.q, scratch.tokens, *keys, scratch.scores, scratch.part, scratch.top, scratch.total, *of_cmp, *of_win,
        scratch.heads, scratch.num_tokens, scratch.scores.shape[-1], scale * LOG2_E,
        **_dims(scratch), LENGTH=config.compress_block_size, STRIDE=config.compress_stride, WINDOW=config.window_size,
        CMP=cmp_rows, CMP_SPLITS=tiles.cmp, HAS_CMP=cmp > 0, HAS_SCORES=scratch.scores.shape[-1] > 0,
        HAS_V_CMP="v_cmp" in buffers, WIN=win_rows, WIN_SPLITS=tiles.win, BR=tiles.rows, BN=tiles.keys,
        INNER=inner, num_warps=WARPS,
    )  # fmt: skip


def _select(inputs: StepInputs, scratch: StepScratch, blocks: Tensor) -> None:
    """Choose the blocks of each query from the scores of its compressed tokens."""
    config, band = inputs.config, Band.of(inputs.config)
    width = aligned(num_blocks(inputs.max_seq_len, config))
    check_width(width)
    own = scratch.scores.new_empty(scratch.batch, scratch.kv_heads, scratch.num_tokens, width)
    passed = torch.empty_like(own) if any(band.passed) else own
    group, offsets = padded(scratch.group, least=1), padded(len(band.own), least=1)
    step_attend.importance_of_scores[(cdiv(width, BLOCK_J), scratch.batch * scratch.kv_heads * scratch.num_tokens)](
        scratch.scores, scratch.top, scratch.total, scratch.tokens, own, passed,
        scratch.heads, scratch.num_tokens, scratch.scores.shape[-1], width,
        HKV=scratch.kv_heads, G=scratch.group, **band.constants(config), FIRST=band.first, NUM_OFFSETS=len(band.own),
        SPLITS=scratch.tiles.cmp, BG=group, BP=padded(scratch.tiles.cmp, least=1), BJ=BLOCK_J, BO=offsets,
        num_warps=max(1, min(16, group * offsets * BLOCK_J // SCORES)),
    )  # fmt: skip
    scores = Scores(own, passed, scratch.num_tokens, width, band)
    positions = Positions(scratch.tokens[0], scratch.tokens[2], scratch.tokens[2])
    write_top_blocks(scores, positions, blocks, 0, config=config, num_warps=SELECTING_WARPS)


def _attend_selected(inputs: StepInputs, scratch: StepScratch, blocks: Tensor) -> None:
    tiles, config, buffers = scratch.tiles, inputs.config, inputs.buffers
    queries, rows = scratch.batch * scratch.kv_heads * scratch.num_tokens, cdiv(scratch.group, tiles.group_rows)
    (pages, sizes), (scale, inner) = _pages(inputs, scratch, "slc"), factors_of(inputs)
    step_attend.attend_selected[(tiles.slc, queries, rows)](
        scratch.q, scratch.tokens, blocks, buffers["k_slc"], buffers["v_slc"], scratch.part, scratch.top, scratch.total,
        *pages, scratch.heads, scratch.num_tokens, scratch.first_split("slc"), scale * LOG2_E,
        **_dims(scratch), SLC=sizes, BLOCK=config.select_block_size, SELECTED=config.num_selected_blocks,
        PER_PROGRAM=cdiv(config.num_selected_blocks, tiles.slc), BR=tiles.group_rows, BN=tiles.block_keys,
        INNER=inner, num_warps=WARPS, num_stages=2,
    )  # fmt: skip


def _merge(inputs: StepInputs, scratch: StepScratch, out: Tensor) -> None:
    """Add the gated branches, and add the tokens to the lengths."""
    gates, tiles = _uniform(inputs.gates), scratch.tiles
    columns = gated_branches(inputs.gate, inputs.branches)
    order = {tag: columns.index(tag) if tag in columns else len(columns) for tag in inputs.branches}
    branches: dict[str, int] = {}
    for tag, splits in (("cmp", tiles.cmp), ("slc", tiles.slc), ("win", tiles.win)):
        name = tag.upper()
        branches |= {name: scratch.first_split(tag), f"{name}_SPLITS": splits, f"{name}_GATE": order.get(tag, -1)}
    splits = tiles.cmp + tiles.win + tiles.slc
    rows = padded(splits, least=1)
    step_attend.merge[(scratch.batch * scratch.num_tokens, inputs.num_heads)](
        scratch.part, scratch.top, scratch.total, gates, scratch.tokens, inputs.lengths, inputs.reached, out,
        scratch.batch, scratch.num_tokens, gates.stride(1),
        HQ=inputs.num_heads, DV=scratch.dv, GATE=inputs.gate, COLUMNS=len(columns), SPLITS=splits, **branches,
        COUNTS=inputs.tables is None,
        BP=rows, BDV=padded(scratch.dv), num_warps=min(16, max(1, rows * padded(scratch.dv) // MERGED)),
    )  # fmt: skip


def _pages(inputs: StepInputs, scratch: StepScratch, tag: str) -> tuple[list[Tensor | int], tuple[int, int, int]]:
    """Return a branch's table, its sizes and the strides of pages, and as a constant the sizes of a page and a row."""
    pair = [inputs.buffers.get(f"{name}_{tag}", scratch.q) for name in "kv"]
    table = None if inputs.tables is None else inputs.tables.get(tag)
    where = [scratch.tokens, 0] if table is None else [table, table.stride(0)]
    of_pages: list[Tensor | int] = [*where, scratch.slots.get(tag, 1), *(x.stride(0) for x in pair)]
    return of_pages, (0 if table is None else pair[0].shape[2], pair[0].stride(2), pair[1].stride(2))


def _dims(scratch: StepScratch) -> dict[str, object]:
    dims: dict[str, object] = {"HKV": scratch.kv_heads, "G": scratch.group, "DK": scratch.dk, "DV": scratch.dv}
    return dims | {"BDK": padded(scratch.dk), "BDV": padded(scratch.dv), "PRECISION": precision()}


def _uniform(x: Tensor) -> Tensor:
    """Make the rows of ``(B, T, n)`` contiguous, with one stride over all of them."""
    apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if apart and x.stride(2) == 1 else x.contiguous()


def _rope(inputs: StepInputs) -> tuple[Tensor, float, float, float]:
    """Return the frequencies or the logarithm of their base, and the scale, for the kernel's :func:`angles`."""
    return _or(inputs.frequencies, inputs.q), *_in_two(log2(inputs.rope_base)), inputs.rope_scale


def _in_two(x: float) -> tuple[float, float]:
    """Split into two floats of 32 bits, as kernels take."""
    (high,) = struct.unpack("f", struct.pack("f", x))
    return high, x - high


def _or(x: Tensor | None, unread: Tensor) -> Tensor:
    return unread if x is None else x
