"""What is measured on a GPU: whole attentions, and the phases of ours, each as a function of its own inputs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from flexnsa import (
    MLPCompressor,
    NSAConfig,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from flexnsa.gating import combine
from flexnsa.geometry import num_compressed
from flexnsa.masks.intervals import Intervals, interval_block_mask
from flexnsa.masks.positions import Positions
from flexnsa.masks.selected import selected_mask
from flexnsa.selection import top_blocks


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The shape of all problems but their length; the default is that of published NSA times on an H200."""

    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    config: NSAConfig = field(default_factory=NSAConfig)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    impl: str = "flex"
    backend: str | None = "inductor"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self) | {"batch": 1, "dtype": str(self.dtype).removeprefix("torch.")}

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile as users would; with ``backend=None``, which is how CPUs are measured, leave it as it is."""
        if self.backend is None:
            return function
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend)

    def draw(self, heads: int, length: int, dim: int | None = None) -> Tensor:
        """A random leaf ``(1, heads, length, dim)``."""
        shape = (1, heads, length, self.head_dim if dim is None else dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def compressor(self) -> MLPCompressor:
        """The paper's compression."""
        return MLPCompressor(self.num_kv_heads, self.head_dim, config=self.config).to(self.device, self.dtype)


@dataclass(frozen=True)
class Contestant:
    """A function, its inputs, and those of them that backward goes to (none: it has no backward)."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    differentiate: tuple[Tensor, ...]
    compiled: bool = False


CPU = Setting(num_heads=12, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu", impl="sdpa", backend=None)
"""The attention of the ``large`` preset, eager."""

Maker = Callable[[Setting, int], Contestant]


def nsa(setting: Setting, length: int, **options: Any) -> Contestant:
    """Attention alone: q, the keys and values of each branch and the gates are given; options are the function's."""

    def attend(q: Tensor, gates: Tensor, *kv: Tensor) -> Any:
        k, v, k_win, v_win, k_cmp, v_cmp = kv
        return native_sparse_attention(
            q,
            k,
            v,
            gates,
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            k_win=k_win,
            v_win=v_win,
            config=setting.config,
            impl=setting.impl,
            **options,
        )

    inputs = _nsa_inputs(setting, length, num_compressed(length, setting.config))
    return Contestant("NSA", setting.compile(attend), inputs, inputs, compiled=True)


def nsa_with_compression(setting: Setting, length: int) -> Contestant:
    """The same, and the compressed keys and values made by MLPs."""
    phi_k, phi_v = setting.compressor(), setting.compressor()

    def attend(q: Tensor, gates: Tensor, *kv: Tensor) -> Any:
        k, v, k_win, v_win, k_cmp, v_cmp = kv
        return native_sparse_attention(
            q,
            k,
            v,
            gates,
            k_cmp=phi_k(k_cmp),
            v_cmp=phi_v(v_cmp),
            k_win=k_win,
            v_win=v_win,
            config=setting.config,
            impl=setting.impl,
        )

    inputs = _nsa_inputs(setting, length, length)
    weights = (*phi_k.parameters(), *phi_v.parameters())
    return Contestant("NSA with compression", setting.compile(attend), inputs, (*inputs, *weights), compiled=True)


def sdpa(name: str, backend: SDPBackend) -> Maker:
    """Dense causal attention by one backend of PyTorch."""

    def make(setting: Setting, length: int) -> Contestant:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        inputs = _dense_inputs(setting, length)
        return Contestant(name, attend, inputs, inputs)

    return make


def dense_flex(setting: Setting, length: int) -> Contestant:
    """Dense causal FlexAttention, on a mask of linear size that is made before the clock starts."""
    token = Positions.of_sequence(length, setting.device).token
    tiles = -(-length // 128)
    mask = interval_block_mask(Intervals(torch.zeros_like(token), token + 1), length, widths=(tiles, tiles))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    inputs = _dense_inputs(setting, length)
    return Contestant("dense Flex", setting.compile(attend), inputs, inputs, compiled=True)


def compression_phase(setting: Setting, length: int) -> Contestant:
    """Both MLPs, for keys and for values."""
    phi_k, phi_v = setting.compressor(), setting.compressor()
    inputs = (setting.draw(setting.num_kv_heads, length), setting.draw(setting.num_kv_heads, length))
    weights = (*phi_k.parameters(), *phi_v.parameters())
    call = setting.compile(lambda k, v: torch.cat((phi_k(k), phi_v(v)), -1))
    return Contestant("compress", call, inputs, (*inputs, *weights), compiled=True)


def compressed_phase(setting: Setting, length: int) -> Contestant:
    """The compressed branch."""
    inputs = _dense_inputs(setting, length, num_compressed(length, setting.config))
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v: compressed_attention(q, k, v, **options)[0])
    return Contestant("cmp branch", call, inputs, inputs, compiled=True)


def selection_phase(setting: Setting, length: int) -> Contestant:
    """Scores and top-n, the log-sum-exp of the compressed branch at hand."""
    q, k_cmp, lse = _scored(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k_cmp, lse: select_blocks(q, k_cmp, lse=lse, **options))
    return Contestant("score and select", call, (q, k_cmp, lse), (), compiled=True)


