# pyright: standard, reportGeneralTypeIssues=false, reportArgumentType=false
"""Selected attention for many blocks: a program has one query, all heads of its group, and gathers its keys.

The kernels with lists store a partial output for each block of a query, which for hundreds of small blocks is far more
than the keys. Here a program reads all blocks of its query, and stores its output or, in backward, its gradient. The
gradients of keys and values still come from lists (:mod:`flexnsa.attention.triton.kernels.selected_bwd`).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import device_of, padded
from flexnsa.attention.tiles.selected import gathered_tiles
from flexnsa.attention.triton.arguments import Factors, precision, strides_of_groups
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.selected_lists import Selection
from flexnsa.attention.triton.kernels.selected_pairs import locate
from flexnsa.attention.triton.kernels.step_attend import join
from flexnsa.attention.triton.kernels.visible import capped, load_positions, through_cap


def launch_gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    of_queries: tuple[Tensor, Tensor, Tensor],
    factors: Factors,
    *,
    backward: bool,
) -> None:
    """Fill out ``(B, Hq, T, Dv)`` and the natural lse (float32, ``(B, Hq, T)``), the first two of ``of_queries``.

    Or, ``backward``, fill the third, the gradient of q, from the gradient of out and the stats of gathered rows.
    """
    kv_heads, n = k.shape[1], selection.block_indices.shape[-1]
    group, d_k, d_v = q.shape[1] // kv_heads, q.shape[-1], v.shape[-1]
    (x, _, grad_q), (scale, inner) = of_queries, factors
    tiles = gathered_tiles(device_of(q), q.dtype, d_k, d_v, group)
    groups, of_x, of_grads = (strides_of_groups(rows, kv_heads) for rows in (q, x, grad_q))
    gather[(q.shape[2], k.shape[0] * kv_heads)](
        q, k, v, selection.block_indices, *selection.positions(), *of_queries,
        *groups, *k.stride()[:3], *v.stride()[:3], *of_x, *of_grads,
        kv_heads, q.shape[2], k.shape[2], scale * (inner or 1.0), scale * LOG2_E,
        n=n, NP=padded(n), G=group, DK=d_k, DV=d_v, SIZE=selection.block_size,
        HAS_POSITIONS=selection.token is not None, BG=padded(group), BN=tiles.keys, BDK=padded(d_k), BDV=padded(d_v),
        PRECISION=precision(), INNER=inner, BACKWARD=backward, **tiles.options(),
    )  # fmt: skip


@jit(do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys"])
def gather(
    q_ptr, k_ptr, v_ptr, idx_ptr, token_ptr, start_ptr, p_sb, x_ptr, stats_ptr, dq_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, x_sb, x_sh, x_sg, x_st, g_sb, g_sh, g_sg, g_st,
    kv_heads, num_queries, num_keys, scale, qk_scale,
    n: tl.constexpr, NP: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    PRECISION: tl.constexpr, INNER: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Attend from one query to the keys of its blocks: ``x`` is its output, and ``stats`` the log-sum-exp.

    ``BACKWARD`` computes the gradient of the query; ``x`` is the gradient of the output then.
    """
    t = tl.program_id(0).to(tl.int64)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // kv_heads
    h = bh % kv_heads
    token_ptr += b * p_sb
    token, start = load_positions(token_ptr, start_ptr + b * p_sb, t, num_queries, HAS_POSITIONS)
    idx_ptr += (bh * num_queries + t) * n
    slot = tl.arange(0, NP)
    _key, _tile, listed = locate(tl.load(idx_ptr + slot, mask=slot < n, other=-1), token, start, num_keys, SIZE, False)
    g = tl.arange(0, BG)
    k_col = tl.arange(0, BDK)[None, :]
    v_col = tl.arange(0, BDV)[None, :]
    of_k = (g < G)[:, None] & (k_col < DK)
    of_v = (g < G)[:, None] & (v_col < DV)
    q = tl.load(q_ptr + b * q_sb + h * q_sh + t * q_st + g[:, None] * q_sg + k_col, mask=of_k, other=0.0)
    x_ptr += b * x_sb + h * x_sh + t * x_st + g[:, None] * x_sg + v_col
    k_ptr += b * k_sb + h * k_sh + k_col
    v_ptr += b * v_sb + h * v_sh + v_col
    if BACKWARD:
        do = tl.load(x_ptr, mask=of_v, other=0.0)
        stats_ptr += ((bh * num_queries + t) * G + g) * 2
        lse = tl.broadcast_to(tl.load(stats_ptr, mask=g < G, other=0.0)[:, None], [BG, BN])
        delta = tl.broadcast_to(tl.load(stats_ptr + 1, mask=g < G, other=0.0)[:, None], [BG, BN])
        acc = tl.zeros([BG, BDK], tl.float32)
    else:
        top = tl.full([BG], float("-inf"), tl.float32)
        total = tl.zeros([BG], tl.float32)
        acc = tl.zeros([BG, BDV], tl.float32)
    for first in range(0, tl.max(tl.where(listed, slot + 1, 0)) * SIZE, BN):
        at = first + tl.arange(0, BN)
        block = tl.load(idx_ptr + at // SIZE, mask=at < n * SIZE, other=-1)
        key, _tile_id, seen = locate(block, token, start, num_keys, SIZE, False)
        key += at % SIZE
        seen = seen & (key >= 0) & (key <= token) & (key < num_keys)
        key = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + key * k_st, mask=seen[:, None] & (k_col < DK), other=0.0)
        v = tl.load(v_ptr + key * v_st, mask=seen[:, None] & (v_col < DV), other=0.0)
        if BACKWARD:
            s = tl.dot(q, tl.trans(k), lse, input_precision=PRECISION)
            s = capped(s - lse if INNER != 0.0 else s, INNER, k.dtype)
            p = tl.where(seen[None, :], tl.exp2((s + lse if INNER != 0.0 else s) * qk_scale), 0.0)
            dp = tl.dot(do, tl.trans(v), delta, input_precision=PRECISION)
            acc = tl.dot(through_cap(p * dp, s, INNER).to(k.dtype), k, acc, input_precision=PRECISION)
        else:
            s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, k.dtype) * qk_scale
            s = tl.where(seen[None, :], s, float("-inf"))
            top, total, acc = join(s, v, top, total, acc, True, PRECISION)
    if BACKWARD:
        dq_ptr += b * g_sb + h * g_sh + t * g_st + g[:, None] * g_sg + k_col
        tl.store(dq_ptr, (acc * scale).to(dq_ptr.dtype.element_ty), mask=of_k)
    else:
        some = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * 0.6931471805599453)
        tl.store(stats_ptr + (bh * G + g) * num_queries + t, lse, mask=g < G)
        tl.store(x_ptr, (acc / some[:, None]).to(x_ptr.dtype.element_ty), mask=of_v)
