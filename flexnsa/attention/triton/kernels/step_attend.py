# pyright: standard
"""Attention of a few queries to a cache: a program processes a split of their keys, for all heads of a group.

It stores *partial outputs*: for each query and head the output over these keys only, before division by the sum of
probabilities, with that sum and the largest score (base 2). Those of the compressed branch also tell the importance of
blocks. The kernel ``merge`` joins all of them into the output of the step.
"""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible


@jit
def load_queries(q_ptr, r, num_rows, bh, num_tokens, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load rows ``r = t * G + g`` of the queries ``(B, Hq, T, D)`` of a kv head."""
    d = tl.arange(0, BD)
    at = ((bh * G + r % G) * num_tokens + r // G)[:, None] * D + d[None, :]
    return tl.load(q_ptr + at, mask=(r < num_rows)[:, None] & (d < D)[None, :], other=0.0)


@jit
def find_states(table_ptr, table_width, state, inside, bh, page_size, HKV: tl.constexpr, PAGE: tl.constexpr):
    """Return the pages of a sequence's states, and their places among the states of these pages, for a kv head.

    With ``PAGE`` states in a page, ``table (B, table_width)`` lists the pages of each sequence. Where it is 0, a
    sequence has one page, of ``page_size`` states, and there is no table.
    """
    page = bh // HKV
    place = bh % HKV * page_size + state
    if PAGE > 0:
        page = tl.load(table_ptr + page * table_width + state // PAGE, mask=inside, other=0).to(tl.int64)
        place = bh % HKV * PAGE + state % PAGE
    return page, place


@jit
def load_states(ptr, page, place, inside, page_stride, ROW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load keys or values of a buffer ``(pages, Hkv, states, ROW)``, which begin with each of its rows."""
    d = tl.arange(0, BD)
    at = (page * page_stride + place * ROW)[:, None] + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0)


@jit
def join(s, v, top, total, acc, HAS_V: tl.constexpr, PRECISION: tl.constexpr):
    """Add keys with scores ``s`` (``-inf`` where a query does not see one) to partial outputs."""
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(p, 1)
    if HAS_V:
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_top, total, acc


