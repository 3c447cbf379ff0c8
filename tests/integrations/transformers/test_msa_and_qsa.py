"""MSA and QSA are what transformers' own classes compute: logits and gradients, whole, in steps and in packed rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl, modeling_minimax_m3_vl

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.functional.indices import record_indices, replay_indices
from flexnsa.optim import index_parameters
from flexnsa.transformers import FlexNSACache, convert, teach_indexers, to_dense
from flexnsa.transformers.taught_layers import indexed_layers
from tests.integrations.transformers.families import in_steps, tokens
from tests.integrations.transformers.released_models import HALF, released

kinds = pytest.mark.parametrize("kind", ["msa", "qsa"])
MIXED: dict[str, Any] = {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "num_experts_per_tok": 2}
MIXED |= {"mlp_layer_types": ["dense", "sparse", "dense"]}
TWO, WIDE, NARROW = {"index_local_blocks": 2}, {"index_head_dim": 24}, {"index_head_dim": 8}
MSA = [
    ("msa", *each) for each in ((5, {}), (8, {}), (9, {}), (24, TWO), (25, NARROW), (67, TWO), (83, WIDE), (1100, {}))
]
OTHERS: dict[str, Any] = {"indexer_head_dim": 8, "indexer_n_heads": 2, "attention_bias": True}
ROTATED: dict[str, Any] = {"rope_parameters": HALF | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}}
QSA = [("qsa", length, {}) for length in (3, 4, 5, 24, 27, 28)] + [("qsa", 29, ROTATED), ("qsa", 67, OTHERS)]


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


def pair(kind: str, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """Make a model of transformers and ours of its weights: of QSA with linear layers, and wider index heads."""
    name, given = (
        ("minimax_m3_vl", MIXED) if kind == "msa" else ("qwen4_exp", {"indexer_head_dim": 24, "num_experts_per_tok": 2})
    )
    if kind == "qsa" and dtype == torch.float64:  # in which linear layers do not compute
        given = given | {"layer_types": ["indexed_attention"] * 3}
    theirs = released(name, **given | changes).to(dtype).eval()
    return theirs, convert(theirs)


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("kind", "length", "changes"), [*MSA, *QSA])
@pytest.mark.usefixtures("lower_index")
def test_logits_and_gradients(
    kind: str, length: int, changes: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    x = tokens(1 if length > 1024 else 2, length)  # more than a drop-in would select
    with wide(dtype):
        theirs, ours = pair(kind, dtype, **changes)
        out, want = ours(x, use_cache=False).logits, theirs(x, use_cache=False).logits
        for logits in (out, want):
            logits.square().mean().backward()
        assert torch.equal(to_dense(ours)(x, use_cache=False).logits, want)
    assert_close(out, want, tolerance)
    for parameter in ours.parameters():  # to_dense puts together what is one projection there
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    grads = to_dense(ours).state_dict()
    for name, parameter in theirs.named_parameters():
        if ".indexer." not in name:
            assert_close(grads[name], parameter.grad, 10 * tolerance)


@torch.no_grad()
@kinds
@pytest.mark.parametrize("tied", [False, True], ids=["", "ties"])
@pytest.mark.usefixtures("lower_index")
def test_prefill_and_steps(kind: str, tied: bool) -> None:
    x = tokens(2, 70)
    with wide(torch.float64):
        theirs, _ = pair(kind, torch.float64)
        for name, weight in theirs.named_parameters() if tied else ():
            if "indexer" in name and "k_proj" in name:
                weight[-24:] = 0  # of keys
        ours = convert(theirs, share_index=None)
        want = theirs(x, use_cache=False).logits
        for ends in ((9, 10, 11, 41, 42, 70), (40,)):
            cache = FlexNSACache(ours.config)
            assert_close(in_steps(ours, x, *ends, cache=cache), want, 1e-12)
            for kept in (layer.nsa.buffers["k_index"] for layer in cache.nsa_layers):
                assert (*kept.shape[:2], kept.shape[3]) == (2, 1, 16 if kind == "msa" else 24)


@pytest.fixture
def lower_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties theirs has to choose the lower index, which PyTorch leaves open."""
    monkeypatch.setattr(Tensor, "topk", _stable)


