"""What goes wrong in silence where attention is exchanged under a model, and here must not."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM

import flexnsa.transformers  # noqa: F401  (registers the attention)
from tests.integrations.transformers.families import FEW, dense, pad_left, sparse, tokens


def test_a_name_whose_mask_is_not_registered_is_refused() -> None:
    """To transformers, an attention whose mask it does not know needs none: padding was ignored."""
    AttentionInterface.register("flexnsa_renamed", AttentionInterface()["flexnsa"])
    model = dense("llama", attn_implementation="flexnsa_renamed")
    with pytest.raises(ValueError, match=r"attn_implementation: expected 'flexnsa', .* got 'flexnsa_renamed'"):
        model(**pad_left([tokens(20), tokens(9)]))


@torch.no_grad()
def test_a_saved_model_comes_back_with_the_attention_that_it_ran_with(tmp_path: Path) -> None:
    """No attn_implementation is saved by transformers: a model trained with flexnsa came back dense.

    Training scripts hand on one that nobody gave as None.
    """
    model, x = sparse("llama", FEW), tokens(1, 70)
    want = model(x).logits
    model.save_pretrained(tmp_path)
    for given in ({}, {"attn_implementation": None}):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
        assert again.config._attn_implementation == "flexnsa"
        assert_close(again(x).logits, want)
        again.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "flexnsa"
    on_purpose = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert_close(on_purpose(x).logits, dense("llama")(x).logits)


def test_a_choice_is_saved_before_it_is_made_use_of(tmp_path: Path) -> None:
    """It was noted when a model ran, and outside of a compiler: whoever compiled it, or only copied it, lost it."""
    configs = [dense("llama", attn_implementation="flexnsa").config, sparse("llama", FEW, num_hidden_layers=1).config]
    for config in configs:
        config.save_pretrained(tmp_path)
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        assert again.config._attn_implementation == "flexnsa"
        assert not hasattr(again.generation_config, "attn_implementation")


def test_models_with_an_attention_of_their_own_are_refused() -> None:
    """They took the marks for a mask to add to their scores, and saw the future where nothing was padded."""
    sizes: Any = {"vocab_size": 64, "hidden_size": 48, "n_layer": 1, "n_head": 6}
    message = r"attn_implementation: expected 'flexnsa' of a model .* interface, .* Bloom"
    with pytest.raises(ValueError, match=message):
        BloomForCausalLM(BloomConfig(**sizes | {"attn_implementation": "flexnsa"}))
    model: Any = BloomForCausalLM(BloomConfig(**sizes))
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("flexnsa")  # transformers warns, and leaves the model as it is
    model.config._attn_implementation = "flexnsa"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 20))


@torch.no_grad()
@pytest.mark.parametrize("copy", [lambda model: model, deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_an_attention_that_is_set_back_is_saved_as_set_back(copy: Callable[[Any], Any], tmp_path: Path) -> None:
    """What a model said of itself outlived the choice: it came back with flexnsa."""
    model, x = sparse("llama", FEW), tokens(1, 70)
    few = model(x).logits
    model = copy(model)
    for chosen, saved in (("sdpa", "sdpa"), ("flexnsa", "flexnsa"), ("eager", "sdpa")):
        model.set_attn_implementation(chosen)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.config._attn_implementation == saved
        assert_close(again(x).logits, few if chosen == "flexnsa" else dense("llama")(x).logits)


@torch.no_grad()
def test_a_document_of_a_pack_is_not_gone_on_with_as_if_it_were_alone() -> None:
    """A cache does not tell where documents began in it: the second turn attended to all of them."""
    model = sparse("llama", FEW)
    packed = {"input_ids": tokens(1, 40), "position_ids": torch.cat((torch.arange(25), torch.arange(15)))[None]}
    cache = model(**packed, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"position_ids: expected those of one sequence .* got 15 behind 40 tokens"):
        model(tokens(1, 1), position_ids=torch.tensor([[15]]), past_key_values=cache)


def test_the_import_wraps_no_more_of_transformers_than_the_page_says() -> None:
    program = """
from transformers import PreTrainedConfig, PreTrainedModel
before = {(owner.__name__, name): x for owner in (PreTrainedConfig, PreTrainedModel) for name, x in vars(owner).items()}
import flexnsa.lm.transformers_model, flexnsa.transformers
print(*sorted(".".join(key) for key, x in before.items() if vars(eval(key[0]))[key[1]] is not x))
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.split() == [
        *(f"PreTrainedConfig.{name}" for name in ("_attn_implementation", "from_dict", "to_dict")),
        *(f"PreTrainedModel.{name}" for name in ("_from_config", "from_pretrained", "get_correct_attn_implementation")),
        *(f"PreTrainedModel.{name}" for name in ("post_init", "set_attn_implementation")),
    ]
