# pyright: standard
"""Importance of selection blocks, from the scores that the compressed branch of a step stored."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.typed import jit


@jit(do_not_specialize=["num_heads", "num_tokens", "score_width", "width"])
def importance_of_scores(
    score_ptr, top_ptr, total_ptr, where_ptr, own_ptr, passed_ptr, num_heads, num_tokens, score_width, width,
    HKV: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, RATIO: tl.constexpr,
    SPLITS: tl.constexpr, FIRST: tl.constexpr, NUM_OFFSETS: tl.constexpr, OWN: tl.constexpr, PASSED: tl.constexpr,
    HAS_PASSED: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Sum the probabilities of a tile of blocks over the heads of a group (NSA paper, Eq. 9 and 10).

    The output is the input of :func:`flexnsa.attention.triton.kernels.top_blocks.top_blocks_kernel`. Scores are loaded
    as ``(head, block, offset)``, so that a thread has whole blocks of all heads.
    """
    row = tl.program_id(1).to(tl.int64)  # (B, Hkv, T)
    bh = row // num_tokens
    t = row % num_tokens
    token = tl.load(where_ptr + bh // HKV * num_tokens + t)
    visible = tl.maximum(token + (1 + STRIDE - LENGTH), 0) // STRIDE
    first_block = tl.program_id(0) * BJ
    if first_block * RATIO + FIRST < visible:
        g = tl.arange(0, BG)
        o = tl.arange(0, BO)
        block = first_block + tl.arange(0, BJ)
        key = block[:, None] * RATIO + (FIRST + o)[None, :]
        shown = (o < NUM_OFFSETS)[None, :] & (key >= 0) & (key < visible)
        row_of_head = ((bh * num_tokens + t) * G + g)[:, None, None] * score_width
        inside = (g < G)[:, None, None] & shown[None, :, :]
        s = tl.load(score_ptr + row_of_head + key[None, :, :], mask=inside, other=float("-inf"))

        p = tl.arange(0, BP)
        known = (g < G)[:, None] & (p < SPLITS)[None, :]
        at = (bh * G + g)[:, None] * num_tokens + t + p[None, :].to(tl.int64) * num_heads * num_tokens
        tops = tl.load(top_ptr + at, mask=known, other=float("-inf"))
        totals = tl.load(total_ptr + at, mask=known, other=0.0)
        top = tl.max(tops, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(tops - top[:, None]) * totals, 1)
        lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))

        share = tl.sum(tl.exp2(s - lse[:, None, None]), 0)  # 0 for masked keys
        of_own = tl.zeros([BO], tl.float32)
        of_passed = tl.zeros([BO], tl.float32)
        for i in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
            of_own = tl.where(o == i, OWN[i] + 0.0, of_own)
            of_passed = tl.where(o == i, PASSED[i] + 0.0, of_passed)
        cell = row * tl.multiple_of(width, 16) + block
        tl.store(own_ptr + cell, tl.sum(share * of_own[None, :], 1), mask=block < width)
        if HAS_PASSED:
            tl.store(passed_ptr + cell, tl.sum(share * of_passed[None, :], 1), mask=block < width)
