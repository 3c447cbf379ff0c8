"""Layers and decoders as exported programs and compiled graphs: one for every length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from flexnsa import MLPCompressor, NativeSparseAttention, native_sparse_attention
from flexnsa.layers.presets import LAYER_PRESETS, text
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.decoder import DecoderLM
from tests.support.exported import MOST_GRAPHS, Inputs, assert_few_graphs_serve_all, assert_one_program_serves_all
from tests.support.inputs import SMALL

SIZES: dict[str, Any] = {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LAYERS: dict[str, dict[str, Any]] = {
    "text": {},
    "paper": {"preset": "paper"},
    "linear, one key head": {"compression": "linear", "num_kv_heads": 1},
    "mean": {"compression": "mean"},
    "selected and window": {"preset": "paper", "branches": ("slc", "win")},
}


def _rows(batch_size: int, seq_len: int, *, packed: bool = False) -> dict[str, Any]:
    documents = (torch.arange(seq_len) >= seq_len // 3).int().repeat(batch_size, 1)
    return {"x": torch.randn(batch_size, seq_len, 32)} | ({"document_ids": documents} if packed else {})


def _tokens(*shape: int) -> dict[str, Any]:
    return {"tokens": torch.randint(256, shape)}


def _decoder() -> DecoderLM:
    return DecoderLM(DecoderConfig(**SIZES, num_layers=2, **text(4, 2)))


@pytest.mark.parametrize(
    ("name", "packed"), [*((name, False) for name in LAYERS if name not in LAYER_PRESETS), *((x, True) for x in LAYERS)]
)
def test_one_program_of_a_layer_serves_every_length(name: str, packed: bool) -> None:
    """Rows of the presets are in the next test."""
    layer = NativeSparseAttention(**SIZES | LAYERS[name]).eval()
    assert_one_program_serves_all(layer, partial(_rows, packed=packed), any_batch=packed)


@pytest.mark.parametrize("preset", LAYER_PRESETS)
def test_one_program_of_a_layer_serves_every_length_and_batch(preset: str) -> None:
    layer = NativeSparseAttention(**SIZES, preset=preset).eval()
    assert_one_program_serves_all(layer, _rows, strict=True)


def test_one_program_of_a_model_serves_every_length_and_batch() -> None:
    assert_one_program_serves_all(_decoder().eval(), _tokens)


@torch.no_grad()
def test_one_program_serves_two_compressed_tokens_and_more() -> None:
    """With fewer, S < l + d, it would be a program of its own: the exporter takes sizes 0 and 1 for constants."""
    layer = NativeSparseAttention(**SIZES, config=SMALL, impl="sdpa").eval()
    lengths = ({1: Dim("S", min=12, max=512)},)
    exported = export(layer, (torch.randn(1, 100, 32),), dynamic_shapes=lengths).module()
    for length in (12, 13, 16, 17, 33, 512):
        x = torch.randn(1, length, 32)
        torch.testing.assert_close(exported(x), layer(x))


class Attention(nn.Module):
    """The function between operations of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate = (nn.Linear(32, width) for width in (64, 32, 32, 12))
        self.compress = MLPCompressor(2, 16, config=SMALL)

    def forward(self, x: Tensor) -> Tensor:
        heads = ((self.q, 4), (self.k, 2), (self.v, 2), (self.gate, 4))
        q, k, v, gates = (each(x).unflatten(-1, (count, -1)).transpose(1, 2) for each, count in heads)
        compressed = {"k_cmp": self.compress(k), "v_cmp": self.compress(v)}
        return native_sparse_attention(q, k, v, gates.sigmoid(), **compressed, config=SMALL)


@pytest.mark.filterwarnings("ignore:selection")
@pytest.mark.parametrize(
    ("make", "inputs", "how", "backend"),
    [
        *((partial(NativeSparseAttention, **SIZES, preset="paper"), _rows, how, "eager") for how in MOST_GRAPHS),
        (_decoder, _tokens, "marked", "eager"),
        (Attention, _rows, "marked", "inductor"),
    ],
)
def test_few_graphs_serve_every_length(make: Callable[[], nn.Module], inputs: Inputs, how: str, backend: str) -> None:
    """The tracer alone decides how many; a backend that asks more of a length fails where lengths are marked."""
    assert_few_graphs_serve_all(make(), inputs, how, backend=backend)
