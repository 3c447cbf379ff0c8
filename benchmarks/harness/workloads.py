"""Workloads: attention as a whole, of flexnsa and dense, each a function with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.harness.graphs import capture
from benchmarks.harness.setting import Setting
from flexnsa import native_sparse_attention
from flexnsa.config import num_compressed
from flexnsa.masks.intervals import Intervals, interval_block_mask
from flexnsa.masks.positions import Positions


@dataclass(frozen=True)
class Workload:
    """A function, its inputs, and those of them that backward goes to (none: it has no backward)."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    differentiate: tuple[Tensor, ...]

    def forward(self) -> Any:
        """Run once."""
        return self.function(*self.inputs)

    def backward(self, out: Any, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
        """Gradients, if there are any to be had."""
        if not self.differentiate:
            return ()
        return torch.autograd.grad(out, self.differentiate, torch.ones_like(out) if upstream is None else upstream)

    def run(self) -> None:
        """Forward, and backward if there is one."""
        self.backward(self.forward())


Maker = Callable[[Setting, int], Workload]


def captured(make: Maker) -> Maker:
    """Forward and backward of a workload as one CUDA graph, which is a single launch for the host."""

    def capture_both(setting: Setting, length: int) -> Workload:
        workload = make(setting, length)
        replay, _ = capture(workload.run)
        # The inputs stay with the graph, which reads their memory.
        return Workload(workload.name, lambda *_: replay(), workload.inputs, ())

    return capture_both


NSA_INPUTS: tuple[str, ...] = ("q", "gates", "k", "v", "k_win", "v_win", "k_cmp", "v_cmp")
"""Names of the tensors of :func:`nsa_inputs`, in their order."""


def attention_of(
    setting: Setting, compress: tuple[Callable[[Tensor], Tensor], ...] | None = None, **options: Any
) -> Callable[..., Tensor]:
    """NSA as a function of :func:`nsa_inputs`; ``compress`` makes compressed keys and values of the last two."""

    def attend(q: Tensor, gates: Tensor, *kv: Tensor) -> Any:
        k, v, k_win, v_win, k_cmp, v_cmp = kv
        if compress is not None:
            k_cmp, v_cmp = compress[0](k_cmp), compress[1](v_cmp)
        by_branch = {"k_cmp": k_cmp, "v_cmp": v_cmp, "k_win": k_win, "v_win": v_win}
        how = {"config": setting.config, "impl": setting.impl, "nonnegative_gates": True, **options}
        return native_sparse_attention(q, k, v, gates, **by_branch, **how)

    return attend


def nsa(setting: Setting, length: int, **options: Any) -> Workload:
    """Attention alone: q, the keys and values of each branch and the gates are given; options are the function's."""
    inputs = nsa_inputs(setting, length)
    return Workload("NSA", setting.compile(attention_of(setting, **options)), inputs, inputs)


def nsa_with_compression(setting: Setting, length: int) -> Workload:
    """The same, and the compressed keys and values made by MLPs."""
    phi = (setting.compressor(), setting.compressor())
    inputs = nsa_inputs(setting, length, length)
    weights = (weight for compressor in phi for weight in compressor.parameters())
    return Workload("NSA with compression", setting.compile(attention_of(setting, phi)), inputs, (*inputs, *weights))


def sdpa(name: str, backend: SDPBackend) -> Maker:
    """Dense causal attention by one backend of PyTorch."""

    def make(setting: Setting, length: int) -> Workload:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        inputs = dense_inputs(setting, length)
        return Workload(name, attend, inputs, inputs)

    return make


def dense_flex(setting: Setting, length: int) -> Workload:
    """Dense causal FlexAttention, on a mask of linear size that is made before the clock starts."""
    token = Positions.of_sequence(length, setting.device).token
    tiles = -(-length // 128)
    mask = interval_block_mask(Intervals(torch.zeros_like(token), token + 1), length, widths=(tiles, tiles))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    inputs = dense_inputs(setting, length)
    return Workload("dense Flex", setting.compile(attend), inputs, inputs)


WHOLE: dict[str, Maker] = {
    "NSA": nsa,
    "NSA with compression": nsa_with_compression,
    "cuDNN SDPA": sdpa("cuDNN SDPA", SDPBackend.CUDNN_ATTENTION),
    "flash SDPA": sdpa("flash SDPA", SDPBackend.FLASH_ATTENTION),
    "dense Flex": dense_flex,
    "math SDPA": sdpa("math SDPA", SDPBackend.MATH),
}


def dense_inputs(setting: Setting, length: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, of as many keys as queries by default."""
    keys = length if keys is None else keys
    q = setting.draw(setting.num_heads, length)
    return q, setting.draw(setting.num_kv_heads, keys), setting.draw(setting.num_kv_heads, keys)


def nsa_inputs(setting: Setting, length: int, compressed: int | None = None) -> tuple[Tensor, ...]:
    """Random q, gates, and k and v of slc, win and cmp, the last of as many tokens as compression makes by default."""
    compressed = num_compressed(length, setting.config) if compressed is None else compressed
    gates = torch.rand(1, setting.num_heads, length, 3, dtype=setting.dtype, device=setting.device, requires_grad=True)
    kv = [setting.draw(setting.num_kv_heads, n) for n in (length, length, length, length, compressed, compressed)]
    return (setting.draw(setting.num_heads, length), gates, *kv)