def _stable(x: Tensor, n: int, dim: int, **_: object) -> Any:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :n], indices[..., :n]))


@kinds
def test_a_converted_model_is_taught_recorded_and_loaded_again(kind: str, tmp_path: Path) -> None:
    """A released one by transformers alone, too."""
    theirs, ours = pair(kind, torch.float32)
    x, selection, before = tokens(2, 70), SelectionLoss(), to_dense(ours).state_dict()
    assert all(torch.equal(before[name], value) for name, value in theirs.state_dict().items())
    out = ours.train()(x, use_cache=False, selection=selection).logits
    (out.square().mean() + selection.total).backward()
    assert all(parameter.grad.any() for layer in ours.model.nsa_layers for parameter in layer.parameters())
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    ours.config.flexnsa |= {"num_selected_blocks": 4}
    ours.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(), record_indices(ours) as recorded:
        want = ours(x, use_cache=False).logits
        assert not torch.allclose(want, out)
    torch.testing.assert_close(again(x, use_cache=False).logits, want)
    for parameter in index_parameters(again):
        nn.init.normal_(parameter)
    with torch.no_grad(), replay_indices(again, recorded.indices()):
        torch.testing.assert_close(again(x, use_cache=False).logits, want)
    theirs.save_pretrained(tmp_path / "before")
    to_dense(ours).save_pretrained(tmp_path / "theirs")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert type(plain) is type(theirs)
    assert (plain.config.index_topk_blocks == 4) if kind == "msa" else (plain.config.indexer_budget == 12)
    assert "flexnsa" not in (tmp_path / "theirs" / "config.json").read_text()
    saved, first = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "before"))
    assert saved.keys() == first.keys()
    torch.testing.assert_close(plain(x, use_cache=False).logits, want)


@torch.no_grad()
def test_the_text_model_of_an_image_and_text_model_is_converted_and_put_back(tmp_path: Path) -> None:
    x, sizes = tokens(2, 50), released("minimax_m3_vl").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {"text_config": sizes, "vision_config": vision}
    config = configuration_minimax_m3_vl.MiniMaxM3VLConfig(**parts, projector_hidden_size=16)
    whole: Any = modeling_minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration(config).eval()
    text = modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM(whole.config.text_config).eval()
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    ours = convert(text)
    for parameter in ours.parameters():
        parameter += 0.01 * torch.randn_like(parameter)
    dense = to_dense(ours)
    whole.model.language_model, whole.lm_head = dense.model, dense.lm_head
    whole.save_pretrained(tmp_path)
    again = type(whole).from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=x, use_cache=False).logits, ours(x, use_cache=False).logits)


@kinds
def test_the_loss_is_that_of_the_released_indexers(kind: str) -> None:
    """Where all blocks are selected, as then theirs attends as in a warm-up."""
    all_blocks = {"index_topk_blocks": 9} if kind == "msa" else {"indexer_budget": 72}
    theirs, ours = pair(kind, torch.float32, **all_blocks)
    x, selection = tokens(2, 70), SelectionLoss()
    ours.train()(x, use_cache=False, selection=selection)
    total: Any = selection.total
    total.backward()
    with teach_indexers(theirs.train()) as teaching:
        theirs(x, use_cache=False)
        loss = teaching.loss()
        loss.backward()
    torch.testing.assert_close(total, loss)
    indexed = [layer for layer in indexed_layers(theirs) if layer.indexer is not None]
    for own, other in zip(ours.model.nsa_layers, indexed, strict=True):
        got, want = (torch.cat([x.grad.flatten() for x in each.indexer.parameters()]) for each in (own, other))
        torch.testing.assert_close(got, want, atol=1e-5 * float(want.abs().max()), rtol=0)


