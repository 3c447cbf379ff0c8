"""MSA and QSA are what transformers' own classes compute: logits and gradients, whole, in steps and in packed rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.indices import record_indices, replay_indices
from flexnsa.optim import index_parameters
from flexnsa.transformers import convert, to_dense
from tests.integrations.transformers.families import tokens
from tests.integrations.transformers.released_models import released

kinds = pytest.mark.parametrize("kind", ["msa", "qsa"])
MIXED: dict[str, Any] = {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "num_experts_per_tok": 2}
MIXED |= {"mlp_layer_types": ["dense", "sparse", "dense"]}
MSA = [("msa", *each) for each in ((5, 1), (8, 1), (9, 1), (24, 2), (25, 1), (67, 2), (83, 1), (1100, 1))]
QSA = [("qsa", length, 1) for length in (3, 4, 5, 24, 27, 28, 29, 67)]


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


class OpenGate(nn.Module):
    """Adds what ``qwen4_exp`` multiplies each head's output by the sigmoid of: here by 1."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        heads = F.linear(x, self.weight).unflatten(-1, (4, -1))
        return torch.cat([heads, torch.full_like(heads, 40)], -1).flatten(-2)


def of_rows(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass a mask, and the rotation of each row."""
    x = kwargs["hidden_states"]
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(len(x), 1, -1, -1)
    rope = [each.expand(len(x), -1, -1) for each in kwargs["position_embeddings"]]
    return args, {"hidden_states": x, "position_embeddings": rope, "attention_mask": causal}


def select_as_qwen(model: Any) -> Any:
    """Give the dense layers of a model the place and the weights of those of a random ``qwen4_exp``."""
    qwen = released("qwen4_exp", layer_types=["indexed_attention"] * 3)
    for layer, other in zip(model.model.layers, qwen.model.layers, strict=True):
        dense, attention = layer.self_attn, other.self_attn
        for name in ("k_proj", "v_proj", "o_proj"):
            setattr(attention, name, getattr(dense, name))
        attention.q_proj = OpenGate(dense.q_proj.weight)
        attention.q_norm.weight, attention.k_norm.weight = dense.q_norm.weight, dense.k_norm.weight
        attention.register_forward_pre_hook(of_rows, with_kwargs=True)
        layer.self_attn = attention
    return model


def pair(kind: str, dtype: torch.dtype, local: int = 1) -> tuple[Any, Any]:
    """A model with layers of transformers, and one of ours with its weights."""
    if kind == "msa":
        theirs = released("minimax_m3_vl", index_local_blocks=local, **MIXED).to(dtype).eval()
        return theirs, convert(theirs)
    dense = released("minimax_m3_vl", layer_types=["full_attention"] * 3)
    theirs = select_as_qwen(copy.deepcopy(dense))
    ours = convert(dense, NSAConfig.qsa(num_selected_blocks=7), branches=("slc",))
    for own, other in zip(ours.model.nsa_layers, theirs.model.layers, strict=True):
        assert not own.indexer.q_norm.weight.any()  # it begins as no factor
        state = other.self_attn.indexer.state_dict()
        parts = *state.pop("index_qk_proj.weight").split([64, 16]), *state.values()
        own.indexer.load_state_dict(dict(zip(own.indexer.state_dict(), parts, strict=True)))
    return theirs.to(dtype).eval(), ours.to(dtype).eval()


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("kind", "length", "local"), [*MSA, *QSA])
@pytest.mark.usefixtures("lower_index")
def test_logits_and_gradients(kind: str, length: int, local: int, dtype: torch.dtype, tolerance: float) -> None:
    x = tokens(1 if length > 1024 else 2, length)  # more than a drop-in would select
    with wide(dtype):
        theirs, ours = pair(kind, dtype, local)
        out, want = ours(x, use_cache=False).logits, theirs(x, use_cache=False).logits
        for logits in (out, want):
            logits.square().mean().backward()
        assert kind == "qsa" or torch.equal(to_dense(ours)(x, use_cache=False).logits, want)
    assert_close(out, want, tolerance)
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if ".indexer." not in name:
            assert_close(parameter.grad, grads[name.replace("_proj_slc", "_proj")], 10 * tolerance)


@torch.no_grad()
@kinds
@pytest.mark.parametrize("tied", [False, True], ids=["", "ties"])
@pytest.mark.usefixtures("lower_index")
def test_prefill_and_steps(kind: str, tied: bool) -> None:
    x = tokens(2, 70)
    with wide(torch.float64):
        theirs, ours = pair(kind, torch.float64)
        if tied:
            for maps in [
                each for model in (ours, theirs) for name, each in model.named_modules() if name[-7:] == "indexer"
            ]:
                (maps.k_proj.weight if hasattr(maps, "k_proj") else maps.index_qk_proj.weight[64:])[:] = 0
        want = theirs(x, use_cache=False).logits
        for chunks in ([9, 1, 1, 30, 1, 28], [40, *[1] * 30]):
            cache, outs = None, []
            for part in x.split(chunks, 1):
                out = ours(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                outs.append(out.logits)
            assert_close(torch.cat(outs, 1), want, 1e-12)
            assert {tuple(layer.nsa.buffers["k_index"].shape[:2]) for layer in cache.nsa_layers} == {(2, 1)}


@pytest.fixture
def lower_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties theirs has to choose the lower index, which PyTorch leaves open."""
    monkeypatch.setattr(Tensor, "topk", _stable)


def _stable(x: Tensor, n: int, dim: int, **_: object) -> Any:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :n], indices[..., :n]))


