"""transformers' Trainer: it learns, goes on where it was, and two processes take the steps of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from flexnsa.lm import parameter_groups
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.schedule import pretrained_parameters
from tests.integrations.transformers import train_text
from tests.integrations.transformers.train_text import losses, train_together, trainer
from tests.parallel.processes import run_together


@pytest.mark.parametrize("name", train_text.MODELS)
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    run = trainer(name, tmp_path, steps=24)
    run.train()
    loss = losses(run)
    assert len(loss) == 24
    assert sum(loss[-5:]) / 5 < 0.7 * loss[0]


@pytest.mark.parametrize("name", train_text.MODELS)
def test_evaluation_gives_the_loss_of_the_model(name: str, tmp_path: Path) -> None:
    run = trainer(name, tmp_path, steps=1)
    run.eval_dataset = [run.train_dataset[i] for i in range(4)]
    rows = torch.stack([row["input_ids"] for row in run.eval_dataset])
    with torch.no_grad():
        want = run.model(rows, labels=rows).loss.item()
    assert run.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ["own", "converted"])
def test_compressors_have_a_rate_of_their_own(name: str) -> None:
    model = train_text.MODELS[name]()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, lr=1.0, compressor_lr=0.1)
    rates = {names[parameter]: group["lr"] for group in groups for parameter in group["params"]}
    assert rates == {name: 0.1 if ".phi_" in name or ".compress_" in name else 1.0 for name in names.values()}
    assert {*rates.values()} == {0.1, 1.0}


def test_a_run_that_is_resumed_ends_where_one_that_was_not_does(tmp_path: Path) -> None:
    whole = trainer("converted", tmp_path / "whole", steps=6, schedule=True)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer("converted", tmp_path / "parts", steps=3, schedule=True, **saving).train()
    resumed = trainer("converted", tmp_path / "parts", steps=6, schedule=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    for (name, got), want in zip(resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert_close(got, want, msg=name)


def test_a_schedule_holds_still_what_was_pretrained_and_opens_branches(tmp_path: Path) -> None:
    run = trainer("converted", tmp_path, steps=2, schedule=True, save_strategy="steps", save_steps=2)
    before = {name: x.clone() for name, x in run.model.named_parameters()}
    held = {id(parameter) for parameter in pretrained_parameters(run.model)}
    run.train()
    changed = {name for name, x in run.model.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {name for name, x in run.model.named_parameters() if id(x) not in held}
    new = {f"{kind}_proj_{tag}" for kind in "kv" for tag in ("cmp", "win")} | {"project", "gate"}
    assert {name.split(".")[-2] for name in changed if "self_attn" in name} == new
    layers = [module for module in run.model.modules() if isinstance(module, ConvertedAttention)]
    assert {layer.options.opening for layer in layers} == {0.5}
    again = type(run.model).from_pretrained(tmp_path / "checkpoint-2")
    assert again.model.layers[0].self_attn.options.opening == 0.5  # as when it was saved
    run = trainer("converted", tmp_path, steps=3, schedule=True)
    run.train()
    assert not any(torch.equal(x, before[name]) for name, x in run.model.named_parameters())
    run = trainer("converted", tmp_path, steps=5, schedule=True)
    run.train()
    assert run.model.config.flexnsa["opening"] == 1
    assert all(layer.options.opening == 1 for layer in run.model.modules() if isinstance(layer, ConvertedAttention))


def test_a_schedule_is_for_converted_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model: expected a converted one, got 'LlamaForCausalLM'"):
        trainer("drop-in", tmp_path, steps=1, schedule=True).train()


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    run = trainer("converted", tmp_path / "one", steps=3, batch=8)
    run.train()
    run_together(2, tmp_path / "output", train_together, tmp_path / "two")
    got = load_file(tmp_path / "two" / "model.safetensors")
    # Adam moves every number by about 3e-3 a step, however small its gradient is, so rounding is seen.
    for name, want in run.model.state_dict().items():
        assert_close(got[name], want, atol=2e-4, rtol=0, msg=name)
