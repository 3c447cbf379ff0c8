# pyright: standard
"""Merge partial outputs into the output of a step, and update the lengths of the cache."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.typed import jit


@jit
def weights_of(p, tops, totals, gate, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return the weights of the partial outputs from ``FIRST`` to ``FIRST + COUNT``; those of the others are 0.

    A missing branch leaves its partial outputs uninitialised; they are masked, because 0 * NaN is NaN.
    """
    inside = (p >= FIRST) & (p < FIRST + COUNT)
    tops = tl.where(inside, tops, float("-inf"))
    totals = tl.where(inside, totals, 0.0)
    top = tl.max(tops, 0)
    share = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share * totals, 0)
    return share * (gate / tl.where(total == 0.0, 1.0, total))


@jit(do_not_specialize=["batch", "num_tokens", "gate_st"])
def merge(
    part_ptr, top_ptr, total_ptr, gate_ptr, where_ptr, lengths_ptr, reached_ptr, out_ptr, batch, num_tokens, gate_st,
    HQ: tl.constexpr, DV: tl.constexpr, GATE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    CMP: tl.constexpr, CMP_SPLITS: tl.constexpr, CMP_GATE: tl.constexpr,
    SLC: tl.constexpr, SLC_SPLITS: tl.constexpr, SLC_GATE: tl.constexpr,
    WIN: tl.constexpr, WIN_SPLITS: tl.constexpr, WIN_GATE: tl.constexpr,
    BP: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Sum the branches of a query and head, weighted by their gates, and update the length of the sequence.

    ``gate (B * T, Hq * COLUMNS)`` holds the logits of the gates. The gate index of a missing branch is -1, that of a
    branch without a gate ``COLUMNS``. No load depends on another: with so few programs latency is not hidden.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    b = row // num_tokens
    t = row % num_tokens
    p = tl.arange(0, BP)
    d = tl.arange(0, BDV)
    cell = p * (batch.to(tl.int64) * HQ * num_tokens) + (b * HQ + h) * num_tokens + t
    part = tl.load(
        part_ptr + cell[:, None] * DV + d[None, :], mask=(p < SPLITS)[:, None] & (d < DV)[None, :], other=0.0
    )
    tops = tl.load(top_ptr + cell, mask=p < SPLITS, other=float("-inf"))
    totals = tl.load(total_ptr + cell, mask=p < SPLITS, other=0.0)
    lane = tl.arange(0, 4)
    logit = tl.load(gate_ptr + row * gate_st + h * COLUMNS + lane, mask=lane < COLUMNS, other=float("-inf"))
    lost = tl.load(where_ptr + batch * num_tokens + row)

    logit = logit.to(tl.float32)
    if GATE == "softmax":
        gates = tl.exp(logit - tl.max(logit, 0))
        gates = gates / tl.sum(gates, 0)
    else:
        gates = tl.where(lane < COLUMNS, tl.sigmoid(logit), 1.0)
    weights = tl.zeros([BP], tl.float32)
    if CMP_GATE >= 0:
        weights += weights_of(p, tops, totals, tl.sum(tl.where(lane == CMP_GATE, gates, 0.0), 0), CMP, CMP_SPLITS)
    if SLC_GATE >= 0:
        weights += weights_of(p, tops, totals, tl.sum(tl.where(lane == SLC_GATE, gates, 0.0), 0), SLC, SLC_SPLITS)
    if WIN_GATE >= 0:
        weights += weights_of(p, tops, totals, tl.sum(tl.where(lane == WIN_GATE, gates, 0.0), 0), WIN, WIN_SPLITS)
    out = tl.sum(tl.where((weights == 0.0)[:, None], 0.0, weights[:, None] * part), 0)
    out = tl.where(lost != 0, float("nan"), out)
    tl.store(out_ptr + (row * HQ + h) * DV + d, out.to(out_ptr.dtype.element_ty), mask=d < DV)
    if (h == 0) & (t == num_tokens - 1):
        length = tl.load(where_ptr + row) + 1
        tl.store(lengths_ptr + b, length)
        tl.store(reached_ptr + b, tl.maximum(tl.load(reached_ptr + b), length))
