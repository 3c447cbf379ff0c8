"""What is recorded of recall and of text is of the models, and of the trainings, that there are."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.harness.options import RESULTS
from benchmarks.learning import language, recall
from flexnsa import NSAConfig
from flexnsa.lm import PRESETS, TRAIN_PRESETS, DecoderConfig, TrainConfig
from flexnsa.lm.training.config import completed


@pytest.mark.parametrize(
    ("size", "name"), [("gpu", "recall_h200"), ("ablation", "recall_ablation_h200"), ("cpu", "recall_cpu")]
)
def test_recall_that_is_recorded_is_what_would_be_run(size: str, name: str) -> None:
    record, now = json.loads((RESULTS / f"{name}.json").read_text()), recall.SIZES[size]
    models = {name: variant.configure(now.model).to_dict() for name, variant in now.variants.items()}
    assert {point["variant"] for point in record["points"]} <= set(models)
    assert not recall.differences(record["setting"]["models"], json.loads(json.dumps(models)))
    assert not recall.differences(record["plan"], json.loads(json.dumps(asdict(now.plan))))


def test_text_that_is_recorded_is_what_would_be_run() -> None:
    record = json.loads((RESULTS / "language_h200.json").read_text())
    for name in {point["model"] for point in record["points"]}:
        recorded = asdict(language.Model()) | record["setting"]["models"][name]  # what was not there yet was not used
        assert recorded == json.loads(json.dumps(asdict(language.MODELS[name]))), name
    for name, size in record["setting"]["sizes"].items():
        now = language.SIZES[name]
        model = size["model"] | {"nsa": NSAConfig(**size["model"]["nsa"])}
        assert DecoderConfig(**model) == now.model, name
        assert asdict(TrainConfig()) | size["training"] == asdict(now.training), name


def test_the_preset_for_text_is_the_best_nsa_that_is_recorded() -> None:
    points = json.loads((RESULTS / "language_h200.json").read_text())["points"]
    whole = [p for p in points if p["size"] == "m7c-125m" and p["steps"] == 2000 and p["model"].startswith("NSA")]
    best = min(whole, key=lambda point: point["finals"]["bits"]["mean"])
    size, model = language.SIZES["m7c-125m"], language.MODELS[best["model"]]
    assert PRESETS["text-125m"] == model.configure(size.model)
    training = replace(size.training, steps=2000, compressor_lr=model.compressor_rate)
    looks = {"eval_sequences": training.eval_sequences, "checkpoint_every": training.checkpoint_every}
    assert completed(replace(TRAIN_PRESETS["text-125m"], **looks)) == training
