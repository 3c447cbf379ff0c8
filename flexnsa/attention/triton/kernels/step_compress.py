# pyright: standard, reportGeneralTypeIssues=false
"""Compressed tokens of the blocks that a step completes; programs without such a block return at once."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.step_place import angles
from flexnsa.attention.triton.kernels.visible import count_visible


@jit
def completed(m, lengths_ptr, tokens_ptr, num_rows, num_tokens, HKV: tl.constexpr, E: tl.constexpr,
              LENGTH: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """Return the (batch, kv head) index, the block, and whether it is complete, for rows ``m`` of ``(B, E, Hkv)``."""
    inside = m < num_rows
    b = m // (HKV * E)
    before = tl.load(lengths_ptr + b, mask=inside, other=0)
    last = tl.load(tokens_ptr + b * num_tokens + num_tokens - 1, mask=inside, other=-1)
    block = count_visible(before - 1, LENGTH, STRIDE) + m // HKV % E
    complete = inside & (block < count_visible(last, LENGTH, STRIDE))
    return (b * HKV + m % HKV).to(tl.int64), block, complete


@jit
def map_blocks(
    n0, head, block, complete, m, tail_ptr, position_ptr, weight_ptr, hidden_ptr, tail_size,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply blocks, position encoding added, by the rows from ``n0`` of the weight ``(WIDTH, l * D)``."""
    n = n0 + tl.arange(0, BN)
    d = tl.arange(0, BD)
    acc = tl.zeros([BM, BN], tl.float32)
    shift = tl.zeros([BN], tl.float32)
    for p in tl.range(0, LENGTH):
        slot = head * (tail_size + 1) + (block * STRIDE + p) % tail_size
        x = tl.load(tail_ptr + slot[:, None] * D + d[None, :], mask=complete[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(
            weight_ptr + n[:, None] * (LENGTH * D) + p * D + d[None, :],
            mask=(n < WIDTH)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        encoding = tl.load(position_ptr + p * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        shift += tl.sum(w.to(tl.float32) * encoding[None, :], 1)
    out = (acc + shift[None, :]).to(hidden_ptr.dtype.element_ty)
    inside = complete[:, None] & (n < WIDTH)[None, :]
    tl.store(hidden_ptr + m.to(tl.int64)[:, None] * WIDTH + n[None, :], out, mask=inside)


@jit(do_not_specialize=["num_rows", "num_tokens", "tail_size"])
def map_completed(
    lengths_ptr, tokens_ptr, k_tail_ptr, k_position_ptr, k_weight_ptr, k_hidden_ptr,
    v_tail_ptr, v_position_ptr, v_weight_ptr, v_hidden_ptr, num_rows, num_tokens, tail_size,
    HKV: tl.constexpr, E: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BDK: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the first projection of the compressors, of keys (third program index 0) or values (1)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head, block, complete = completed(m, lengths_ptr, tokens_ptr, num_rows, num_tokens, HKV, E, LENGTH, STRIDE)
    n0 = tl.program_id(1) * BN
    if tl.max(complete.to(tl.int32)) > 0:
        if tl.program_id(2) == 0:
            map_blocks(
                n0, head, block, complete, m, k_tail_ptr, k_position_ptr, k_weight_ptr, k_hidden_ptr, tail_size,
                LENGTH, STRIDE, DK, K_WIDTH, BM, BN, BDK, PRECISION,
            )  # fmt: skip
        else:
            map_blocks(
                n0, head, block, complete, m, v_tail_ptr, v_position_ptr, v_weight_ptr, v_hidden_ptr, tail_size,
                LENGTH, STRIDE, DV, V_WIDTH, BM, BN, BDV, PRECISION,
            )  # fmt: skip


@jit
def part_of_block(
    start, head, block, complete, m, tail_ptr, hidden_ptr, out_ptr, tail_size, KIND: tl.constexpr,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return half of the columns of compressed tokens, from ``start`` on, fp32 ``(BM, HALF)``."""
    i = start + tl.arange(0, HALF)
    inside = (tl.arange(0, HALF) < (D + 1) // 2) & (i < D)
    shown = complete[:, None] & inside[None, :]
    acc = tl.zeros([BM, HALF], tl.float32)
    if KIND == "mean":
        for p in tl.range(0, LENGTH):
            slot = head * (tail_size + 1) + (block * STRIDE + p) % tail_size
            acc += tl.load(tail_ptr + slot[:, None] * D + i[None, :], mask=shown, other=0.0).to(tl.float32)
        acc = acc / LENGTH
    elif KIND == "linear":
        acc = tl.load(hidden_ptr + m.to(tl.int64)[:, None] * WIDTH + i[None, :], mask=shown, other=0.0).to(tl.float32)
    else:
        for c in tl.range(0, WIDTH, 32):
            n = c + tl.arange(0, 32)
            known = complete[:, None] & (n < WIDTH)[None, :]
            x = tl.load(hidden_ptr + m.to(tl.int64)[:, None] * WIDTH + n[None, :], mask=known, other=0.0)
            x = (x.to(tl.float32) * tl.sigmoid(x.to(tl.float32))).to(x.dtype)
            w = tl.load(
                out_ptr + i[:, None] * WIDTH + n[None, :], mask=inside[:, None] & (n < WIDTH)[None, :], other=0.0
            )
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc, i, shown


@jit
def finish_blocks(
    head, block, complete, m, tail_ptr, hidden_ptr, out_ptr, cache_ptr, tail_size, cmp_size,
    frequency_ptr, base_high, base_low, rope_scale, HAS_FREQUENCIES: tl.constexpr, ROTATE: tl.constexpr,
    KIND: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Complete the compression, rotate keys at the position of their block's first token, and store to the cache."""
    a, i, first = part_of_block(
        0, head, block, complete, m, tail_ptr, hidden_ptr, out_ptr, tail_size, KIND,
        LENGTH, STRIDE, D, WIDTH, BM, HALF, PRECISION,
    )  # fmt: skip
    b, j, second = part_of_block(
        (D + 1) // 2, head, block, complete, m, tail_ptr, hidden_ptr, out_ptr, tail_size, KIND,
        LENGTH, STRIDE, D, WIDTH, BM, HALF, PRECISION,
    )  # fmt: skip
    dtype = cache_ptr.dtype.element_ty
    slot = (head * (cmp_size + 1) + block) * D
    if ROTATE:
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        token = (block * STRIDE)[:, None]
        pair = tl.arange(0, HALF)[None, :]
        cos, sin = angles(token, pair, frequency_ptr, base_high, base_low, rope_scale, HAS_FREQUENCIES, D)
        a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(cache_ptr + slot[:, None] + i[None, :], a.to(dtype), mask=first)
    tl.store(cache_ptr + slot[:, None] + j[None, :], b.to(dtype), mask=second)


@jit(do_not_specialize=["num_rows", "num_tokens", "tail_size", "cmp_size"])
def finish_completed(
    lengths_ptr, tokens_ptr, k_tail_ptr, k_hidden_ptr, k_out_ptr, k_cache_ptr,
    v_tail_ptr, v_hidden_ptr, v_out_ptr, v_cache_ptr,
    num_rows, num_tokens, tail_size, cmp_size, frequency_ptr, base_high, base_low, rope_scale,
    HAS_FREQUENCIES: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    HKV: tl.constexpr, E: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BM: tl.constexpr, K_HALF: tl.constexpr, V_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store compressed keys (second program index 0) or values (1) to the cache."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head, block, complete = completed(m, lengths_ptr, tokens_ptr, num_rows, num_tokens, HKV, E, LENGTH, STRIDE)
    if tl.max(complete.to(tl.int32)) > 0:
        if tl.program_id(1) == 0:
            finish_blocks(
                head, block, complete, m, k_tail_ptr, k_hidden_ptr, k_out_ptr, k_cache_ptr, tail_size, cmp_size,
                frequency_ptr, base_high, base_low, rope_scale, HAS_FREQUENCIES, True, K_KIND,
                LENGTH, STRIDE, DK, K_WIDTH, BM, K_HALF, PRECISION,
            )  # fmt: skip
        else:
            finish_blocks(
                head, block, complete, m, v_tail_ptr, v_hidden_ptr, v_out_ptr, v_cache_ptr, tail_size, cmp_size,
                frequency_ptr, base_high, base_low, rope_scale, HAS_FREQUENCIES, False, V_KIND,
                LENGTH, STRIDE, DV, V_WIDTH, BM, V_HALF, PRECISION,
            )  # fmt: skip
