# pyright: standard
"""Importance of selection blocks, from the scores that the compressed branch of a step left."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.typed import jit


@jit(do_not_specialize=["num_heads", "num_tokens", "score_width", "width"])
def importance_of_scores(
    score_ptr, top_ptr, total_ptr, where_ptr, own_ptr, passed_ptr, num_heads, num_tokens, score_width, width,
    HKV: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, RATIO: tl.constexpr,
    SPLITS: tl.constexpr, FIRST: tl.constexpr, NUM_OFFSETS: tl.constexpr, OWN: tl.constexpr, PASSED: tl.constexpr,
    HAS_PASSED: tl.constexpr, EACH_ONCE: tl.constexpr,
    BG: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of a tile of blocks over the heads of a group (NSA paper, Eq. 9 and 10).

    Writes what :func:`flexnsa.attention.triton.kernels.top_blocks.top_blocks_kernel` reads. ``EACH_ONCE`` says that the
    keys from ``RATIO * j`` to the next block's, a power of two of them, are all that count for block ``j``.
    """
    row = tl.program_id(1).to(tl.int64)  # (B, Hkv, T)
    bh = row // num_tokens
    t = row % num_tokens
    token = tl.load(where_ptr + bh // HKV * num_tokens + t)
    visible = tl.maximum(token + (1 + STRIDE - LENGTH), 0) // STRIDE
    first_block = tl.program_id(0) * BJ
    if first_block * RATIO + FIRST < visible:
        g = tl.arange(0, BG)
        block = first_block + tl.arange(0, BJ)
        scores = score_ptr + ((bh * num_tokens + t) * G + g)[:, None] * score_width
        key = first_block * RATIO + tl.arange(0, BJ * BR)
        shown = (g < G)[:, None] & (key < visible)[None, :]
        if EACH_ONCE:  # loaded before what it takes to know the sums of probabilities, and not after
            s = tl.load(scores + key[None, :], mask=shown, other=float("-inf"))
        p = tl.arange(0, BP)
        known = (g < G)[:, None] & (p < SPLITS)[None, :]
        at = (bh * G + g)[:, None] * num_tokens + t + p[None, :].to(tl.int64) * num_heads * num_tokens
        tops = tl.load(top_ptr + at, mask=known, other=float("-inf"))
        totals = tl.load(total_ptr + at, mask=known, other=0.0)
        top = tl.max(tops, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        lse = top + tl.log2(tl.sum(tl.exp2(tops - top[:, None]) * totals, 1))

        own = tl.zeros([BJ], tl.float32)
        passed = tl.zeros([BJ], tl.float32)
        if EACH_ONCE:
            share = tl.reshape(tl.sum(tl.where(shown, tl.exp2(s - lse[:, None]), 0.0), 0), [BJ, BR])
            for o in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
                of_offset = tl.sum(tl.where(tl.arange(0, BR)[None, :] == o, share, 0.0), 1)
                own += of_offset * OWN[o]
                passed += of_offset * PASSED[o]
        else:
            for o in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
                key = block * RATIO + (FIRST + o)
                shown = (g < G)[:, None] & ((key >= 0) & (key < visible))[None, :]
                s = tl.load(scores + key[None, :], mask=shown, other=float("-inf"))
                share = tl.sum(tl.where(shown, tl.exp2(s - lse[:, None]), 0.0), 0)
                own += share * OWN[o]
                passed += share * PASSED[o]
        cell = row * tl.multiple_of(width, 16) + block
        tl.store(own_ptr + cell, own, mask=block < width)
        if HAS_PASSED:
            tl.store(passed_ptr + cell, passed, mask=block < width)
