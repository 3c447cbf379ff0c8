"""The schedule, and what is no hyper-parameter."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from flexnsa.lm import TRAIN_PRESETS, TrainConfig


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
