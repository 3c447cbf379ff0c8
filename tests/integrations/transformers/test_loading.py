"""Models on disk: they come back as they were, what is given when they are loaded counts, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.transformers import convert
from tests.integrations.transformers.families import (
    ALL,
    CHOICE,
    FAMILIES,
    FEW,
    INDEX,
    INDEXED,
    WIDE,
    converted,
    dense,
    own,
    sparse,
    tokens,
)

WAYS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": lambda path: AutoModelForCausalLM.from_pretrained(path, **CHOICE),
    "of its class": lambda path: LlamaForCausalLM.from_pretrained(path, **CHOICE),
    "with a config": lambda path: LlamaForCausalLM.from_pretrained(
        path, config=AutoConfig.from_pretrained(path), **CHOICE
    ),
    "from_config": lambda path: _filled(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **CHOICE), path
    ),
    "in shards": lambda path: AutoModelForCausalLM.from_pretrained(path, device_map="auto", **CHOICE),
    "pipeline": lambda path: (
        pipeline("text-generation", model=str(path), dtype=torch.float32, model_kwargs=CHOICE).model
    ),
}


def _filled(model: Any, path: Path) -> Any:
    model.load_state_dict(LlamaForCausalLM.from_pretrained(path).state_dict())
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_options_are_given_when_a_model_is_loaded_and_saved_with_it(way: str, folder: Path, tmp_path: Path) -> None:
    x, want = tokens(1, 70), sparse("llama", FEW, **WIDE).float()
    model = WAYS[way](folder / "dense")
    assert model.config.flexnsa == FEW
    assert_close(model(x).logits, want(x).logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(again(x).logits, want(x).logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, flexnsa={"num_selected_blocks": 64})
    assert again.config.flexnsa == ALL
    assert not hasattr(AutoConfig.from_pretrained(folder / "dense"), "flexnsa")


def test_options_of_a_converted_model_are_added_to_its_own(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "converted", flexnsa={"impl": "reference"})
    assert model.model.layers[0].self_attn.options.impl == "reference"
    assert model.config.flexnsa["branches"] == ["slc"]
    for wrong, message in (({"branches": ["all"]}, "branches"), ({"gates": [1]}, "config.flexnsa: .* got 'gates'")):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(folder / "converted", flexnsa=wrong)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"flexnsa": FEW}, ValueError, "flexnsa: expected attn_implementation='flexnsa' .* with the default"),
        ({"flexnsa": FEW, "attn_implementation": "sdpa"}, ValueError, "flexnsa: expected attn_implementation='flex"),
        (CHOICE | {"flexnsa": {"window": 3}}, ValueError, "config.flexnsa: expected some of branches, .* got 'window'"),
        (CHOICE | {"flexnsa": {"gates": [1]}}, ValueError, "gates: expected a number for each"),
        (CHOICE | {"flexnsa": 3}, TypeError, r"flexnsa: expected Mapping, got 3 \(int\)"),
    ],
)
def test_options_without_an_effect_are_refused_when_they_are_given(
    given: dict[str, Any], error: Any, message: str, folder: Path
) -> None:
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(folder / "dense", **given)
    with pytest.raises(error, match=message.replace(" .* with the default", "")):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "dense"), **given)


@torch.no_grad()
def test_a_model_in_shards_is_converted_without_another_copy(folder: Path, tmp_path: Path) -> None:
    x, model = tokens(1, 70), AutoModelForCausalLM.from_pretrained(folder / "dense", device_map="auto")
    want, before = model(x).logits, {x.data_ptr(): x.numel() for x in model.parameters()}
    three = convert(model, NSAConfig(**ALL), copy=False)
    assert three is model
    after = {x.data_ptr(): x.numel() for x in three.parameters()}
    assert before.keys() <= after.keys()
    tags = ("_cmp.", "_win.", "_attn.gate.", ".compress_")
    new = [x.numel() for name, x in three.named_parameters() if any(tag in name for tag in tags)]
    assert sum(after.values()) - sum(before.values()) == sum(new)
    assert (three(x).logits - want).abs().mean() < 0.1 * want.abs().mean()

    places = {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}

    def offloaded() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "dense", device_map=places, offload_folder=tmp_path)

    same = convert(offloaded(), NSAConfig(**ALL), branches=["slc"], copy=False)
    assert_close(same(x).logits, want)
    with pytest.raises(ValueError, match=r"device_map: expected all weights in memory, got those of model.layers.1"):
        convert(offloaded(), NSAConfig(**ALL), copy=False)


OFFLOADED: dict[str, Any] = {
    "converted": lambda: converted("llama", FEW),
    "indexer": lambda: converted("llama", INDEXED),
    "own": own,
    "drop-in": lambda: sparse("llama", FEW),
}


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("kind", OFFLOADED)
def test_weights_may_lie_elsewhere_until_their_module_runs(kind: str, way: str, tmp_path: Path) -> None:
    model, x = OFFLOADED[kind]().eval(), tokens(2, 40)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}
    with torch.no_grad():
        want, drawn = model(x, use_cache=False).logits, model.generate(x, **options)
        if way == "cpu_offload":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(model(x, use_cache=False).logits, want)
        assert torch.equal(model.generate(x, **options), drawn)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A converted model, and where it was saved."""
    model, path = converted("llama", FEW | INDEX), tmp_path_factory.mktemp("saved")
    model.save_pretrained(path)
    return model, path


