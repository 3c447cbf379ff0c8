"""Memory and time of attention over the sequence length, each point in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexnsa import NSAConfig, native_sparse_attention
from flexnsa.geometry import num_compressed

ATTENTIONS = ("math SDPA", "flash SDPA", "NSA")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 64
CONFIG = NSAConfig()


@dataclass(frozen=True, slots=True)
class Point:
    """One forward and backward pass in fp32 on one CPU core: what it took."""

    attention: str
    seq_len: int
    peak_mib: float
    saved_mib: float
    seconds: float


def measure(attention: str, seq_len: int) -> Point:
    """Run forward and backward once, in a fresh process.

    Peak is the growth of the largest resident set since before the inputs were made, so it counts inputs, outputs and
    gradients too. Saved is what autograd keeps between forward and backward, each storage once. Seconds are of
    processor time, on one thread, so that they mean the same on a busy machine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, and no thread is started before the fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_here, args=(attention, seq_len, sender))
    process.start()
    sender.close()
    try:
        return Point(attention, seq_len, *receiver.recv())
    except EOFError:
        process.join()
        raise RuntimeError(f"{attention} at S={seq_len} died with exit code {process.exitcode}") from None
    finally:
        process.join()


def _measure_here(attention: str, seq_len: int, result: Connection) -> None:
    torch.set_num_threads(1)
    _forward_backward(attention, 128)  # code and workspaces that any length needs
    before = _peak_resident_mib()
    saved, seconds = _forward_backward(attention, seq_len)
    result.send((_peak_resident_mib() - before, saved, seconds))


def _forward_backward(attention: str, seq_len: int) -> tuple[float, float]:
    torch.manual_seed(0)
    forward, inputs = _problem(attention, seq_len)
    storages: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    start = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        out = forward(*inputs)
    saved = sum(storages.values()) / 2**20
    out.backward(torch.ones_like(out))
    return saved, time.process_time() - start


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
    return {"math SDPA": _math, "flash SDPA": _flash}[attention], [q, k, v]


def _nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *others: Tensor) -> Tensor:
    k_cmp, v_cmp, k_win, v_win = others
    out = native_sparse_attention(
        q, k, v, gates, k_cmp=k_cmp, v_cmp=v_cmp, k_win=k_win, v_win=v_win, config=CONFIG, impl="sdpa"
    )
    assert isinstance(out, Tensor)
    return out


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _peak_resident_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
