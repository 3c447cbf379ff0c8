"""A layout of a layer of other sizes is refused by the name of what differs; of equal layers, it is as one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.lm import DenseAttention
from flexnsa.parallel.shared_rows import SharingRanks, lay_out_chunks

SIZES = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=6)
DOCUMENTS = torch.tensor([[0] * 17 + [1] * 23])
OTHERS: dict[str, dict[str, Any]] = {
    "rope_base": {"rope_base": 5e5},
    "head_dim": {"head_dim": 16},
    "dtype": {"dtype": torch.float64},
    "compress_stride": {"config": replace(SIZES, compress_stride=2)},
    "compress_block_size": {"config": replace(SIZES, compress_block_size=12)},
    "window_size": {"config": replace(SIZES, window_size=9)},
}
PACKED = [None, DOCUMENTS]


def nsa(head_dim: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    options = {"config": SIZES} | options
    return NativeSparseAttention(32, 4, 2, head_dim, **options).to(dtype)


def dense(head_dim: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> DenseAttention:
    torch.manual_seed(0)
    return DenseAttention(32, 4, 2, head_dim, **options).to(dtype)


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("documents", PACKED)
@pytest.mark.parametrize(
    ("make", "name"),
    [*((nsa, name) for name in OTHERS), *((dense, name) for name in ("rope_base", "head_dim", "dtype"))],
)
def test_a_layout_of_other_sizes_is_refused_by_name(make: Any, name: str, documents: Tensor | None) -> None:
    differs = "config" if "config" in OTHERS[name] else name
    with pytest.raises(ValueError, match=f"^layout: expected {differs}=.*, as the layer has it, got"):
        make()(x(), layout=make(**OTHERS[name]).layout(40, documents))


@pytest.mark.parametrize("name", ["rope_base", "compress_stride", "compress_block_size", "window_size"])
def test_a_layout_of_other_tokens_that_ranks_share_is_refused_by_name(name: str) -> None:
    other, differs = nsa(**OTHERS[name]), "config" if "config" in OTHERS[name] else name
    spread = lay_out_chunks(40, None, other.layout_sizes, ranks=SharingRanks(0, 2, "nobody"), branches=other.branches)
    with pytest.raises(ValueError, match=f"^layout: expected {differs}=.*, as the layer has it, got"):
        nsa()(x(), layout=spread)


def test_a_layout_of_tokens_that_ranks_share_is_refused_with_a_cache() -> None:
    layer = nsa().requires_grad_(False)
    spread = lay_out_chunks(40, None, layer.layout_sizes, ranks=SharingRanks(0, 2, "nobody"), branches=layer.branches)
    with pytest.raises(ValueError, match=r"^layout: expected one of whole rows with a cache"):
        layer(x()[:, : spread.tokens.cos.shape[-2]], layout=spread, cache=layer.new_cache(1, 64))


def test_a_layout_of_another_kind_of_attention_is_refused() -> None:
    for layer, other in ((nsa(), dense()), (dense(), nsa())):
        with pytest.raises(TypeError, match=r"^layout: expected (RowLayout|DenseLayout), got"):
            layer(x(), layout=other.layout(40))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("seq_len", "error"), [(0, ValueError), (2.7, TypeError), ("a", TypeError)])
def test_a_layout_of_no_number_of_tokens_is_refused(seq_len: Any, error: type[Exception]) -> None:
    for layer in (nsa(), dense()):
        with pytest.raises(error, match=r"^seq_len: expected"):
            layer.layout(seq_len)


@pytest.mark.parametrize("layer", [nsa(), dense()])
@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((39, None), "layout: expected 40 tokens in 1 rows, as x has, got 39 tokens in 1 rows"),
        ((40, DOCUMENTS.expand(3, -1)), "layout: expected 40 tokens in 1 rows, as x has, got 40 tokens in 3 rows"),
    ],
)
def test_a_layout_of_other_tokens_is_refused(layer: nn.Module, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        layer(x(), layout=layer.layout(*made))  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"^document_ids: expected None with a layout"):
        layer(x(), layout=layer.layout(40), document_ids=DOCUMENTS)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("documents", PACKED)
@pytest.mark.parametrize("make", [nsa, dense])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layout_of_an_equal_layer_is_as_ones_own(make: Any, dtype: torch.dtype, documents: Tensor | None) -> None:
    layer, other = make(dtype=dtype), make(dtype=dtype)
    shared = layer(x(dtype), layout=other.layout(40, documents))
    assert torch.equal(shared, layer(x(dtype), document_ids=documents))