@torch.no_grad()
@kinds
@pytest.mark.usefixtures("lower_index")
def test_packed_rows_are_theirs_of_each_document(kind: str) -> None:
    lengths, x = [37, 3, 43], tokens(1, 83)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with wide(torch.float64):
        theirs, ours = pair(kind, torch.float64)
        want = torch.cat([theirs(part, use_cache=False).logits for part in x.split(lengths, 1)], 1)
        for mask in (None, torch.ones_like(x)):  # with one, transformers does not look for documents
            out = ours(x, position_ids=positions, attention_mask=mask, use_cache=False).logits
            assert_close(out, want, 1e-12)


@kinds
def test_a_converted_model_is_taught_recorded_and_loaded_again(kind: str, tmp_path: Path) -> None:
    """A released one by transformers alone, too."""
    theirs, ours = pair(kind, torch.float32)
    x, selection = tokens(2, 70), SelectionLoss()
    out = ours.train()(x, use_cache=False, selection=selection).logits
    (out.square().mean() + selection.total).backward()
    assert all(parameter.grad.any() for layer in ours.model.nsa_layers for parameter in layer.parameters())
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    if kind == "msa":
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
    if kind == "msa":
        to_dense(ours).save_pretrained(tmp_path / "theirs")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
        assert type(plain) is type(theirs)
        assert plain.config.index_topk_blocks == 4
        assert "flexnsa" not in (tmp_path / "theirs" / "config.json").read_text()
        assert load_file(tmp_path / "theirs" / "model.safetensors").keys() == theirs.state_dict().keys()
        torch.testing.assert_close(plain(x, use_cache=False).logits, want)


@torch.no_grad()
@pytest.mark.usefixtures("lower_index")
def test_a_released_model_is_padded_and_generates() -> None:
    x = tokens(1, 83)
    with wide(torch.float64):
        theirs, ours = pair("msa", torch.float64)
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
        options = {"attention_mask": torch.ones_like(x), "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(ours.generate(x, **options), theirs.generate(x, **options))


def test_what_has_no_counterpart_is_refused() -> None:
    own, full = "for a model that selects blocks itself", "of a model to convert, got"
    refused: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
        f"config: expected None {own}": ({}, NSAConfig.msa(), {}),
        f"branches: expected None {own}": ({}, None, {"branches": ["slc"]}),
        "index_rank: expected None with index_score='max'": ({}, None, {"index_rank": 4}),
        f"index_head_dim: expected head_dim, 16, {full} 8": ({"index_head_dim": 8}, None, {}),
        f"index_n_heads: expected num_key_value_heads, 2, {full} 1": ({"index_n_heads": 1}, None, {}),
    }
    for message, (changes, config, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            convert(released("minimax_m3_vl", **changes), config, **options)
    with pytest.raises(ValueError, match="model: expected layers of full causal attention, or minimax_m3_sparse"):
        convert(released("qwen4_exp"), NSAConfig.qsa())
    with pytest.raises(TypeError, match="config: expected NSAConfig, got None"):
        convert(released("minimax_m3_vl", layer_types=["full_attention"] * 3))
    _, model = pair("msa", torch.float32)
    model.config.flexnsa |= {"num_init_blocks": 1}
    with pytest.raises(ValueError, match="num_init_blocks: expected 0 of layers that become MSA, got 1"):
        to_dense(model)