def scoring_phase(setting: Setting, length: int) -> Contestant:
    """Scores alone, chunk by chunk as the selection makes them."""
    from flexnsa.kernels.importance import Band, Scores, importance
    from flexnsa.scoring_triton import chunks

    q, k_cmp, lse = _scored(setting, length)
    config, positions, band = setting.config, Positions.of_sequence(length, setting.device), Band.of(setting.config)
    plan = list(chunks(length, setting.num_kv_heads, None, config))
    own, passed = torch.empty(
        2, max(rows * width for _, rows, width in plan) * setting.num_kv_heads, device=setting.device
    )

    def score(q: Tensor, k_cmp: Tensor, lse: Tensor) -> None:
        for first, rows, width in plan:
            scores = Scores(own, passed, rows, width, band)
            importance(q, k_cmp, lse, positions, scores, first, config=config, scale=setting.head_dim**-0.5)

    return Contestant("score", score, (q, k_cmp, lse), ())


def mask_phase(setting: Setting, length: int) -> Contestant:
    """The block mask of the selected branch, part of that branch's forward."""

    def build(block_indices: Tensor) -> list[Tensor | None]:
        selected = selected_mask(block_indices, None, length, rows=rows, config=setting.config)
        return [*selected.block_mask.as_tuple()[2:10], selected.tokens]

    rows = -(-setting.num_heads // setting.num_kv_heads // 16) * 16
    return Contestant("mask", setting.compile(build), (random_blocks(setting, length),), (), compiled=True)


def selected_phase(setting: Setting, length: int) -> Contestant:
    """The selected branch, its mask included."""
    inputs = _dense_inputs(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v, blocks: selected_attention(q, k, v, blocks, **options)[0])
    return Contestant("slc branch", call, (*inputs, random_blocks(setting, length)), inputs, compiled=True)


def fla_selected(setting: Setting, length: int) -> Contestant:
    """The selected branch of flash-linear-attention, given the same kind of blocks, in its own layout."""
    parallel_nsa = importlib.import_module("fla.ops.nsa").parallel_nsa

    inputs = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in _dense_inputs(setting, length))
    # It takes no padding: the blocks of early queries repeat their first, which it masks by count.
    blocks = random_blocks(setting, length).transpose(1, 2).contiguous()
    counts = (blocks >= 0).sum(-1)
    blocks = blocks.clamp_min(0).long()
    size = setting.config.select_block_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parallel_nsa(q, k, v, block_indices=blocks, block_counts=counts, block_size=size)

    return Contestant("fla: selected branch", attend, inputs, inputs)


def window_phase(setting: Setting, length: int) -> Contestant:
    """The sliding window."""
    inputs = _dense_inputs(setting, length)
    options = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, k, v: sliding_window_attention(q, k, v, **options)[0])
    return Contestant("win branch", call, inputs, inputs, compiled=True)


def gate_phase(setting: Setting, length: int) -> Contestant:
    """The gated sum of the branches."""
    inputs = (
        setting.draw(setting.num_heads, length, 3),
        *(setting.draw(setting.num_heads, length) for _ in range(3)),
    )
    call = setting.compile(lambda gates, c, s, w: combine(gates, {"cmp": c, "slc": s, "win": w}))
    return Contestant("gate", call, inputs, inputs, compiled=True)


WHOLE: dict[str, Maker] = {
    "NSA": nsa,
    "NSA with compression": nsa_with_compression,
    "cuDNN SDPA": sdpa("cuDNN SDPA", SDPBackend.CUDNN_ATTENTION),
    "flash SDPA": sdpa("flash SDPA", SDPBackend.FLASH_ATTENTION),
    "dense Flex": dense_flex,
    "math SDPA": sdpa("math SDPA", SDPBackend.MATH),
}
PHASES: dict[str, Maker] = {
    "compress": compression_phase,
    "cmp branch": compressed_phase,
    "score": scoring_phase,
    "score and select": selection_phase,
    "mask": mask_phase,
    "slc branch": selected_phase,
    "win branch": window_phase,
    "gate": gate_phase,
    "fla: selected branch": fla_selected,
}


def random_blocks(setting: Setting, length: int) -> Tensor:
    """Blocks as selection gives them: forced ones, the rest drawn evenly from the past."""
    config, chunk = setting.config, 4096
    blocks = -(-length // config.select_block_size)
    chosen = []
    for first in range(0, length, chunk):
        token = torch.arange(first, min(first + chunk, length), dtype=torch.int32, device=setting.device)[None]
        zero = torch.zeros_like(token)
        scores = torch.rand(1, setting.num_kv_heads, token.shape[1], blocks, device=setting.device)
        chosen.append(top_blocks(scores, Positions(token, zero, zero), config=config))
    return torch.cat(chosen, dim=2)


def _dense_inputs(setting: Setting, length: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = length if keys is None else keys
    q = setting.draw(setting.num_heads, length)
    return q, setting.draw(setting.num_kv_heads, keys), setting.draw(setting.num_kv_heads, keys)


def _nsa_inputs(setting: Setting, length: int, compressed: int) -> tuple[Tensor, ...]:
    gates = torch.rand(1, setting.num_heads, length, 3, dtype=setting.dtype, device=setting.device, requires_grad=True)
    kv = [setting.draw(setting.num_kv_heads, n) for n in (length, length, length, length, compressed, compressed)]
    return (setting.draw(setting.num_heads, length), gates, *kv)


def _scored(setting: Setting, length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k_cmp, v_cmp = (x.detach() for x in _dense_inputs(setting, length, num_compressed(length, setting.config)))
    lse = compressed_attention(q, k_cmp, v_cmp, config=setting.config, impl=setting.impl)[1]
    assert lse is not None
    return q, k_cmp, lse
