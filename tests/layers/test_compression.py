"""Compressors against the loop that they stand for: block ``i`` is tokens ``[i*d, i*d+l)``, mapped alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexnsa import LinearCompressor, MeanCompressor, MLPCompressor, NSAConfig
from flexnsa.config import num_compressed
from flexnsa.layers.compression import as_phi, average_blocks, average_cached_blocks
from flexnsa.layers.joint_compression import compress_both
from tests.support.inputs import SMALL, OnGPU, Packed

CONFIGS = [
    SMALL,
    NSAConfig(compress_block_size=4, compress_stride=4, select_block_size=8, window_size=3),
    NSAConfig(compress_block_size=12, compress_stride=4, select_block_size=8, window_size=3),
]
COMPRESSORS = [MeanCompressor, LinearCompressor, MLPCompressor]

configs = pytest.mark.parametrize("config", CONFIGS, ids=["l=2d", "l=d", "l=3d"])
compressors = pytest.mark.parametrize("kind", COMPRESSORS)


def blocks(x: Tensor, config: NSAConfig) -> list[Tensor]:
    """The tokens of each compressed token, ``(B, Hkv, l, D)``."""
    size, stride = config.compress_block_size, config.compress_stride
    return [x[:, :, i * stride : i * stride + size] for i in range(num_compressed(x.shape[2], config))]


@configs
def test_mean(config: NSAConfig) -> None:
    x = torch.randn(2, 3, 41, 6, dtype=torch.float64)
    expected = torch.stack([block.mean(2) for block in blocks(x, config)], dim=2)
    torch.testing.assert_close(MeanCompressor(3, 6, config=config)(x), expected)


@configs
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 11, 12, 48, 53])
def test_kept_keys_are_averaged_as_rows_are_and_read_once(config: NSAConfig, num_tokens: int) -> None:
    """A copy of all keys, at every step, took four times as long as all else of a step."""
    x = torch.randn(2, 3, num_tokens, 6, dtype=torch.float64)
    with LargestResult(x) as largest:
        got = average_cached_blocks(x, config)
    torch.testing.assert_close(got, average_blocks(x, None, config))
    assert largest.size <= x.nbytes / config.compress_stride


class LargestResult(TorchDispatchMode):
    """Note how many bytes were allocated at once."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.source, self.size = x.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != self.source:
            self.size = max(self.size, out.untyped_storage().nbytes())
        return out


@configs
@pytest.mark.parametrize("kind", [LinearCompressor, MLPCompressor])
def test_learned_maps_add_the_position_encoding_first(
    kind: type[LinearCompressor] | type[MLPCompressor], config: NSAConfig
) -> None:
    x = torch.randn(2, 3, 41, 6, dtype=torch.float64)
    compressor = kind(3, 6, config=config).double()
    weight, position = compressor.project.weight, compressor.project.position
    expected = torch.stack([F.linear((block + position).flatten(2), weight) for block in blocks(x, config)], dim=2)
    if isinstance(compressor, MLPCompressor):
        expected = F.linear(F.silu(expected), compressor.out.weight)
    torch.testing.assert_close(compressor(x), expected)


@configs
@compressors
def test_a_compressed_token_depends_on_its_own_tokens_and_no_others(
    kind: type[MeanCompressor], config: NSAConfig
) -> None:
    compressor = kind(2, 6, config=config).double()
    x = torch.randn(1, 2, 41, 6, dtype=torch.float64, requires_grad=True)
    out = compressor(x)
    size, stride = config.compress_block_size, config.compress_stride
    for i in range(out.shape[2]):
        for head in range(2):
            touched = torch.autograd.grad(out[:, head, i].sum(), x, retain_graph=True)[0].abs().amax((0, 3)) > 0
            expected = torch.zeros(2, 41, dtype=torch.bool)
            expected[head, i * stride : i * stride + size] = True
            assert torch.equal(touched, expected)


@compressors
@pytest.mark.parametrize("seq_len", [1, 7, 8, 11, 12, 100])
def test_as_many_compressed_tokens_as_there_are_whole_blocks(kind: type[MeanCompressor], seq_len: int) -> None:
    compressor, x = kind(2, 6, config=SMALL), torch.randn(2, 2, seq_len, 6, requires_grad=True)
    out = compressor(x)
    assert out.shape == (2, 2, num_compressed(seq_len, SMALL), 6)
    gradients = torch.autograd.grad(out.square().sum(), [x, *compressor.parameters()], materialize_grads=True)
    assert all(bool(gradient.any()) == bool(out.numel()) for gradient in gradients)


