"""A layer whose compressed branch has the keys of the selected one: what it computes, learns and keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import MeanCompressor, NativeSparseAttention
from flexnsa.lm import DecoderConfig, DecoderLM
from tests.support.inputs import SMALL, TINY

IDS = (torch.arange(77) >= 30).int().expand(2, -1)


def layer(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(32, 4, 2, 8, **{"config": SMALL, "v_head_dim": 12, **options}).double()


def config(**options: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "nsa": TINY}
    return DecoderConfig(**sizes | options)


def with_the_numbers_of(shared: NativeSparseAttention, **options: Any) -> NativeSparseAttention:
    """Make a layer of keys of its own that begin as equal ones."""
    apart = layer(**options)
    state = shared.state_dict()
    apart.load_state_dict(state | {"w_k_cmp.weight": state["w_k_slc.weight"]})
    return apart


def learn(attention: NativeSparseAttention, **options: Any) -> dict[str, Tensor]:
    out = attention(torch.randn(2, 77, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), **options)
    out.square().sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"document_ids": IDS}])
def test_one_map_learns_from_both_branches(impl: str, options: dict[str, Any]) -> None:
    shared = layer(shared_keys=True, impl=impl)
    apart, got = learn(with_the_numbers_of(shared, impl=impl), **options), learn(shared, **options)
    assert apart["w_k_cmp.weight"].any()
    apart["w_k_slc.weight"] += apart.pop("w_k_cmp.weight")
    torch.testing.assert_close(got, apart)


def test_there_is_one_map_and_it_is_called_once() -> None:
    shared, calls = layer(shared_keys=True), []
    assert {name for name, _ in shared.named_children() if name.startswith("w_k")} == {"w_k_slc", "w_k_win"}
    shared.get_submodule("w_k_slc").register_forward_hook(lambda *_: calls.append(1))
    shared(torch.randn(1, 40, 32, dtype=torch.float64))
    assert len(calls) == 1


@pytest.mark.parametrize("pieces", [(40, 1, 36), (0, 5, 72), (77,)])
def test_decoding_equals_whole_rows(pieces: tuple[int, ...]) -> None:
    shared, x = layer(shared_keys=True).requires_grad_(False), torch.randn(2, 77, 32, dtype=torch.float64)
    cache = shared.new_cache(2, 80)
    parts = [shared(part, cache=cache) for part in x.split(list(pieces), 1) if part.shape[1]]
    torch.testing.assert_close(torch.cat(parts, 1), shared(x))


@pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
def test_compressors_begin_as_the_mean_and_do_so_again_from_the_meta_device(compression: str) -> None:
    with torch.device("meta"):
        empty = NativeSparseAttention(
            32, 4, 2, 8, config=SMALL, v_head_dim=12, compression=compression, begin_as_mean=True
        )
    empty.to_empty(device="cpu").reset_parameters()
    for begun in (layer(compression=compression, begin_as_mean=True), empty.double()):
        for compressor, dim in ((begun.phi_k, 8), (begun.phi_v, 12)):
            x = torch.randn(1, 2, 40, dim, dtype=torch.float64)
            torch.testing.assert_close(compressor(x), MeanCompressor(2, dim, config=SMALL)(x))


@pytest.mark.parametrize("branches", [("slc",), ("cmp", "win"), ("slc", "win")])
def test_what_there_is_not_cannot_be_shared(branches: tuple[str, ...]) -> None:
    message = "shared_keys: expected False without the branches cmp and slc, got True"
    for make in (layer, config):
        with pytest.raises(ValueError, match=message):
            make(shared_keys=True, branches=branches)


@pytest.mark.parametrize("make", [layer, config])
def test_what_compresses_nothing_cannot_begin_as_the_mean(make: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="begin_as_mean: expected False without the branches cmp, got True"):
        make(begin_as_mean=True, branches=("slc", "win"))


def test_a_model_learns_what_its_config_says() -> None:
    model = DecoderLM(config(shared_keys=True, begin_as_mean=True))
    keys = torch.randn(1, 2, 40, 8)
    for module in model.layers:
        attention = module.get_submodule("attention")
        assert isinstance(attention, NativeSparseAttention)
        assert not hasattr(attention, "w_k_cmp")
        torch.testing.assert_close(attention.phi_k(keys), MeanCompressor(2, 8, config=TINY)(keys))
    tokens = torch.randint(256, (1, 60))
    model(tokens, targets=tokens).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
