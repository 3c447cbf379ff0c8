"""What contradicts a cache, a config or a model is refused, what may change is followed; none of it in silence."""

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
from flexnsa.lm.transformers_model import FlexNSAForCausalLM
from flexnsa.transformers import FlexNSACache
from tests.integrations.transformers.families import ALL, FEW, INDEXED, converted, dense, own, pad_left, sparse, tokens

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
MODELS: dict[str, Any] = {"converted": lambda: converted("llama", FEW), "own decoder": own}


@pytest.fixture(scope="module", params=MODELS)
def few(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.fixture
def filled(few: Any) -> FlexNSACache:
    """A cache of two rows of 40 tokens."""
    cache = FlexNSACache(few.config)
    with torch.no_grad():
        few(tokens(2, 40), past_key_values=cache)
    return cache


@torch.no_grad()
def test_what_tells_of_other_tokens_than_a_cache_has_is_refused(few: Any, filled: FlexNSACache) -> None:
    """Tokens that a mask called padding, and those that were left out of a prompt, were attended to."""
    mask = torch.ones(2, 41, dtype=torch.int64)
    mask[1, :10] = 0
    with pytest.raises(ValueError, match=r"attention_mask: expected 40 tokens before the new ones in row 1, .* got 30"):
        few(tokens(2, 1), attention_mask=mask, past_key_values=filled)
    with pytest.raises(ValueError, match=r"position_ids: expected .* got 35 behind 40 tokens in row 0"):
        few(tokens(2, 5), position_ids=torch.arange(35, 40)[None], past_key_values=filled)
    with pytest.raises(ValueError, match="position_ids: expected "):
        few.generate(tokens(2, 30), **GREEDY, past_key_values=filled)
    few(tokens(2, 1), attention_mask=torch.ones(2, 41), past_key_values=filled)
    assert filled.get_seq_length() == 41


@torch.no_grad()
@pytest.mark.parametrize("make", [*MODELS.values(), lambda: sparse("llama", FEW)], ids=[*MODELS, "drop-in"])
def test_a_mask_of_the_new_tokens_alone_is_refused(make: Any) -> None:
    """Where it was all ones nobody looked at it, and else the zeros were taken for those of other tokens."""
    model = make()
    cache = model(tokens(2, 40), use_cache=True).past_key_values
    for width in (1, 40, 42):
        with pytest.raises(ValueError, match=rf"attention_mask: expected \((B|2), 41\).* got a tensor \(2, {width}\)"):
            model(tokens(2, 1), attention_mask=torch.ones(2, width), past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"window_size": 7}, {"branches": ["slc"]}, {"compress_stride": 8}])
def test_a_cache_of_another_model_is_refused(filled: FlexNSACache, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cache: expected (config|branches)=.*, as the layer has it, got"):
        converted("llama", FEW | changes)(tokens(2, 1), past_key_values=filled)


@torch.no_grad()
def test_converted_layers_attend_as_the_config_says_now(tmp_path: Path) -> None:
    """They went on as they were made, and were saved as what the config said."""
    model, more, x = converted("llama", FEW), converted("llama", ALL), tokens(1, 60)
    assert not torch.equal(model(x).logits, more(x).logits)
    for name in ("num_selected_blocks", "num_local_blocks"):
        model.config.flexnsa[name] = more.config.flexnsa[name]
    assert_close(model(x).logits, more(x).logits)
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path)(x).logits, more(x).logits)


@pytest.mark.parametrize(
    "name", ["compress_stride", "compress_block_size", "index_heads", "index_stride", "index_rank", "share_index"]
)
def test_what_layers_were_made_for_stays(name: str) -> None:
    model, others = converted("llama", INDEXED), {"index_heads": 1, "index_rank": 3, "index_stride": 2}
    model.config.flexnsa[name] = value = others.get(name, 2 * INDEXED.get(name, 1))
    message = f"config.flexnsa: expected {name}=.*, for which layers were made, got {value}"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 9))
    model.config.flexnsa = INDEXED | {"branches": ["slc"]}
    with pytest.raises(ValueError, match=r"config.flexnsa: expected branches=.*, for which layers were made, got"):
        model(tokens(1, 9))


def test_a_vocabulary_that_has_grown_is_written_and_read(tmp_path: Path) -> None:
    """A run was written that nothing could read: its config told of the old one."""
    model, x = own(), torch.randint(64, 70, (1, 20))
    model.resize_token_embeddings(70)
    model.save_run(tmp_path / "run.safetensors")
    assert_close(FlexNSAForCausalLM.from_run(tmp_path / "run.safetensors")(x).logits, model(x).logits)


def test_tied_embeddings_are_refused_to_the_own_decoder() -> None:
    """They were promised by the config, and not there."""
    with pytest.raises(ValueError, match="tie_word_embeddings: expected False of the library's own decoder, got True"):
        own(tie_word_embeddings=True)


@torch.no_grad()
def test_a_cache_whose_layers_share_a_part_is_refused(few: Any) -> None:
    cache: Any = FlexNSACache(few.config)
    cache.layers[1] = cache.layers[0]
    with pytest.raises(ValueError, match=r"^(cache|past_key_values): expected a part of its own for each layer"):
        few(tokens(2, 20), past_key_values=cache)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_a_first_call_that_fails_leaves_a_cache_for_any_number_of_rows(few: Any) -> None:
    cache: Any = FlexNSACache(few.config)

    def stop(*_: object) -> None:
        raise RuntimeError("stopped")

    first = next(module for name, module in few.named_modules() if name.endswith(("q_proj", "w_q")))
    hook = first.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        few(tokens(2, 20), past_key_values=cache)
    hook.remove()
    few(tokens(3, 20), past_key_values=cache)
    assert cache.get_seq_length() == 20


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
