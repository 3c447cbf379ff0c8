"""The library's own decoder as a model of transformers: the same tokens, weights and losses either way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from flexnsa import MeanCompressor
from flexnsa.lm import DecoderLM, Sampling, preset
from flexnsa.lm.training.model_file import read_model, save_model
from flexnsa.lm.transformers_model import FlexNSAForCausalLM
from flexnsa.transformers.cache import CACHE
from tests.integrations.transformers.families import own, pad_left, tokens


def test_it_generates_what_it_generates_by_itself() -> None:
    model, rows = own(), [tokens(40), tokens(23)]
    got = model.generate(**pad_left(rows), max_new_tokens=12, do_sample=False)[:, 40:]
    prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    greedy = Sampling(temperature=0)
    want = model.model.generate(prompts, 12, lengths=torch.tensor([40, 23]), sampling=greedy)
    assert got.tolist() == want


@torch.no_grad()
def test_a_row_of_padding_alone_leaves_the_last_logits_of_the_others() -> None:
    model, x = own(), tokens(3, 20)
    mask = torch.ones_like(x)
    mask[1], mask[2, :5] = 0, 0
    want = model(x, attention_mask=mask).logits[:, -1:]
    got = model(x, attention_mask=mask, use_cache=True, logits_to_keep=1)
    assert_close(got.logits[::2], want[::2])
    assert got.past_key_values.kept[0].lengths.tolist() == [20, 0, 15]


def test_it_is_saved_and_found_by_the_auto_classes(tmp_path: Path) -> None:
    model, x = own(branches=["slc", "win"], gate="softmax", v_head_dim=8), tokens(1, 50)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(again(x).logits, model(x).logits)
    assert_close(again(x, return_dict=False)[0], model(x).logits)
    assert AutoConfig.from_pretrained(tmp_path).decoder_config() == model.model.config
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_what_a_checkpoint_lacks_is_drawn_as_in_a_new_model(tmp_path: Path) -> None:
    """Models are loaded on the meta device: what nobody initialises is whatever the memory held."""
    model = own()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({"model.norm.weight": state["model.norm.weight"]}, tmp_path / "model.safetensors")
    models = AutoModelForCausalLM.from_pretrained(tmp_path), DecoderLM(model.model.config)
    drawn, fresh = (each.state_dict() for each in models)
    for name, want in fresh.items():
        got = drawn[f"model.{name}"]
        assert_close(got.double().std(), want.double().std(), atol=1e-9, rtol=0.2, msg=name)


def test_compressors_begin_as_the_mean_and_keep_what_is_loaded(tmp_path: Path) -> None:
    model, keys = own(begin_as_mean=True), torch.randn(1, 2, 40, 16, dtype=torch.float64)
    layers = [layer.attention for layer in model.model.layers]
    mean = MeanCompressor(2, 16, config=layers[0].config)
    for layer in layers:
        assert_close(layer.phi_k(keys), mean(keys))
        assert_close(layer.phi_v(keys), mean(keys))
    with torch.no_grad():
        layers[1].phi_k.out.weight.mul_(2)
    model.init_weights()
    assert_close(layers[1].phi_k(keys), 2 * mean(keys), msg="what has begun does not begin again")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers
    assert_close(again[1].attention.phi_k(keys), 2 * mean(keys))
    state = load_file(tmp_path / "model.safetensors")
    for lost in ("model.layers.0.attention.phi_k", "model.layers.0.attention.phi_k.out"):
        kept = {name: x for name, x in state.items() if not name.startswith(lost)}
        save_file(kept, tmp_path / "model.safetensors")
        drawn = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers
        assert_close(drawn[0].attention.phi_k(keys), mean(keys))
        assert_close(drawn[1].attention.phi_k(keys), 2 * mean(keys))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("count", [None, 100])
def test_the_loss_without_logits_is_that_of_the_logits(count: int | None, use_cache: bool) -> None:
    model, padded = own(), pad_left([tokens(50), tokens(31)])
    labels = padded["input_ids"].masked_fill((padded["attention_mask"] == 0) | (torch.rand(2, 50) < 0.3), -100)
    batch: dict[str, Any] = {**padded, "labels": labels, "num_items_in_batch": count, "use_cache": use_cache}
    with torch.set_grad_enabled(not use_cache):
        want = model(**batch)
        told = [mode(**batch, skip_logits=True) for mode in (model.train(), model.eval())]
        for said in (False, True):
            model.config.skip_logits = said
            assert model.eval()(**batch).logits is not None
            assert (model.train()(**batch).logits is None) == said
            assert model(**batch, skip_logits=False).logits is not None
            assert model(padded["input_ids"]).logits is not None
        told.append(model(**batch))
    for got in told:
        assert got.logits is None
        assert_close(got.loss, want.loss, check_dtype=False, atol=1e-6, rtol=0)


def test_a_run_of_the_library_is_read_and_written(tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoint.safetensors", DecoderLM(preset("small", num_layers=1)))
    model: Any = FlexNSAForCausalLM.from_run(tmp_path)
    text = torch.tensor([list(b"def from_run(")])
    logits = read_model(tmp_path)(text)
    assert_close(model(text).logits, logits)
    assert not model.training
    model.save_pretrained(tmp_path / "transformers")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "transformers")
    again.save_run(tmp_path / "run.safetensors")
    assert_close(read_model(tmp_path / "run.safetensors")(text), logits)
    save_model(tmp_path / "dense.safetensors", DecoderLM(preset("small", attention="dense", num_layers=1)))
    with pytest.raises(ValueError, match="attention: expected 'nsa' of a model for transformers, got 'dense'"):
        FlexNSAForCausalLM.from_run(tmp_path / "dense.safetensors")


def test_some_layers_are_computed_again_and_offloading_is_refused() -> None:
    model = own(num_layers=4)
    enable = model._set_gradient_checkpointing  # what transformers calls
    enable(every_n_layers=2)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False]
    with pytest.raises(ValueError, match=r"gradient_checkpointing_func: expected .*, without offloading, got"):
        enable(gradient_checkpointing_func=partial(lambda *_: None))  # of activation_checkpointing_enable(offload=True)


def test_embeddings_take_the_place_of_tokens() -> None:
    model, padded = own(), pad_left([tokens(50), tokens(31)])
    positions = torch.cat((torch.arange(30), torch.arange(20)))[None]
    calls: list[dict[str, Any]] = [
        {"attention_mask": padded["attention_mask"]},
        {"position_ids": positions, "use_cache": False},
    ]
    x = padded["input_ids"]
    embedded = model.get_input_embeddings()(x).detach()
    with torch.no_grad():
        for given in calls:
            assert_close(model(inputs_embeds=embedded, **given).logits, model(x, **given).logits)
        options: Any = {"max_new_tokens": 4, "do_sample": False, "attention_mask": padded["attention_mask"]}
        assert torch.equal(model.generate(inputs_embeds=embedded, **options), model.generate(x, **options)[:, 50:])
    gradients: list[list[Any]] = []
    for each in ({"input_ids": x}, {"inputs_embeds": embedded}):
        model.zero_grad()
        model.train()(**each, labels=x, attention_mask=padded["attention_mask"]).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.model.layers.parameters()])
    assert_close(*gradients)
    with pytest.raises(ValueError, match=r"^inputs_embeds: expected shape \(B, T, 48\), got \(2, 50, 3\)"):
        model(inputs_embeds=embedded[..., :3])


def test_targets_that_are_shifted_already_take_the_place_of_labels() -> None:
    """Whoever splits a row into shards has to shift first; a shard's last token has a target too."""
    model, targets = own(), tokens(2, 50)
    padded = pad_left([tokens(40), tokens(23)])
    for batch in ({"input_ids": tokens(2, 50), "attention_mask": torch.ones(2, 50)}, padded):
        shift_labels = targets[:, : batch["input_ids"].shape[1]].masked_fill(batch["attention_mask"] == 0, -100)
        logits = model.eval()(**batch).logits
        want = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        for mode in (model.eval(), model.train()):
            got = mode(**batch, labels=batch["input_ids"], shift_labels=shift_labels).loss
            assert_close(got, want, check_dtype=False, atol=1e-6, rtol=0)