@jit
def store_partial(
    top, total, acc, split, r, num_rows, bh, num_heads, num_tokens, part_ptr, top_ptr, total_ptr,
    G: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Store partial outputs as ``(splits, B, Hq, T)``."""
    at = split.to(tl.int64) * num_heads * num_tokens + (bh * G + r % G) * num_tokens + r // G
    inside = r < num_rows
    tl.store(top_ptr + at, top, mask=inside)
    tl.store(total_ptr + at, total, mask=inside)
    d = tl.arange(0, BDV)
    tl.store(part_ptr + at[:, None] * DV + d[None, :], acc, mask=inside[:, None] & (d < DV)[None, :])


@jit(do_not_specialize=["num_heads", "num_tokens", "cmp_size", "win_size", "cmp_width", "win_width", "score_width"])
def attend_dense(
    q_ptr, tokens_ptr, k_cmp_ptr, v_cmp_ptr, k_win_ptr, v_win_ptr, score_ptr, part_ptr, top_ptr, total_ptr,
    cmp_table_ptr, cmp_width, cmp_size, k_cmp_stride, v_cmp_stride,
    win_table_ptr, win_width, win_size, k_win_stride, v_win_stride,
    num_heads, num_tokens, score_width, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, CMP_SPLITS: tl.constexpr, WIN_SPLITS: tl.constexpr, HAS_CMP: tl.constexpr,
    HAS_SCORES: tl.constexpr, HAS_V_CMP: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a split of the compressed tokens, whose scores are stored for the selection, or of the window.

    ``CMP`` and ``WIN`` are the states of a page, 0 without a table, and the elements of a row of keys and of values.
    """
    split = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HKV
    num_rows = num_tokens * G
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    q = load_queries(q_ptr, r, num_rows, bh, num_tokens, G, DK, BDK)
    token = tl.load(tokens_ptr + b * num_tokens + r // G, mask=r < num_rows, other=-1)
    earliest = tl.load(tokens_ptr + b * num_tokens)
    last = tl.load(tokens_ptr + b * num_tokens + num_tokens - 1)
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    n = tl.arange(0, BN)
    if HAS_CMP:
        if split < CMP_SPLITS:
            visible = count_visible(token, LENGTH, STRIDE)
            most = count_visible(last, LENGTH, STRIDE)
            chunk = tl.cdiv(tl.cdiv(most, CMP_SPLITS), BN) * BN
            # In pages a state is counted by the last token that it is made of.
            skipped = LENGTH // STRIDE - 1 if CMP[0] else 0
            scores = score_ptr + (bh * num_rows + r)[:, None] * score_width
            for first in tl.range(split * chunk, tl.minimum(split * chunk + chunk, most), BN):
                key = first + n
                inside = key < most
                page, place = find_states(
                    cmp_table_ptr, cmp_width, key + skipped, inside, bh, cmp_size + 1, HKV, CMP[0]
                )
                k = load_states(k_cmp_ptr, page, place, inside, k_cmp_stride, CMP[1], DK, BDK)
                s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, q.dtype) * scale_log2
                s = tl.where(key[None, :] < visible[:, None], s, float("-inf"))
                if HAS_SCORES:
                    tl.store(scores + key[None, :], s, mask=(r < num_rows)[:, None] & inside[None, :])
                v = k
                if HAS_V_CMP:
                    v = load_states(v_cmp_ptr, page, place, inside, v_cmp_stride, CMP[2], DV, BDV)
                top, total, acc = join(s, v, top, total, acc, HAS_V_CMP, PRECISION)
    if split >= CMP_SPLITS:
        chunk = tl.cdiv(tl.cdiv(win_size, WIN_SPLITS), BN) * BN
        start = (split - CMP_SPLITS) * chunk
        for first in tl.range(start, tl.minimum(start + chunk, win_size), BN):
            slot = first + n
            if WIN[0]:
                holds = tl.maximum(earliest - WINDOW + 1, 0) + slot
                state = holds
            else:
                # Token p is in slot p % size: a slot holds the last token that was written to it.
                age = (last - slot) % win_size
                age = tl.where(age < 0, age + win_size, age)
                holds = last - age
                state = slot
            # Mask slots of rewound tokens as before all windows; they may hold NaN, and 0 * NaN is NaN.
            inside = (slot < win_size) & (holds >= 0) & (holds > earliest - WINDOW) & (holds <= last)
            shown = inside[None, :] & (holds[None, :] <= token[:, None]) & (holds[None, :] > token[:, None] - WINDOW)
            page, place = find_states(win_table_ptr, win_width, state, inside, bh, win_size + 1, HKV, WIN[0])
            k = load_states(k_win_ptr, page, place, inside, k_win_stride, WIN[1], DK, BDK)
            s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, q.dtype) * scale_log2
            v = load_states(v_win_ptr, page, place, inside, v_win_stride, WIN[2], DV, BDV)
            top, total, acc = join(tl.where(shown, s, float("-inf")), v, top, total, acc, True, PRECISION)
    store_partial(
        top, total, acc, split, r, num_rows, bh, num_heads, num_tokens, part_ptr, top_ptr, total_ptr, G, DV, BDV
    )