@torch.no_grad()
@pytest.mark.parametrize("options", [FEW, INDEXED], ids=["means", "indexer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_comes_back_as_a_class_of_its_own(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": family == "qwen2"}
    model, x = converted(family, options | {"branches": ["cmp", "slc"]}, **tied), tokens(1, 60)
    model.save_pretrained(tmp_path / "once")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    again.save_pretrained(tmp_path / "twice")
    twice = AutoModelForCausalLM.from_pretrained(tmp_path / "twice")
    base = AutoModel.from_pretrained(tmp_path / "twice")
    for other in (again, twice):
        assert type(other) is type(model)
        assert_close(other(x).logits, model(x).logits)
        assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied["tie_word_embeddings"]
    assert_close(base(x).last_hidden_state, model.model(x).last_hidden_state)
    assert AutoConfig.from_pretrained(tmp_path / "twice").flexnsa == model.config.flexnsa


def test_a_dense_class_does_not_take_it(saved: tuple[Any, Path]) -> None:
    """It took what it had names for, drew keys and values anew, and dropped the gates with a warning."""
    _, path = saved
    with pytest.raises(ValueError, match=r"attn_implementation: expected another .* of a LlamaForCausalLM"):
        type(dense("llama")).from_pretrained(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "flexnsa_llama"


def test_no_other_attention_can_be_asked_for(saved: tuple[Any, Path]) -> None:
    model, path = saved
    message = "attn_implementation: expected none for a model whose layers are NSA, got 'sdpa'"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("sdpa")


def test_what_a_checkpoint_lacks_starts_as_it_does_in_a_new_model(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """Models are loaded on the meta device: what nobody initialises is whatever the memory held."""
    model, path = saved
    fresh = type(model)(model.config)
    state = load_file(path / "model.safetensors")
    lost = [name for name in state if any(new in name for new in ("gate.", "compress_", "indexer."))]
    assert len(lost) == 2 * (2 + 4 + 4)
    save_file({name: x for name, x in state.items() if name not in lost}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    got = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, start in fresh.state_dict().items():
        want = start.to(got[name].dtype) if name in lost else state[name]
        assert_close(got[name], want, msg=name)


@pytest.mark.parametrize(("kept", "leaders"), [(slice(3), [0, 0, 2]), (slice(2, 4), [0, 1]), (slice(1, 3), None)])
def test_a_model_of_a_shared_index_whose_layers_were_cut_comes_back(
    kept: slice, leaders: list[int] | None, tmp_path: Path
) -> None:
    x, model = tokens(1, 60), converted("llama", INDEXED | {"share_index": [0, 0, 2, 3]}, num_hidden_layers=4)
    model.model.layers = model.model.layers[kept]
    model.config.num_hidden_layers = len(model.model.layers)  # as of any model
    if leaders is None:
        with pytest.raises(ValueError, match=r"share_index: expected layer 0 .* layer 1 .* got layers \[1, 2\]"):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    again, selection = AutoModelForCausalLM.from_pretrained(tmp_path), SelectionLoss(step=0)
    assert again.config.flexnsa["share_index"] == leaders
    assert torch.equal(again(x).logits, model.train()(x, selection=selection).logits)
    assert len(selection.sums) == len(leaders)