def test_hidden_states_are_those_of_each_row_alone_and_the_last_predict_tokens() -> None:
    model, rows = own(num_layers=3), [tokens(40), tokens(23)]
    told = model(**pad_left(rows), output_hidden_states=True)
    assert len(told.hidden_states) == 1 + 3
    assert_close(model.model.head(told.hidden_states[-1])[1, 17:], told.logits[1, 17:])
    for index, row in enumerate(rows):
        alone = model(row[None], output_hidden_states=True).hidden_states
        assert_close([state[[index], 40 - len(row) :] for state in told.hidden_states], list(alone))
    assert model(tokens(1, 9)).hidden_states is None


@pytest.mark.parametrize("mode", ["training", "decoding", "config"])
def test_hidden_states_can_be_had_however_the_model_is_called(mode: str) -> None:
    model, x = own(output_hidden_states=mode == "config"), tokens(1, 12)
    if mode == "training":
        model.train()
        told = model(x, labels=x, output_hidden_states=True)
        told.hidden_states[0].retain_grad()
        told.loss.backward()
        assert told.hidden_states[0].grad.abs().sum() > 0
    else:
        options = {} if mode == "config" else {"output_hidden_states": True}
        told = model.generate(x, max_new_tokens=3, return_dict_in_generate=True, **options)
        lengths = [[state.shape[1] for state in step] for step in told.hidden_states]
        assert lengths == [[12] * 3, [1] * 3, [1] * 3]


