"""Files that version 0.1 wrote still load and go on as they would have: runs, state dicts, caches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_run import RECORDED, RUN, WHOLE_LOG, generate_options, read_losses, train_options
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache, NSAConfig
from flexnsa.lm import DecoderConfig, DecoderLM, Sampling
from flexnsa.lm.cli import main

SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
STATE_DICTS: dict[str, Any] = torch.load(RECORDED / "state_dicts.pt", weights_only=True)
IMPLS = ["reference", "sdpa"]


def test_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(RUN, folder)
    main(train_options(folder))
    whole, kept, resumed = (read_losses(log) for log in (WHOLE_LOG, RUN / "log.jsonl", folder / "log.jsonl"))
    assert resumed.keys() == whole.keys()
    assert len(kept) < len(whole)
    for step, values in whole.items():
        # What was logged before the stop is kept as it stands; the steps after it are computed here.
        tolerance = 0 if step in kept else 1e-5
        assert resumed[step] == pytest.approx(values, rel=tolerance, abs=0), f"step {step}"


def test_checkpoint_continues_a_prompt_with_the_same_bytes(capsysbinary: pytest.CaptureFixture[bytes]):
    main(generate_options(RUN))
    assert capsysbinary.readouterr().out == (RECORDED / "generated.txt").read_bytes()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", STATE_DICTS["layers"])
def test_layer_loads_its_weights_and_computes_the_same(name: str, impl: str):
    recorded = STATE_DICTS["layers"][name]
    layer = NativeSparseAttention(**recorded["arguments"], config=SMALL, impl=impl)
    layer.load_state_dict(recorded["state"], strict=True)
    with torch.no_grad():
        _assert_equal(layer.double()(recorded["x"].double()), recorded["out"])


@pytest.mark.parametrize("impl", IMPLS)
def test_model_loads_its_weights_and_predicts_the_same(impl: str):
    model, recorded = _model(impl)
    with torch.no_grad():
        _assert_equal(model(recorded["prompts"]), recorded["logits"])


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_model_continues_prompts_with_the_same_tokens(impl: str, cached: bool):
    model, recorded = _model(impl)
    tokens = recorded["tokens"]
    likeliest = Sampling(temperature=0)
    found = model.generate(recorded["prompts"], tokens.shape[1], sampling=likeliest, cached=cached)
    assert found == tokens.tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_caches_load_and_go_on_with_the_same_tokens(impl: str):
    model, recorded = _model(impl)
    tokens = recorded["tokens"]
    caches = model.new_caches(2, 50)
    for cache, state in zip(caches, recorded["caches_after_10_tokens"], strict=True):
        assert isinstance(cache, NSACache)
        cache.load_state_dict(state)
    with torch.no_grad():
        for step in range(10, tokens.shape[1] - 1):
            logits = model(tokens[:, step : step + 1], caches=caches)
            assert logits[:, 0].argmax(-1).tolist() == tokens[:, step + 1].tolist()


def _model(impl: str) -> tuple[DecoderLM, dict[str, Any]]:
    recorded = STATE_DICTS["model"]
    model = DecoderLM(DecoderConfig.from_dict(recorded["config"] | {"impl": impl}))
    model.load_state_dict(recorded["state"], strict=True)
    return model.double().eval(), recorded


def _assert_equal(found: Tensor, recorded: Tensor) -> None:
    limit = 1e-12 * recorded.abs().max().clamp_min(1)
    assert (found - recorded).abs().max() <= limit
