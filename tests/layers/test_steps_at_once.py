"""Which steps go to the kernels that take a whole one, and which go branch by branch as they did before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS
from flexnsa.attention.plan import STEP_TOKENS
from flexnsa.attention.step import StepInputs
from flexnsa.cache.steps import ReadCounter
from flexnsa.layers.compression import LinearCompressor
from flexnsa.layers.gating import Gate

CONFIG = NSAConfig(compress_block_size=4, compress_stride=2, select_block_size=4, num_selected_blocks=3, window_size=5)
DIM = 16


class TakenAtOnceError(Exception):
    """The layer chose the kernels of a whole step."""


class Layer(NativeSparseAttention):
    def step_inputs(self, *_: Any, **__: Any) -> StepInputs:
        raise TakenAtOnceError


@pytest.fixture(autouse=True)
def kernels_of_whole_steps() -> Iterator[None]:
    implementation = CACHED_IMPLEMENTATIONS["sdpa"]
    with mock.patch.dict(CACHED_IMPLEMENTATIONS, sdpa=replace(implementation, step=mock.Mock())), torch.no_grad():
        yield


def step(layer: Layer, *, tokens: int = 1, max_rewind: int = 8, reads: ReadCounter | None = None) -> Tensor:
    """Read a prompt, which is longer than any step, and then some tokens."""
    cache = layer.new_cache(2, 40, max_rewind=max_rewind)
    x = torch.randn(2, 12 + tokens, DIM, dtype=layer.get_parameter("w_q.weight").dtype)
    layer(x[:, :12], cache=cache)
    cache.reads = reads
    return layer(x[:, 12:], cache=cache)


def plain_layer(**options: Any) -> Layer:
    return Layer(DIM, 4, 2, 8, config=CONFIG, impl="sdpa", **options)


@pytest.mark.parametrize("tokens", [1, 2, STEP_TOKENS])
@pytest.mark.parametrize("compression", ["mlp", "linear", "mean"])
def test_few_tokens_of_a_plain_layer_go_at_once(compression: str, tokens: int) -> None:
    with pytest.raises(TakenAtOnceError):
        step(plain_layer(compression=compression), tokens=tokens)


@pytest.mark.parametrize(("tokens", "max_rewind"), [(2, 1), (4, 3), (STEP_TOKENS + 1, 16)])
def test_tokens_that_would_overwrite_what_the_first_of_them_sees_do_not(tokens: int, max_rewind: int) -> None:
    assert step(plain_layer(), tokens=tokens, max_rewind=max_rewind).isfinite().all()


def _bias(layer: Layer) -> None:
    layer.w_q = nn.Linear(DIM, layer.w_q.out_features)


def _map_of_a_subclass(layer: Layer) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (PyTorch's name)
            return 2 * super().forward(input)

    layer.w_k_slc = Scaled(DIM, 2 * 8, bias=False)


def _gate_of_a_subclass(layer: Layer) -> None:
    class Open(Gate):
        def forward(self, x: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
            return {tag: torch.ones_like(gate) for tag, gate in super().forward(x, logits).items()}

    layer.gate.__class__ = Open


def _compressor_of_a_subclass(layer: Layer) -> None:
    class Halved(LinearCompressor):
        def forward(self, x: Tensor, first_tokens: Tensor | None = None) -> Tensor:
            return super().forward(x, first_tokens) / 2

    layer.phi_k = Halved(2, 8, config=CONFIG)


def _weight_with_gaps(layer: Layer) -> None:
    weight = layer.get_parameter("w_v_slc.weight")
    weight.data = weight.data.T.contiguous().T


CHANGES: dict[str, Callable[[Layer], object]] = {
    "a hook on a map": lambda layer: layer.get_submodule("w_v_win").register_forward_hook(lambda *_: None),
    "a hook on the gate": lambda layer: layer.gate.register_forward_pre_hook(lambda *_: None),
    "a bias": _bias,
    "a map of a subclass": _map_of_a_subclass,
    "a gate of a subclass": _gate_of_a_subclass,
    "a compressor of a subclass": _compressor_of_a_subclass,
    "a weight with gaps": _weight_with_gaps,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_is_made_of_something_else_does_not(name: str) -> None:
    layer = plain_layer()
    CHANGES[name](layer)
    assert step(layer).isfinite().all()


def test_autocast_and_what_is_counted_do_not() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert step(plain_layer().bfloat16()).isfinite().all()
    assert step(plain_layer(), reads=ReadCounter()).isfinite().all()
