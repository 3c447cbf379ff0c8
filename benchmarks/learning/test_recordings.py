"""What is recorded of recall and of text is of the models, and of the trainings, that there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.harness.options import RESULTS
from benchmarks.learning import language, recall


@pytest.mark.parametrize(
    ("size", "name"), [("gpu", "recall_h200"), ("ablation", "recall_ablation_h200"), ("cpu", "recall_cpu")]
)
def test_recall_that_is_recorded_is_what_would_be_run(size: str, name: str) -> None:
    record, now = json.loads((RESULTS / f"{name}.json").read_text()), recall.SIZES[size]
    models = {name: variant.configure(now.model).to_dict() for name, variant in now.variants.items()}
    assert {point["variant"] for point in record["points"]} == set(models)
    assert not recall.differences(record["setting"]["models"], json.loads(json.dumps(models)))
    assert not recall.differences(record["plan"], json.loads(json.dumps(asdict(now.plan))))


def test_text_that_is_recorded_is_what_would_be_run() -> None:
    record = json.loads((RESULTS / "language_h200.json").read_text())
    for name in {point["model"] for point in record["points"]}:
        assert record["setting"]["models"][name] == _as_recorded(asdict(language.MODELS[name])), name
    for name, size in record["setting"]["sizes"].items():
        now = language.SIZES[name]
        assert size == _as_recorded({"model": now.model.to_dict(), "training": asdict(now.training)}), name


def _as_recorded(values: dict[str, Any]) -> Any:
    return json.loads(json.dumps(values))
