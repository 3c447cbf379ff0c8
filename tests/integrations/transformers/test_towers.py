"""Models of several towers: each keeps the attention and the options it had, however the model is saved or copied."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
)

from flexnsa.transformers import DropInOptions
from flexnsa.transformers.classes import FlexNSALlamaConfig
from tests.integrations.transformers.families import FEW, SIZES, sparse, tokens
from tests.integrations.transformers.multimodal import attentions, choice_of, llava, page, paths, shape_of, small_config

TEXT: dict[str, str] = {"text_config": "flexnsa"}
FEWER = FEW | {"num_selected_blocks": 3}
TYPES = {
    "llava": "LlavaForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "blip-2": "Blip2ForConditionalGeneration",
    "csm": "CsmForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}
"""Of different names for the tower of text, and with towers in towers."""


def few_llava() -> Any:
    """A Llava whose text tower leaves keys out, by options in the config of the whole."""
    model = llava()
    model.config.flexnsa = FEW
    model.set_attn_implementation(TEXT)
    return model


FROM_CONFIG: dict[str, Callable[[Any], Any]] = {
    "from_config": lambda old: AutoModelForImageTextToText.from_config(AutoConfig.for_model(**old.to_dict())),
    "class": lambda old: LlavaForConditionalGeneration(deepcopy(old)),
}


def copied(model: Any, way: str) -> Any:
    if way not in FROM_CONFIG:
        return deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    new = FROM_CONFIG[way](model.config)
    new.load_state_dict(model.state_dict())
    return new.eval().double()


def saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("model_type", TYPES)
def test_every_tower_comes_back_with_the_attention_and_options_it_had(model_type: str, tmp_path: Path) -> None:
    """The choices of all towers were reset when the config of the whole was read."""
    config, model_class = small_config(model_type), getattr(transformers, TYPES[model_type])
    config.flexnsa = FEW
    found = []
    for path in paths(config):
        try:
            model = shape_of(model_class, deepcopy(config), attn_implementation=choice_of(path, "flexnsa"))
        except ValueError:  # the tower is not causal
            continue
        want = attentions(model)
        found += [path[-1]] * (("flexnsa", FEW) in want.values())
        model.config.save_pretrained(tmp_path)
        again = AutoConfig.from_pretrained(tmp_path)
        assert attentions(shape_of(model_class, again)) == want, path
        assert again.to_dict() == AutoConfig.for_model(**again.to_dict()).to_dict()
    assert {"text_config", "decoder", "depth_decoder_config"} & {*found}


class TwoTowersConfig(PreTrainedConfig):
    """As people write them: towers of other names, made before or after all else."""

    model_type = "two_towers"
    sub_configs: ClassVar[Any] = {"llm_config": LlamaConfig, "language_config": LlamaConfig}

    def __init__(
        self, *, llm_config: Any = None, language_config: Any = None, towers_first: bool = True, **rest: Any
    ) -> None:
        self.towers_first = towers_first
        if not towers_first:
            super().__init__(**rest)
        self.llm_config, self.language_config = (LlamaConfig(**x or SIZES) for x in (llm_config, language_config))
        if towers_first:
            super().__init__(**rest)


@pytest.mark.parametrize("towers_first", [True, False])
def test_configs_of_ones_own_keep_the_choices_of_their_towers(towers_first: bool, tmp_path: Path) -> None:
    config: Any = TwoTowersConfig(towers_first=towers_first)
    config.flexnsa = FEW
    config._attn_implementation = {"llm_config": "flexnsa"}
    config.save_pretrained(tmp_path)
    again = TwoTowersConfig.from_pretrained(tmp_path)
    assert again.llm_config._attn_implementation == "flexnsa"
    assert again.language_config._attn_implementation is None
    assert again.llm_config.flexnsa == FEW


@torch.no_grad()
@pytest.mark.parametrize("chosen", [TEXT, {"": "flexnsa", **TEXT}])
@pytest.mark.parametrize("way", ["set", "given", "in the config"])
def test_a_saved_text_tower_leaves_out_what_it_left_out(chosen: dict[str, str], way: str, tmp_path: Path) -> None:
    """It came back dense: a difference of 5.7."""
    want = few_llava()(**page()).logits
    assert (want - llava()(**page()).logits).abs().max() > 1
    model = llava(**({"attn_implementation": chosen} if way == "given" else {}))
    model.config.flexnsa = FEW
    if way == "set":
        model.set_attn_implementation(chosen)
    elif way == "in the config":
        model.config._attn_implementation = chosen
    assert_close(model(**page()).logits, want)
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path / "once"))
    again = LlavaForConditionalGeneration.from_pretrained(saved(again, tmp_path / "twice"))
    assert_close(again(**page()).logits, want)
    assert again.model.vision_tower.config._attn_implementation == "sdpa"
    assert not hasattr(again.generation_config, "attn_implementation")


@torch.no_grad()
@pytest.mark.parametrize("way", ["deepcopy", "pickle", *FROM_CONFIG])
def test_a_copy_has_the_text_tower_of_its_model(way: str) -> None:
    model = few_llava()
    copy, want = copied(model, way), model(**page()).logits
    assert_close(copy(**page()).logits, want)
    copy.config.flexnsa = FEWER
    assert (copy(**page()).logits - want).abs().max() > 1e-2
    assert_close(model(**page()).logits, want)


@torch.no_grad()
def test_towers_alone_are_saved_with_their_attention_and_options(tmp_path: Path) -> None:
    model = few_llava()
    tower, x = model.model.language_model, tokens(1, 70)
    again = AutoModel.from_pretrained(saved(tower, tmp_path))
    assert_close(again(x).last_hidden_state, tower(x).last_hidden_state)
    alone = LlamaConfig.from_pretrained(saved(model, tmp_path))
    assert (alone._attn_implementation, alone.flexnsa) == ("flexnsa", FEW)


@torch.no_grad()
@pytest.mark.parametrize("given", [None, {"vision_config": "eager"}, {"": "eager"}, {}])
def test_an_argument_that_says_nothing_of_a_tower_leaves_flexnsa_to_it(given: Any, tmp_path: Path) -> None:
    model = few_llava()
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path), attn_implementation=given)
    model.set_attn_implementation(given or {})
    assert_close(again(**page()).logits, model(**page()).logits)
    assert again.model.vision_tower.config._attn_implementation == (given or {}).get("vision_config", "sdpa")


@pytest.mark.parametrize("given", [None, {"talker_config": "eager"}, {"thinker_config": {"audio_config": "eager"}}])
def test_an_argument_that_says_nothing_of_a_tower_in_a_tower_leaves_flexnsa_to_it(given: Any, tmp_path: Path) -> None:
    """What is below a tower that is not mentioned was reset."""
    config = small_config("qwen2_5_omni")
    config._attn_implementation = {"thinker_config": TEXT}
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path, attn_implementation=given)
    assert again.thinker_config.text_config._attn_implementation == "flexnsa"
    assert again.thinker_config.vision_config._attn_implementation is None


@torch.no_grad()
@pytest.mark.parametrize("given", ["sdpa", {"text_config": "sdpa"}])
def test_another_attention_can_still_be_asked_for_on_purpose(given: Any, tmp_path: Path) -> None:
    path, want = saved(few_llava(), tmp_path / "few"), llava()(**page()).logits
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation=given)
    assert_close(model(**page()).logits, want)
    model = AutoModelForImageTextToText.from_pretrained(path)
    model.set_attn_implementation(given)
    assert "attn_implementation" not in model.config.to_dict()
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path / "dense"))
    assert_close(again(**page()).logits, want)


@torch.no_grad()
def test_options_of_the_whole_reach_the_text_tower_whenever_they_are_set(tmp_path: Path) -> None:
    """They were not looked at: a difference of 5.7."""
    want = few_llava()(**page()).logits
    late = llava()
    late.set_attn_implementation(TEXT)
    assert_close(late(**page()).logits, llava()(**page()).logits)
    late.config.flexnsa = FEW
    assert_close(late(**page()).logits, want)
    changed = AutoModelForImageTextToText.from_pretrained(saved(late, tmp_path))
    changed.config.flexnsa = FEWER
    fewer = changed(**page()).logits
    assert (fewer - want).abs().max() > 1e-2
    changed.config.flexnsa = dict(FEW)
    assert_close(changed(**page()).logits, want)
    changed = AutoModelForImageTextToText.from_pretrained(saved(late, tmp_path))
    changed.config.flexnsa["num_selected_blocks"] = 3
    assert_close(changed(**page()).logits, fewer)
    delattr(changed.config, "flexnsa")
    assert not hasattr(changed.config, "flexnsa")
    assert_close(changed(**page()).logits, llava()(**page()).logits)


@torch.no_grad()
def test_options_of_a_tower_win_over_those_of_the_whole(tmp_path: Path) -> None:
    want = few_llava()(**page()).logits
    model = llava()
    model.set_attn_implementation(TEXT)
    model.config.text_config.flexnsa = FEW
    model.config.flexnsa = FEWER
    assert_close(model(**page()).logits, want)
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path))
    again.config.flexnsa = {}
    assert_close(again(**page()).logits, want)
    assert DropInOptions.of(again.config.text_config).sizes.num_selected_blocks == FEW["num_selected_blocks"]


@torch.no_grad()
def test_a_converted_tower_comes_back_with_its_layers(tmp_path: Path) -> None:
    model = llava(text=FlexNSALlamaConfig(**SIZES, flexnsa=FEW))  # pyright: ignore[reportCallIssue]
    model.config.flexnsa = {"branches": ["slc"]}  # of towers that have none of their own
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path))
    assert type(again.model.language_model) is type(model.model.language_model)
    assert again.config.text_config.flexnsa == FEW
    assert_close(again(**page()).logits, model(**page()).logits)
    with pytest.raises(ValueError, match="attn_implementation: expected none for a model whose layers are NSA"):
        AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=TEXT)


def test_a_tower_that_is_not_causal_is_refused() -> None:
    message = "is_causal: expected True .* got False in all layers of a CLIPVisionModel; .*{'text_config': 'flexnsa'}"
    with pytest.raises(ValueError, match=message):
        llava(attn_implementation="flexnsa")
    with pytest.raises(ValueError, match=message):
        llava().set_attn_implementation("flexnsa")


def test_without_the_import_saved_models_are_refused(tmp_path: Path) -> None:
    code = "import transformers"
    for auto, model in (("ImageTextToText", few_llava()), ("CausalLM", sparse("llama", FEW))):
        saved(model, tmp_path / auto)
        code += f"""
try:
    transformers.AutoModelFor{auto}.from_pretrained({str(tmp_path / auto)!r})
except ValueError as error:
    print("flexnsa" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True"] * 2