WRONG: dict[str, list[Any]] = {
    "input_ids": [tokens(2, 20).float(), tokens(20), "a", tokens(2, 20) + 64],
    "inputs_embeds": [torch.ones(2, 20, 48), torch.ones(2, 20, 3).double(), tokens(2, 20), "a"],
    "labels": [tokens(2, 20).float(), tokens(2, 5), tokens(20), "a", tokens(2, 20) + 64],
    "shift_labels": [tokens(2, 20).float(), tokens(2, 5), tokens(20), "a", tokens(2, 20) - 64],
    "attention_mask": ["a", tokens(20), torch.ones(2, 1, 20, 20), torch.ones(2, 19)],
    "position_ids": [tokens(2, 20).float(), tokens(2, 5), tokens(3, 20), "a", tokens(2, 20).to("meta")],
    "logits_to_keep": ["a", None, -1, 1.5, torch.ones(1)],
    "cu_seq_lens_q": ["a", torch.tensor([0, 5]), torch.tensor([0.0, 20.0])],
    CACHE: ["a"],
    "use_cache": ["a", 3],
    "output_hidden_states": ["a", 3],
    "skip_logits": ["a", 3, torch.ones(2), True],  # without labels
}


@pytest.mark.parametrize(("name", "index"), [(name, index) for name in WRONG for index in range(len(WRONG[name]))])
def test_an_error_names_the_argument_that_was_given(name: str, index: int) -> None:
    rows = 1 if name == "cu_seq_lens_q" else 2
    tokens_of: dict[str, Any] = {} if name in ("input_ids", "inputs_embeds") else {"input_ids": tokens(rows, 20)}
    for options in ({}, {"skip_logits": True}) if "labels" in name else ({},):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            own()(**tokens_of, **options, **{name: WRONG[name][index]})


def test_tokens_beside_embeddings_and_two_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs_embeds: expected either these or input_ids"):
        own()(tokens(1, 9), inputs_embeds=torch.ones(1, 9, 48))
    with pytest.raises(ValueError, match="past_key_values: expected None beside a cache, got 'a'"):
        own()(tokens(2, 20), cache="b", past_key_values="a")


def test_probabilities_are_refused_to_a_config_too() -> None:
    model = own(output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: expected None or False of FlexNSAForCausalLM"):
        model(tokens(1, 9))
