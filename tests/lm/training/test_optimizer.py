"""Learning rates: the schedule; compressors learn slower than all else, and nothing is left out or learned twice."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention
from flexnsa.lm import TRAIN_PRESETS, DecoderConfig, DecoderLM, TrainConfig, parameter_groups
from flexnsa.lm.training.checkpoint import load_checkpoint, save_checkpoint
from tests.lm.training.runs import trainer_of
from tests.support.inputs import TINY

MODEL = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, nsa=TINY)
TRAINING = TrainConfig(steps=8, batch_size=2, seq_len=40, warmup_steps=2, eval_sequences=4)


@pytest.mark.parametrize("compression", ["linear", "mlp"])
def test_in_a_step_compressors_move_a_tenth_as_far_and_all_else_as_far(text_folder: Path, compression: str):
    slow, plain = (_moves(text_folder, compression, rate) for rate in (None, 1.0))
    compressors = {name for name in plain if ".phi_" in name}
    assert len(compressors) == 2 * 2 * {"linear": 2, "mlp": 3}[compression]
    for name, move in plain.items():
        assert move.any(), name
        expected = 0.1 * move if name in compressors else move
        torch.testing.assert_close(slow[name], expected, rtol=1e-9, atol=1e-15)


def test_groups_hold_every_parameter_once_however_modules_share_it():
    model = DecoderLM(MODEL)
    model.head.weight = model.embedding.weight
    first, second = _attentions(model)
    first.w_k_cmp = first.w_k_slc
    first.add_module("phi_v", nn.Linear(4, 4))  # of one's own
    second.phi_v = first.phi_k
    second.add_module("phi_k", nn.Linear(8, 8))
    groups = parameter_groups(model, lr=0.5, weight_decay=0.3, compressor_lr=0.25)
    rates = {parameter: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert rates.keys() == {*model.parameters()}
    for module, name, expected in (
        (model, "head.weight", (0.5, 0.0)),
        (first, "w_k_cmp.weight", (0.5, 0.3)),
        (first, "phi_k.project.weight", (0.125, 0.3)),
        (first, "phi_v.weight", (0.125, 0.3)),
        (second, "phi_k.weight", (0.125, 0.3)),
        (second, "phi_k.bias", (0.125, 0.0)),
    ):
        assert rates[module.get_parameter(name)] == expected


@pytest.mark.parametrize("fields", [{"attention": "dense"}, {"compression": "mean"}, {"branches": ("slc", "win")}])
def test_without_compressors_that_learn_there_is_one_rate(fields: dict[str, Any]):
    groups = parameter_groups(DecoderLM(replace(MODEL, **fields)), lr=1e-3)
    assert [group["lr"] for group in groups] == [1e-3]


@pytest.mark.parametrize(("name", "value", "error"), [("lr", -1.0, ValueError), ("compressor_lr", None, TypeError)])
def test_groups_name_the_rate_that_is_none(name: str, value: Any, error: type[Exception]):
    with pytest.raises(error, match=f"^{name}: expected .* got {value}"):
        parameter_groups(nn.Linear(2, 2), **{"lr": 1.0, name: value})


def test_a_run_that_leaves_it_open_keeps_the_rate_that_it_began_with(text_folder: Path, tmp_path: Path):
    """However often it is stopped, its results stay the same."""
    path = tmp_path / "checkpoint.safetensors"
    whole = trainer_of(text_folder, MODEL, replace(TRAINING, compressor_lr=0.5))
    whole.train_step()
    save_checkpoint(path, whole)
    for _ in range(2):
        resumed = trainer_of(text_folder, MODEL, TRAINING, seed=99)
        load_checkpoint(path, resumed)
        assert resumed.train_step() == whole.train_step()
        assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
        save_checkpoint(path, resumed)


def _moves(text_folder: Path, compression: str, rate: float | None) -> dict[str, Tensor]:
    """Return how far each parameter goes in a step, in fp64."""
    model, training = replace(MODEL, compression=compression), replace(TRAINING, compressor_lr=rate)
    trainer = trainer_of(text_folder, model, training)
    trainer.model.double()
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train_step()
    return {name: parameter.detach() - before[name] for name, parameter in trainer.model.named_parameters()}


def _attentions(model: DecoderLM) -> list[NativeSparseAttention]:
    return [module for module in model.modules() if isinstance(module, NativeSparseAttention)]


def test_rate_rises_to_lr_and_falls_to_min_lr():
    config = TrainConfig(steps=110, warmup_steps=10, lr=2.0, min_lr=0.25)
    rates = [config.learning_rate(step) for step in range(111)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert rates[60] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[110] == pytest.approx(0.5)
    assert all(before >= after for before, after in pairwise(rates[10:]))
    assert replace(config, warmup_steps=0).learning_rate(0) == 2.0


def test_production_preset_is_the_documented_run():
    config = TRAIN_PRESETS["m7c-125m"]
    assert (config.seq_len, config.precision, config.lr, config.weight_decay, config.clip, config.warmup_steps) == (
        *(2048, "bf16", 2e-4, 0.01, 1.0, 2000),
    )


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("steps", 0, ValueError),
        ("batch_size", 2.0, TypeError),
        ("seq_len", -1, ValueError),
        ("lr", float("nan"), ValueError),
        ("lr", "fast", TypeError),
        ("min_lr", 1.5, ValueError),
        ("beta2", 1.0, ValueError),
        ("clip", 0.0, ValueError),
        ("compressor_lr", -0.1, ValueError),
        ("precision", "fp16", ValueError),
        ("grad_accumulation", True, TypeError),
        ("dense_stages", 1, ValueError),
    ],
)
def test_errors_name_the_field(field: str, value: object, error: type[Exception]):
    with pytest.raises(error, match=rf"^{field}: expected .* got {value!r}"):
        TrainConfig(**cast("dict[str, Any]", {field: value}))