@torch.no_grad()
@kinds
@pytest.mark.usefixtures("lower_index")
def test_a_released_model_is_packed_padded_and_generates(kind: str) -> None:
    lengths, x = [37, 3, 43], tokens(1, 83)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with wide(torch.float64):
        theirs, ours = pair(kind, torch.float64)
        want = torch.cat([theirs(part, use_cache=False).logits for part in x.split(lengths, 1)], 1)
        for mask in (None, torch.ones_like(x)):  # with one, transformers does not look for documents
            out = ours(x, position_ids=positions, attention_mask=mask, use_cache=False).logits
            assert_close(out, want, 1e-12)
        want = theirs(x, use_cache=False).logits
        for pad in ((9, 0), (0, 9)):  # theirs is wrong with padding on the left
            rows, mask = F.pad(x, pad), F.pad(torch.ones_like(x), pad)
            cache, outs = None, [ours(rows, attention_mask=mask, use_cache=False).logits]
            for end in (50, 51, 52, 92):
                seen = 0 if cache is None else cache.get_seq_length()
                new = ours(rows[:, seen:end], past_key_values=cache, attention_mask=mask[:, :end], use_cache=True)
                cache = new.past_key_values
                outs.append(new.logits)
            for out in (outs[0], torch.cat(outs[1:], 1)):
                assert_close(out[:, pad[0] : 92 - pad[1]], want, 1e-12)
    theirs, ours = pair(kind, torch.float32)
    options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 12, "num_beams": 2}
    assert torch.equal(ours.generate(x, **options), theirs.generate(x, **options))


@torch.no_grad()
@pytest.mark.parametrize("mode", [NSAConfig.msa, NSAConfig.qsa])
def test_a_dense_model_begins_to_select(mode: Any) -> None:
    dense = released("minimax_m3_vl", layer_types=["full_attention"] * 3).eval()
    sizes = mode(select_block_size=4, num_selected_blocks=7, index_head_dim=8)
    ours = convert(dense, sizes, branches=("slc",))
    for length, same in ((27, True), (67, False)):
        x = tokens(2, length)
        want = dense(x, use_cache=False).logits
        assert torch.allclose(ours(x, use_cache=False).logits, want, atol=1e-3) == same
        assert torch.equal(to_dense(ours)(x, use_cache=False).logits, want)
    assert not any(layer.indexer.q_norm.weight.any() for layer in ours.model.nsa_layers)  # it begins as no factor


def test_what_has_no_counterpart_is_refused() -> None:
    own, full = "for a model that selects blocks itself", "of a model to convert, got"
    heads, dense = "expected a multiple of num_key_value_heads, 2,", {"layer_types": ["full_attention"] * 3}
    of_msa: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
        f"config: expected None {own}": ({}, NSAConfig.msa(), {}),
        f"branches: expected None {own}": ({}, None, {"branches": ["slc"]}),
        f"share_index: expected None {own}": ({}, None, {"share_index": 2}),
        "index_rank: expected None with index_score='max'": ({}, None, {"index_rank": 4}),
        "index_stride, index_heads: expected 1, 1, 1 with": ({"index_n_heads": 4}, None, {}),
        "index_head_dim: expected the 8 dims that are rotated, or more, got 6": ({"index_head_dim": 6}, None, {}),
        f"index_n_heads: {heads} {full} 1": ({"index_n_heads": 1}, None, {}),
        "config: expected NSAConfig, got None": (dense, None, {}),
    }
    refused = {message: ("minimax_m3_vl", *given) for message, given in of_msa.items()}
    refused[f"indexer_n_heads: {heads} {full} 3"] = ("qwen4_exp", {"indexer_n_heads": 3}, None, {})
    named = "model: expected layers of full causal attention, or minimax_m3_sparse, indexed_attention, that use"
    refused[named] = ("deepseek_v32", {}, NSAConfig.qsa(), {})
    for message, (name, changes, config, options) in refused.items():
        with pytest.raises((TypeError, ValueError), match=message):
            convert(released(name, **changes), config, **options)
    _, model = pair("msa", torch.float32)
    model.config.flexnsa |= {"num_init_blocks": 1}
    with pytest.raises(ValueError, match="num_init_blocks: expected 0 of layers that become MSA, got 1"):
        to_dense(model)
