"""MSA is what transformers' own MiniMax-M3 computes: logits and gradients, whole, in steps and in packed rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.indices import record_indices, replay_indices
from flexnsa.transformers import convert
from tests.integrations.transformers.families import tokens
from tests.integrations.transformers.released_models import released

SIZES = {"select_block_size": 8, "num_selected_blocks": 3}


@contextlib.contextmanager
def wide(dtype: torch.dtype) -> Iterator[None]:
    """Let what transformers casts to fp32 stay in fp64."""
    narrow, softmax = Tensor.float, F.softmax

    def keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.double() if x.dtype in (torch.float64, torch.int64, torch.int32) else narrow(x, *args, **kwargs)

    def soft(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(Tensor, "float", keep)
            patch.setattr(F, "softmax", soft)
        yield


def pair(dtype: torch.dtype, local: int = 1) -> tuple[Any, Any]:
    """A model of transformers, and one of ours with its weights: an indexer has the same names in both."""
    kinds = ["minimax_m3_sparse"] * 3
    theirs = released("minimax_m3_vl", layer_types=kinds, index_local_blocks=local)
    dense = released("minimax_m3_vl", layer_types=["full_attention"] * 3)
    dense.load_state_dict({name: x for name, x in theirs.state_dict().items() if ".indexer." not in name})
    ours = convert(dense, NSAConfig.msa(**SIZES, num_local_blocks=local), branches=("slc",))
    for own, other in zip(ours.model.nsa_layers, theirs.model.layers, strict=True):
        assert not own.indexer.q_norm.weight.any()  # it begins as no factor
        own.indexer.load_state_dict(other.self_attn.indexer.state_dict())
    return theirs.to(dtype).eval(), ours.to(dtype).eval()


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("length", "local"), [(5, 1), (8, 1), (9, 1), (24, 2), (25, 1), (67, 2), (83, 1)])
def test_logits_and_gradients(length: int, local: int, dtype: torch.dtype, tolerance: float) -> None:
    x = tokens(2, length)
    with wide(dtype):
        theirs, ours = pair(dtype, local)
        out, want = ours(x, use_cache=False).logits, theirs(x, use_cache=False).logits
        for logits in (out, want):
            logits.square().mean().backward()
    assert_close(out, want, tolerance)
    for layer, dense in zip(ours.model.nsa_layers, theirs.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            own = f"{name}_slc.weight" if name in ("k_proj", "v_proj") else f"{name}.weight"
            grad = dense.self_attn.get_parameter(f"{name}.weight").grad
            assert_close(layer.get_parameter(own).grad, grad, 10 * tolerance)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True], ids=["", "ties"])
def test_prefill_and_steps(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties theirs has to choose the lower index, which PyTorch leaves open."""
    x = tokens(2, 70)
    with wide(torch.float64):
        theirs, ours = pair(torch.float64)
        if tied:
            monkeypatch.setattr(Tensor, "topk", _stable)
            for layer in (*ours.model.nsa_layers, *(each.self_attn for each in theirs.model.layers)):
                layer.indexer.k_proj.weight[:] = 0
        want = theirs(x, use_cache=False).logits
        for chunks in ([9, 1, 1, 30, 1, 28], [40, *[1] * 30]):
            cache, outs = None, []
            for part in x.split(chunks, 1):
                out = ours(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                outs.append(out.logits)
            assert_close(torch.cat(outs, 1), want, 1e-12)
            assert {tuple(layer.nsa.buffers["k_index"].shape[:2]) for layer in cache.nsa_layers} == {(2, 1)}


def _stable(x: Tensor, n: int, dim: int, **_: object) -> Any:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :n], indices[..., :n]))


@torch.no_grad()
def test_packed_rows_are_theirs_of_each_document() -> None:
    lengths, x = [37, 3, 43], tokens(1, 83)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with wide(torch.float64):
        theirs, ours = pair(torch.float64)
        want = torch.cat([theirs(part, use_cache=False).logits for part in x.split(lengths, 1)], 1)
        assert_close(ours(x, position_ids=positions, use_cache=False).logits, want, 1e-12)


def test_a_converted_model_is_taught_recorded_and_loaded_again(tmp_path: Path) -> None:
    _, ours = pair(torch.float32)
    x, selection = tokens(2, 70), SelectionLoss()
    out = ours.train()(x, use_cache=False, selection=selection).logits
    (out.square().mean() + selection.total).backward()
    assert all(parameter.grad.any() for layer in ours.model.nsa_layers for parameter in layer.parameters())
    ours.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(), record_indices(ours) as recorded:
        want = ours(x, use_cache=False).logits
    torch.testing.assert_close(again(x, use_cache=False).logits, want)
    for layer in again.model.nsa_layers:
        layer.indexer.reset_parameters()
    with torch.no_grad(), replay_indices(again, recorded.indices()):
        torch.testing.assert_close(again(x, use_cache=False).logits, want)