@compressors
def test_a_compressor_can_begin_as_the_mean_and_learns_from_there(kind: type[MeanCompressor]) -> None:
    x = torch.randn(1, 2, 20, 16, dtype=torch.float64)
    compressor, mean = kind(2, 16, config=SMALL).double(), MeanCompressor(2, 16, config=SMALL)
    compressor.begin_as_mean()
    out = compressor(x)
    torch.testing.assert_close(out, mean(x))
    parameters = dict(compressor.named_parameters())
    if parameters:
        gradients = torch.autograd.grad(out.square().sum(), list(parameters.values()))
        assert all(gradient.any() for gradient in gradients)
        assert gradients[-1].any(0).all()  # of hidden units that the mean does not need, too
    for parameter in parameters.values():
        nn.init.constant_(parameter, torch.nan)
    compressor.reset_parameters()
    torch.testing.assert_close(compressor(x), mean(x))


def test_an_mlp_with_too_few_hidden_units_cannot_begin_as_the_mean() -> None:
    compressor = MLPCompressor(2, 16, config=SMALL, hidden_dim=31)
    before = compressor.out.weight.clone()
    with pytest.raises(ValueError, match=r"hidden_dim: expected at least 2 \* head_dim = 32 to be a mean, got 31"):
        compressor.begin_as_mean()
    assert torch.equal(compressor.out.weight, before)


class Adapted(nn.Module):
    """A map with more to it than its weight."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.position, self.weight = inner, inner.position, inner.weight

    def forward(self, x: Tensor, first_tokens: Tensor | None) -> Tensor:
        return self.inner(x, first_tokens) + 1


@configs
@pytest.mark.parametrize("kind", [LinearCompressor, MLPCompressor])
def test_keys_and_values_together_are_what_each_compressor_makes(kind: Any, config: NSAConfig) -> None:
    phi_k, phi_v = (kind(3, 6, config=config).double() for _ in range(2))
    k, v = torch.randn(2, 2, 3, 41, 6, dtype=torch.float64)
    parameters = [*phi_k.parameters(), *phi_v.parameters()]
    together = compress_both(phi_k, phi_v, k.as_subclass(OnGPU), v.as_subclass(OnGPU))
    assert together is not None
    got = [x.as_subclass(Tensor) for x in together]
    expected = [phi_k(k), phi_v(v)]
    torch.testing.assert_close(got, expected)
    upstream = [torch.randn_like(x) for x in got]
    gradients = [torch.autograd.grad(outputs, parameters, upstream) for outputs in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("other", ["kind", "hidden_dim", "config", "dtype", "hook", "of a CPU"])
def test_compressors_that_differ_are_called_each(other: str) -> None:
    phi_k, x = MLPCompressor(2, 8, config=SMALL), torch.randn(1, 2, 41, 8)
    phi_v: Any = LinearCompressor(2, 8, config=SMALL) if other == "kind" else MLPCompressor(2, 8, config=SMALL)
    if other == "hidden_dim":
        phi_v = MLPCompressor(2, 8, config=SMALL, hidden_dim=8)
    elif other == "config":
        phi_v = MLPCompressor(2, 8, config=replace(SMALL, compress_stride=SMALL.compress_block_size))
    elif other == "dtype":
        phi_v = phi_v.double()
    elif other == "hook":
        phi_v.out.register_forward_hook(lambda *_: None)
    seen = x if other == "of a CPU" else x.as_subclass(OnGPU)
    assert compress_both(phi_k, phi_v, seen, seen) is None


@pytest.mark.parametrize("kind", [LinearCompressor, MLPCompressor])
def test_a_compressor_is_its_numbers_only_where_calling_it_does_nothing_else(kind: type[nn.Module]) -> None:
    compressor: Any = kind(2, 8, config=SMALL)
    assert as_phi(compressor) is not None
    inner = compressor.project
    compressor.project = Adapted(inner)
    assert as_phi(compressor) is None
    compressor.project = inner
    inner.weight = nn.Parameter(inner.weight.detach().as_subclass(Packed))
    assert as_phi(compressor) is None
