"""Memory that grows from step to step is found and so is the rank where it does; what is flat is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis import run_case, soak
from flexnsa.lm.diagnosis.memory import growth, report_growth, summarize
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.parallel import joined_ranks
from tests.lm.cli.tiny_run import write_text
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


def test_growth_is_told_from_a_single_step_up_whether_it_drips_or_comes_in_gulps() -> None:
    noise = [(7 * at) % 5 for at in range(100)]
    drip = [1000 * at for at in range(100)]
    gulps = [10_000 * (at // 10) for at in range(100)]
    once = [0 if at < 80 else 50_000 for at in range(100)]
    first_steps = [at * 10_000 if at < 20 else 200_000 for at in range(100)]
    assert growth([a + b for a, b in zip(noise, drip, strict=True)]) == pytest.approx(1000, rel=0.01)
    assert growth(gulps) == pytest.approx(1000, rel=0.05)
    for flat in (once, first_steps, noise, [5], [5, 5]):
        assert growth(flat) == pytest.approx(0, abs=1)


def test_the_command_soaks_a_model_and_leaves_with_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, seen = write_text(tmp_path / "text"), tmp_path / "seen.json"
    sizes = "--dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 2 --seq-len 24"
    command = ["diagnose", "soak", "--text", str(text), *sizes.split(), "--out", str(tmp_path / "case")]
    main([*command, "--device", "cpu", "--steps", "6", "--threshold", "1000", "--json", str(seen)])
    said = capsys.readouterr().out
    assert said.startswith("flat: resident memory grows by ")
    assert "in the median of 6 steps." in said
    record = json.loads(seen.read_text())
    assert record["environment"]["torch"] == torch.__version__
    (rank,) = record["ranks"]
    assert len(rank["samples"]) == 6
    warm = [sample["seconds"] for sample in rank["samples"][1:]]
    assert rank["tokens_per_second"] == pytest.approx(2 * 24 / median(warm))
    with pytest.raises(SystemExit) as left:
        main([*command, "--device", "cpu", "--limit", "0.001"])
    assert left.value.code == 1
    assert "over time: after 0.001 s rank 0 in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--limit nan", "--limit: expected a finite number, got nan"),
        ("--ranks 0", "--ranks: expected 1, or more and a way to be parallel, got 0"),
        ("--ranks 3", r"--batch-size: expected batch_size * grad_accumulation to be a multiple of 3 processes, got 8"),
        ("--steps 1", "--steps: expected at least 2, got 1"),
        ("--threshold -1", "--threshold: expected a positive, finite number, got -1"),
    ],
)
def test_what_is_wrong_is_named_before_a_process_is_started(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path / "text"), tmp_path / "case"
    command = ["diagnose", "soak", "--text", str(text), "--seq-len", "24", "--device", "cpu", "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main([*command, *options.split()])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
