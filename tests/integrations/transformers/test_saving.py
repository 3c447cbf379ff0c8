"""Converted models on disk: they come back as they were, and nothing takes them for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.integrations.transformers.families import FAMILIES, FEW, INDEX, INDEXED, converted, dense, tokens


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
