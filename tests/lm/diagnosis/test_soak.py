"""Memory that grows from step to step is found and so is the rank where it does; what is flat is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from flexnsa.lm.diagnosis import run_case, soak
from flexnsa.lm.diagnosis.memory import growth, report_growth, summarize
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.parallel import joined_ranks
from tests.lm.diagnosis.conftest import Diagnose
from tests.parallel.steps import CPU, make_trainer

STEPS = 24


def soak_two_ranks_one_of_which_leaks() -> dict[str, Any]:
    with joined_ranks("ddp", CPU) as ranks:
        trainer = make_trainer(ranks)
        leaked: list[torch.Tensor] = []

        def step() -> None:
            trainer.train_step()
            if ranks.rank == 1:
                leaked.append(torch.ones(MIB // 4))

        summary = summarize(soak(step, STEPS, CPU), tokens=4 * 48, threshold=0.5, rank=ranks.rank)
        return {"ranks": ranks.gather(summary)}


def test_a_leak_of_a_mebibyte_a_step_is_found_on_its_rank(tmp_path: Path) -> None:
    outcome = run_case(tmp_path, soak_two_ranks_one_of_which_leaks, ranks=2, seconds=600)
    assert outcome.passed, outcome.reason
    flat, leaking = outcome.values["ranks"]
    assert flat["grows"] == []
    assert leaking["grows"] == ["resident"]
    assert leaking["mib_per_step"]["resident"] == pytest.approx(1, abs=0.3)
    report = report_growth(outcome.values)
    assert not report.passed
    assert report.sentence.startswith("grows: resident memory grows by +")
    assert "MiB a step on rank 1 at most, of 0.5 allowed" in report.sentence


@pytest.mark.parametrize(
    ("bytes_after", "slope"),
    [
        (lambda step: 1000 * step + (7 * step) % 5, pytest.approx(1000, rel=0.01)),
        (lambda step: 10_000 * (step // 10), pytest.approx(1000, rel=0.05)),
        (lambda step: 0 if step < 80 else 50_000, pytest.approx(0, abs=1)),
        (lambda step: 10_000 * min(step, 20), pytest.approx(0, abs=1)),
        (lambda step: (7 * step) % 5, pytest.approx(0, abs=1)),
    ],
    ids=["a drip and noise", "gulps", "a single step up", "the first steps", "noise"],
)
def test_growth_is_a_leak_whether_it_drips_or_gulps(bytes_after: Callable[[int], int], slope: float) -> None:
    assert growth([bytes_after(step) for step in range(100)]) == slope


def test_one_or_two_steps_have_no_growth() -> None:
    assert growth([5]) == growth([5, 5]) == 0


def test_the_command_soaks_a_model_and_leaves_with_a_status(diagnose: Diagnose) -> None:
    ran = diagnose("soak", "--steps 6 --threshold 1000")
    assert ran.status == 0
    assert ran.out.startswith("flat: resident memory grows by ")
    assert "in the median of 6 steps." in ran.out
    assert ran.record["environment"]["torch"] == torch.__version__
    (rank,) = ran.record["ranks"]
    assert len(rank["samples"]) == 6
    assert rank["tokens_per_second"] == pytest.approx(2 * 24 / median(x["seconds"] for x in rank["samples"][1:]))
    ran = diagnose("soak", "--limit 0.001")
    assert ran.status == 1
    assert "over time: after 0.001 s rank 0 in " in ran.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--limit nan", "--limit: expected a finite number, got nan"),
        ("--ranks 0", "--ranks: expected 1, or more and a way to be parallel, got 0"),
        ("--ranks 3", r"--batch-size: expected batch_size * grad_accumulation to be a multiple of 3 processes, got 2"),
        ("--steps 1", "--steps: expected at least 2, got 1"),
        ("--threshold -1", "--threshold: expected a positive, finite number, got -1"),
    ],
)
def test_wrong_options_are_named_before_a_process_starts(
    options: str, message: str, tmp_path: Path, diagnose: Diagnose
) -> None:
    ran = diagnose("soak", options)
    assert ran.status == 2
    assert message in ran.err
    assert not (tmp_path / "out").exists()
