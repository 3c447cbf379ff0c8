"""Memory and time of attention over the sequence length, each point in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.clock import Clock
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.memory import saved_for_backward
from flexnsa import NSAConfig, native_sparse_attention
from flexnsa.config import num_compressed
from flexnsa.lm.measure.memory import MIB, peak_resident_bytes

BACKENDS = {"math SDPA": SDPBackend.MATH, "flash SDPA": SDPBackend.FLASH_ATTENTION}
ATTENTIONS = (*BACKENDS, "NSA")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 64
CONFIG = NSAConfig()


@dataclass(frozen=True, slots=True)
class Point:
    """Memory and time of one forward and backward pass in fp32 on one CPU core."""

    attention: str
    seq_len: int
    peak_mib: float
    saved_mib: float
    seconds: float


def measure(attention: str, seq_len: int) -> Point:
    """Run forward and backward once, in a fresh process.

    The peak is that of the resident set, relative to before the inputs were made, so it includes inputs, outputs and
    gradients. Saved are the storages that autograd keeps between forward and backward. Seconds are processor time on
    one thread, which depends little on other processes.
    """
    figures = run_fresh(_measure_here, attention, seq_len, seconds=3600, preload=True)
    if "label" in figures:
        raise RuntimeError(f"{attention} at S={seq_len}: {figures['label']}")
    return Point(attention, seq_len, **figures)


def _measure_here(progress: Callable[[str], object], attention: str, seq_len: int) -> dict[str, float]:
    torch.set_num_threads(1)
    progress("warming up")
    _forward_backward(attention, 128)  # loads code and workspaces that any length needs
    before = peak_resident_bytes()
    progress("forward and backward")
    saved, seconds = _forward_backward(attention, seq_len)
    return {"peak_mib": (peak_resident_bytes() - before) / MIB, "saved_mib": saved / MIB, "seconds": seconds}


def _forward_backward(attention: str, seq_len: int) -> tuple[int, float]:
    """Return the bytes saved for backward, and seconds."""
    torch.manual_seed(0)
    forward, inputs = _problem(attention, seq_len)
    clock = Clock("thread")
    start = clock.start()
    with saved_for_backward([]) as saved:
        out = forward(*inputs)
    saved_bytes = saved.total
    out.backward(torch.ones_like(out))
    return saved_bytes, clock.since(start) / 1e3


def _problem(attention: str, seq_len: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    def leaf(heads: int, length: int, dim: int = HEAD_DIM) -> Tensor:
        return torch.randn(1, heads, length, dim, requires_grad=True)

    q = leaf(NUM_HEADS, seq_len)
    k, v = leaf(NUM_KV_HEADS, seq_len), leaf(NUM_KV_HEADS, seq_len)
    if attention == "NSA":
        length = num_compressed(seq_len, CONFIG)
        compressed = [leaf(NUM_KV_HEADS, length), leaf(NUM_KV_HEADS, length)]
        window = [leaf(NUM_KV_HEADS, seq_len), leaf(NUM_KV_HEADS, seq_len)]
        return _nsa, [q, k, v, leaf(NUM_HEADS, seq_len, 3), *compressed, *window]
    return partial(_sdpa, BACKENDS[attention]), [q, k, v]


def _nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *others: Tensor) -> Tensor:
    k_cmp, v_cmp, k_win, v_win = others
    return native_sparse_attention(
        q, k, v, gates, k_cmp=k_cmp, v_cmp=v_cmp, k_win=k_win, v_win=v_win, config=CONFIG, impl="sdpa"
    )


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
