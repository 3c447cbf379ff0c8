# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The window together with sums over the slots of the selected branch, for tiles of queries of one head.

Products of the window keep tensor cores busy, and sums keep memory busy: of the programs of a multiprocessor some do
the one while others do the other. Programs that run at a time have all heads of a group, whose rows of a slot are
neighbours in memory. ``SLOTS`` rows are loaded at a time. All chunks but the last have a multiple of ``BM`` queries.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flexnsa.attention.triton.kernels.gluon import gluon_jit
from flexnsa.attention.triton.kernels.hopper.intervals_bwd import gradient_of_queries
from flexnsa.attention.triton.kernels.hopper.intervals_fwd import attend_to_keys
from flexnsa.attention.triton.kernels.hopper.rows import store_layout


@gluon_jit(do_not_specialize=["p_sb", "g_sb", "g_sh", "kv_heads", "num_queries", "num_keys", "chunk", "index"])
def hopper_combine(
    po_ptr, pl_ptr, idx_ptr, token_ptr, start_ptr, p_sb, q_ptr, k_ptr, v_ptr, cmp_ptr, win_ptr, win_lse_ptr,
    out_ptr, lse_ptr, cmp_gate_ptr, win_gate_ptr, slc_gate_ptr, sum_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st, s_sb, s_sh, s_st, g_sb, g_sh, g_st,
    kv_heads, num_queries, num_keys, chunk, index, qk_scale,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, SIZE: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr,
    SLOTS: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Attend to the window, join partial outputs of the selected branch, and add up the three branches."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = store_layout(DV, gl.num_warps())
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    local0, b, h, g, bh = _first_query(kv_heads, G, BM)
    row0 = chunk * index + local0
    where = (token_ptr, start_ptr, start_ptr, (b * p_sb).to(gl.int32)) if HAS_POSITIONS else None
    win, win_lse = attend_to_keys(
        q_ptr + b * q_sb + (h * G + g) * q_sh, k_ptr + b * k_sb + h * k_sh, v_ptr + b * v_sb + h * v_sh, where,
        row0, q_st, k_st, v_st, num_queries, num_keys, qk_scale, DK, DV, 1, 1, WINDOW, BM, BN, INNER,
    )  # fmt: skip
    t = row0 + gl.arange(0, BM, of_rows)
    inside = t < num_queries
    at_row = (bh * G + g) * num_queries + t
    gl.store(win_lse_ptr + at_row, gl.convert_layout(win_lse, of_rows), mask=inside)
    column = gl.arange(0, DV, gl.SliceLayout(0, layout))
    to = b * o_sb + (h * G + g) * o_sh + (t.to(gl.int64) * o_st)[:, None] + column[None, :]
    win = gl.convert_layout(win.to(dtype), layout)
    gl.store(win_ptr + to, win, mask=inside[:, None])

    idx_ptr += bh * num_queries * n + t * n
    parts = bh * gl.minimum(chunk, num_queries) * n * G + g
    part = (t - chunk * index) * (n * G)
    po_ptr += parts * DV
    pl_ptr += parts
    age, start = _places(t, where, num_queries)
    top = gl.full([BM], float("-inf"), gl.float32, of_rows)
    for each in gl.static_range(n):
        listed = _is_listed(idx_ptr + each, age, start, inside, num_keys, SIZE)
        top = gl.maximum(top, gl.load(pl_ptr + part + each * G, mask=listed, other=float("-inf")))
    top = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([BM], gl.float32, of_rows)
    acc = gl.zeros([BM, DV], gl.float32, layout)
    rows = (part * DV)[:, None] + column[None, :]
    for first in range(0, n, SLOTS):
        for i in gl.static_range(SLOTS):
            slot = first + i
            listed = _is_listed(idx_ptr + slot, age, start, inside & (slot < n), num_keys, SIZE)
            share = gl.exp2(gl.load(pl_ptr + part + slot * G, mask=listed, other=float("-inf")) - top)
            row = po_ptr + slot * G * DV + rows
            o = gl.load(row, mask=listed[:, None], other=0.0, eviction_policy="evict_first")
            acc += share[:, None] * o.to(gl.float32)
            total += share
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(some)) * 0.6931471805599453)
    gl.store(lse_ptr + at_row, lse, mask=inside)
    out = (acc * (1.0 / some)[:, None]).to(dtype)
    if KEEP:
        gl.store(out_ptr + to, out, mask=inside[:, None])

    at_gate = b * g_sb + (h * G + g) * g_sh + t.to(gl.int64) * g_st
    cmp_gate = gl.load(cmp_gate_ptr + at_gate, mask=inside, other=0.0).to(gl.float32)
    win_gate = gl.load(win_gate_ptr + at_gate, mask=inside, other=0.0).to(gl.float32)
    total = cmp_gate[:, None] * gl.load(cmp_ptr + to, mask=inside[:, None], other=0.0).to(gl.float32)
    slc_gate = gl.load(slc_gate_ptr + at_gate, mask=inside, other=0.0).to(gl.float32)[:, None] if KEEP else 1.0
    total += slc_gate * out.to(gl.float32)
    # Loaded again: the loop has few registers.
    total += win_gate[:, None] * gl.load(win_ptr + to, mask=inside[:, None], other=0.0).to(gl.float32)
    to = b * s_sb + (h * G + g) * s_sh + (t.to(gl.int64) * s_st)[:, None] + column[None, :]
    gl.store(sum_ptr + to, total.to(dtype), mask=inside[:, None])


