# pyright: standard
"""The new tokens of a step: rotate their heads, and store their keys and values in the cache."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit


@jit
def angles(token, pair, frequency_ptr, base_high, base_low, scale, HAS_FREQUENCIES: tl.constexpr, D: tl.constexpr):
    """Return cosines and sines of some pairs of a head of size ``D`` at a token, times ``scale``, fp32.

    Frequencies are loaded, or computed from a base. Its ``log2`` is ``base_high + base_low``, because one fp32 number
    has too few bits. Full turns are removed in float64, so that only the fraction of a turn is rounded.
    """
    if HAS_FREQUENCIES:
        frequency = tl.load(frequency_ptr + pair, mask=pair < D // 2, other=0.0).to(tl.float64)
    else:
        share = pair.to(tl.float64) / (D // 2)
        frequency = tl.exp2(-(share * base_high + share * base_low))
    turns = token.to(tl.float64) * frequency / 6.283185307179586
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle) * scale, tl.sin(angle) * scale


@jit
def copy(source, target, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a head."""
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < D), mask=i < D)


@jit
def rotate(source, target, cos, sin, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a head, rotated by the angles of its token."""
    i = tl.arange(0, BLOCK)
    inside = i < D // 2
    first = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + i, mask=inside, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + i, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(target + D // 2 + i, (second * cos + first * sin).to(dtype), mask=inside)


@jit(do_not_specialize=["batch", "num_tokens", "max_seq_len", "tail_size", "win_size"])
def place(
    q_ptr, k_raw_ptr, v_raw_ptr, k_slc_ptr, v_slc_ptr, k_win_ptr, v_win_ptr,
    q_st, kc_st, vc_st, ks_st, vs_st, kw_st, vw_st,
    lengths_ptr, new_lengths_ptr, tokens_ptr, rotated_ptr,
    k_tail_ptr, v_tail_ptr, k_slc_cache_ptr, v_slc_cache_ptr, k_win_cache_ptr, v_win_cache_ptr,
    batch, num_tokens, max_seq_len, tail_size, win_size, frequency_ptr, base_high, base_low, rope_scale,
    HQ: tl.constexpr, HKV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HAS_NEW_LENGTHS: tl.constexpr,
    HAS_K_RAW: tl.constexpr, HAS_V_RAW: tl.constexpr, HAS_SLC: tl.constexpr, HAS_WIN: tl.constexpr,
    HAS_FREQUENCIES: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Store one head of one new token; the program of the first head also stores the token's position.

    ``tokens`` is ``(3, B, T)``: the position, whether the token exceeded the capacity, and 0.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // num_tokens
    t = row % num_tokens
    before = tl.load(lengths_ptr + b)
    end = before + num_tokens
    if HAS_NEW_LENGTHS:
        end = before + tl.load(new_lengths_ptr + b)
    after = tl.minimum(end, max_seq_len)
    position = before + t
    token = tl.minimum(position, after - 1)  # padding has the position of the last token
    h = tl.program_id(1)
    if h == 0:
        tl.store(tokens_ptr + row, token.to(tl.int32))
        tl.store(tokens_ptr + batch * num_tokens + row, ((position >= after) & (position < end)).to(tl.int32))
        tl.store(tokens_ptr + 2 * batch * num_tokens + row, 0)
    cos, sin = angles(token, tl.arange(0, HALF), frequency_ptr, base_high, base_low, rope_scale, HAS_FREQUENCIES, DK)
    if h < HQ:
        rotate(q_ptr + row * q_st + h * DK, rotated_ptr + ((b * HQ + h) * num_tokens + t) * DK, cos, sin, DK, HALF)
    elif position < after:
        part = (h - HQ) // HKV
        kv = (h - HQ) % HKV
        tail = (b * HKV + kv) * (tail_size + 1) + position % tail_size
        full = (b * HKV + kv) * (max_seq_len + 1) + position
        ring = (b * HKV + kv) * (win_size + 1) + position % win_size
        if HAS_K_RAW:
            if part == 0:
                copy(k_raw_ptr + row * kc_st + kv * DK, k_tail_ptr + tail * DK, DK, BDK)
        if HAS_V_RAW:
            if part == 1:
                copy(v_raw_ptr + row * vc_st + kv * DV, v_tail_ptr + tail * DV, DV, BDV)
        if HAS_SLC:
            if part == 2:
                rotate(k_slc_ptr + row * ks_st + kv * DK, k_slc_cache_ptr + full * DK, cos, sin, DK, HALF)
            if part == 3:
                copy(v_slc_ptr + row * vs_st + kv * DV, v_slc_cache_ptr + full * DV, DV, BDV)
        if HAS_WIN:
            if part == 4:
                rotate(k_win_ptr + row * kw_st + kv * DK, k_win_cache_ptr + ring * DK, cos, sin, DK, HALF)
            if part == 5:
                copy(v_win_ptr + row * vw_st + kv * DV, v_win_cache_ptr + ring * DV, DV, BDV)
