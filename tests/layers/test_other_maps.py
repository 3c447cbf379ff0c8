"""Layers whose linear maps were replaced by modules of another kind, as adapters and quantizers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa import NativeSparseAttention
from flexnsa.lm.dense.attention import DenseAttention
from tests.support.inputs import SMALL

Layer = NativeSparseAttention | DenseAttention


class Wrapped(nn.Module):
    """A map around another one."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Stored(nn.Module):
    """A map without parameters that it multiplies by: one of bytes, as they are packed, and a buffer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(3, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("numbers", inner.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_buffer("numbers"))


def sparse() -> NativeSparseAttention:
    return NativeSparseAttention(32, 4, 2, 8, config=SMALL, compression="mean")


def dense() -> DenseAttention:
    return DenseAttention(32, 4, 2, 8)


def replace_maps(layer: Layer, kind: Callable[[nn.Linear], nn.Module]) -> None:
    for module in list(layer.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))


def outputs(layer: Layer, x: Tensor) -> list[Tensor]:
    """Run whole rows, packed ones, and a prompt with a step behind it."""
    cache, ids = layer.new_cache(2, 30), torch.arange(40).expand(2, -1) // 25
    cached = [layer(tokens, cache=cache) for tokens in (x[:, :20], x[:, 20:21])]  # pyright: ignore[reportArgumentType]
    return [layer(x), layer(x, document_ids=ids), *cached]


@torch.no_grad()
@pytest.mark.parametrize("kind", [Wrapped, Stored])
@pytest.mark.parametrize("make", [sparse, dense])
def test_a_map_is_asked_for_nothing_but_what_it_gives(make: Callable[[], Layer], kind: type[nn.Module]) -> None:
    layer, x = make(), torch.randn(2, 40, 32)
    expected = outputs(layer, x)
    replace_maps(layer, kind)
    assert not any(isinstance(module, nn.Linear) for module in layer.children())
    torch.testing.assert_close(outputs(layer, x), expected)
    with pytest.raises(ValueError, match=r"^x: expected shape \(B, S, 32\), got \(2, 40, 8\)"):
        layer(x[..., :8])
    with pytest.raises(ValueError, match=r"^x: expected dtype torch.float32, got torch.float64"):
        layer(x.double())


def test_a_layer_without_numbers_is_named() -> None:
    layer = sparse()
    replace_maps(layer, lambda _: nn.Identity())
    with pytest.raises(ValueError, match=r"^layer: expected a floating parameter or buffer, got none in Native"):
        layer(torch.randn(2, 40, 32))