@gluon_jit(do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index"])
def hopper_sum_slots(
    part_ptr, idx_ptr, token_ptr, start_ptr, p_sb, q_ptr, k_ptr, v_ptr, stats_ptr, do_ptr, cmp_ptr, dq_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, s_sn, d_sb, d_sh, d_st, g_sb, g_sh, g_st,
    kv_heads, num_queries, num_keys, chunk, index, scale,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, SIZE: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr,
    BUFFERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of queries from the window, and add that of the slots and that of the compressed branch."""
    layout: gl.constexpr = store_layout(DK, gl.num_warps())
    local0, b, h, g, bh = _first_query(kv_heads, G, BM)
    row0 = chunk * index + local0
    where = (token_ptr, start_ptr, start_ptr, (b * p_sb).to(gl.int32)) if HAS_POSITIONS else None
    win = gradient_of_queries(
        q_ptr + b * q_sb + (h * G + g) * q_sh, k_ptr + b * k_sb + h * k_sh, v_ptr + b * v_sb + h * v_sh, where,
        stats_ptr + (bh * G + g) * num_queries, do_ptr + b * d_sb + (h * G + g) * d_sh, row0, q_st, k_st, v_st, s_sn,
        d_st, num_queries, num_keys, scale, DK, DV, 1, 1, WINDOW, BM, BN, INNER, BUFFERS,
    )  # fmt: skip
    dq = gl.convert_layout(win, layout)
    t = row0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    inside = t < num_queries
    column = gl.arange(0, DK, gl.SliceLayout(0, layout))
    to = b * g_sb + (h * G + g) * g_sh + (t.to(gl.int64) * g_st)[:, None] + column[None, :]
    idx_ptr += bh * num_queries * n + t * n
    part_ptr += (bh * gl.minimum(chunk, num_queries) * n * G + g) * DK
    rows = ((t - chunk * index) * (n * G * DK))[:, None] + column[None, :]
    age, start = _places(t, where, num_queries)
    dq += gl.load(cmp_ptr + to, mask=inside[:, None], other=0.0).to(gl.float32)
    for first in range(0, n, SLOTS):
        for i in gl.static_range(SLOTS):
            slot = first + i
            listed = _is_listed(idx_ptr + slot, age, start, inside & (slot < n), num_keys, SIZE)
            dq += gl.load(part_ptr + slot * G * DK + rows, mask=listed[:, None], other=0.0).to(gl.float32)
    gl.store(dq_ptr + to, dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@gluon_jit
def _first_query(kv_heads, G: gl.constexpr, BM: gl.constexpr):
    """Return the first query of a program in its chunk, batch element, key head, head of the group, and group."""
    bh = gl.program_id(1).to(gl.int64)
    return gl.program_id(0) // G * BM, bh // kv_heads, bh % kv_heads, gl.program_id(0) % G, bh


@gluon_jit
def _places(t, where, num_queries):
    """Return each query's position in its document, and the document's first token; past all keys where it has none."""
    start = t * 0
    if where is not None:
        token_ptr, start_ptr, _, at = where
        there = at + gl.minimum(t, num_queries - 1)
        start = gl.load(start_ptr + there)
        t = gl.load(token_ptr + there) - start
        start = gl.where(t < 0, 2147483647, start)
    return t, start


@gluon_jit
def _is_listed(idx_ptr, age, start, inside, num_keys, SIZE: gl.constexpr):
    """Return whether queries see any key of the block that they selected, as ``locate`` does; any int is safe."""
    block = gl.load(idx_ptr, mask=inside, other=-1)
    return (block >= gl.maximum(-start, 0) // SIZE) & (block <= age // SIZE) & (start + block * SIZE < num_keys)