@jit(do_not_specialize=["num_heads", "num_tokens", "slc_size", "width", "first_split"])
def attend_selected(
    q_ptr, tokens_ptr, blocks_ptr, k_ptr, v_ptr, part_ptr, top_ptr, total_ptr,
    table_ptr, width, slc_size, k_stride, v_stride, num_heads, num_tokens, first_split, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, PER_PROGRAM: tl.constexpr, SLC: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one query, all heads of its group, to some of the blocks that it selected; ``SLC`` is as ``CMP``."""
    bh = tl.program_id(1).to(tl.int64) // num_tokens
    t = tl.program_id(1) % num_tokens
    b = bh // HKV
    g = tl.program_id(2) * BR + tl.arange(0, BR)
    r = tl.where(g < G, t * G + g, num_tokens * G)
    q = load_queries(q_ptr, r, num_tokens * G, bh, num_tokens, G, DK, BDK)
    token = tl.load(tokens_ptr + b * num_tokens + t)
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    n = tl.arange(0, BN)
    blocks = blocks_ptr + (bh * num_tokens + t) * SELECTED
    TILES: tl.constexpr = (BLOCK + BN - 1) // BN
    # One loop without a branch: the page of the next block is looked up while this one is attended to.
    for tile in tl.range(0, PER_PROGRAM * TILES):
        i = tl.program_id(0) * PER_PROGRAM + tile // TILES
        place_in_block = tile % TILES * BN + n
        block = tl.load(blocks + i, mask=i < SELECTED, other=-1)
        key = block * BLOCK + place_in_block
        inside = (place_in_block < BLOCK) & (key >= 0) & (key <= token)
        page, place = find_states(table_ptr, width, key, inside, bh, slc_size + 1, HKV, SLC[0])
        k = load_states(k_ptr, page, place, inside, k_stride, SLC[1], DK, BDK)
        s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, q.dtype) * scale_log2
        v = load_states(v_ptr, page, place, inside, v_stride, SLC[2], DV, BDV)
        top, total, acc = join(tl.where(inside[None, :], s, float("-inf")), v, top, total, acc, True, PRECISION)
    store_partial(
        top, total, acc, first_split + tl.program_id(0), r, num_tokens * G, bh, num_heads, num_tokens,
        part_ptr, top_ptr, total_ptr, G, DV, BDV,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "num_tokens", "score_width", "width"])
def importance_of_scores(
    score_ptr, top_ptr, total_ptr, tokens_ptr, own_ptr, passed_ptr, num_heads, num_tokens, score_width, width,
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
    token = tl.load(tokens_ptr + bh // HKV * num_tokens + t)
    visible = count_visible(token, LENGTH, STRIDE)
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
    part_ptr, top_ptr, total_ptr, gate_ptr, tokens_ptr, lengths_ptr, reached_ptr, out_ptr, batch, num_tokens, gate_st,
    HQ: tl.constexpr, DV: tl.constexpr, GATE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    CMP: tl.constexpr, CMP_SPLITS: tl.constexpr, CMP_GATE: tl.constexpr,
    SLC: tl.constexpr, SLC_SPLITS: tl.constexpr, SLC_GATE: tl.constexpr,
    WIN: tl.constexpr, WIN_SPLITS: tl.constexpr, WIN_GATE: tl.constexpr, COUNTS: tl.constexpr,
    BP: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Sum the branches of a query and head, weighted by their gates; with ``COUNTS``, update the sequence's length.

    ``gate (B * T, Hq * COLUMNS)`` holds the logits of the gates, or the gates with ``none``. The gate index of a
    missing branch is -1, that of a branch without a gate ``COLUMNS``. No load depends on another: with so few programs
    latency is not hidden.
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
    lost = tl.load(tokens_ptr + batch * num_tokens + row)

    logit = logit.to(tl.float32)
    if GATE == "softmax":
        gates = tl.exp(logit - tl.max(logit, 0))
        gates = gates / tl.sum(gates, 0)
    else:
        gates = tl.where(lane < COLUMNS, logit if GATE == "none" else tl.sigmoid(logit), 1.0)
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
    if COUNTS:
        if (h == 0) & (t == num_tokens - 1):
            length = tl.load(tokens_ptr + row) + 1
            tl.store(lengths_ptr + b, length)
            tl.store(reached_ptr + b, tl.maximum(tl.load(reached_ptr + b), length))
