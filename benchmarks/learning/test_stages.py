"""Models that train in stages for equal seconds, on text of which nothing is both learned and held out."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.packages import Package, halves, without_known_files
from benchmarks.learning.stages import (
    NSA,
    STAGES,
    StagedRun,
    copies_from,
    cut_at,
    drawn,
    job_of,
    main,
    model_of,
    stages_until,
)
from benchmarks.learning.workers import Point

LINES = [b"def function_%03d(argument): return %d\n" % (number, number) for number in range(40)]


def package(name: str, *files: bytes) -> Package:
    return Package(name, list(files))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.5e-3), (0.35, 1e-3)])
def test_the_first_stage_has_a_learning_rate_of_its_own(share: float, expected: float, tmp_path: Path) -> None:
    text = f"{tmp_path}/text.pt"
    run = StagedRun(
        {"model": "dense, first 1.5", "lr": 1e-3, "seed": 0, "device": "cpu", "tiny": True, "text": text}, print
    )
    run.step = 100  # after the warm-up
    run.train_step(share)
    rates = [float(group["lr"]) for group in run.optimizer.param_groups]
    assert rates == pytest.approx([expected * rate for rate in run.rates])


@pytest.mark.parametrize("model", NSA)
def test_models_of_a_seed_start_with_the_same_weights(model: str) -> None:
    tokens = torch.arange(64)[None]
    dense, sparse = (model_of(name, 1, tiny=True) for name in ("dense", model))
    sparse.attend_densely()
    torch.testing.assert_close(sparse(tokens), dense(tokens), rtol=0, atol=1e-6)


def test_files_that_the_training_text_nearly_has_are_left_out() -> None:
    known, new = b"".join(LINES[:20]), b"".join(LINES[20:])
    half_known = b"".join(LINES[15:25])
    held_out = [package("sibling", known, half_known), package("other", new, b"x = 1\n")]
    assert without_known_files([package("learned", known)], held_out) == [package("other", new)]


def test_each_file_is_in_one_half() -> None:
    files = LINES[:20]
    first, second = halves([package("all", *files)])
    assert sorted(first[0].files + second[0].files) == sorted(files)
    assert first[0].files
    assert second[0].files


def test_all_models_draw_the_same_rows() -> None:
    text = torch.arange(256, dtype=torch.uint8).repeat(4)
    assert torch.equal(drawn(text, 64, 3, 0, 7).tokens, drawn(text, 64, 3, 0, 7).tokens)
    assert not torch.equal(drawn(text, 64, 3, 0, 7).tokens, drawn(text, 64, 3, 0, 8).tokens)


def test_copying_begins_where_far_bytes_cost_less_than_near_ones() -> None:
    looks = [[0, 0.0, 8, 8, 8, 8, 7.9], [10, 1.0, 3, 2, 2, 2, 2.5], [20, 2.0, 2, 1, 1, 1, 0.9]]
    assert copies_from({"looks": looks}) == 20
    assert copies_from({"looks": looks[:2]}) is None


def test_a_job_that_names_no_model_is_refused() -> None:
    assert job_of("nsa, dense first:8e-4:1") == {"model": "nsa, dense first", "lr": 8e-4, "seed": 1}
    with pytest.raises(ValueError, match=r"--job: expected one of nsa, .*, got 'gpt'"):
        job_of("gpt:1e-3:0")


@pytest.mark.parametrize(("model", "taught"), [("nsa, dense first", True), ("nsa, dense first, then indexers", False)])
def test_indexers_learn_in_a_dense_stage_unless_they_come_later(model: str, taught: bool, tmp_path: Path) -> None:
    text = f"{tmp_path}/text.pt"
    run = StagedRun({"model": model, "lr": 1e-3, "seed": 0, "device": "cpu", "tiny": True, "text": text}, print)
    with_loss: list[bool] = []
    run.model.register_forward_pre_hook(lambda *call: with_loss.append("selection" in call[2]), with_kwargs=True)
    attends: list[Any] = []
    for share in (0.0, 0.2):
        run.train_step(share)
        layers: Any = run.model.layers
        attends.append([layer.attention.dense_branches for layer in layers])
    assert with_loss == [taught, True]
    assert attends == [[("slc",)] * 2, [None] * 2]


def test_a_last_stage_can_be_left_out(tmp_path: Path) -> None:
    assert stages_until(32768) == STAGES
    assert stages_until(8192) == ((2048, 0.3), (8192, 0.7))
    assert cut_at(stages_until(8192), 0.8) == [(2048, 0.3), (8192, 0.5), (8192, pytest.approx(0.2))]
    assert cut_at(STAGES, 0.5) == [*STAGES]  # where a stage ends anyway
    recorded, text = f"{tmp_path}/stages.json", f"{tmp_path}/text.pt"
    tiny = ["--tiny", "--device", "cpu", "--seconds", "1", "--ends", "8192"]
    main(["--job", "dense:1e-3:0", *tiny, "--json", recorded, "--text", text])
    file = json.loads(Path(recorded).read_text())
    (point,) = file["points"]
    assert file["stages"] == [[2048, 0.3], [8192, 0.7]]
    assert len(point["steps"]) == 2
    assert "report 8k" in point
    assert "report 32k" not in point


@pytest.mark.parametrize("model", ["nsa, dense first, then indexers", "nsa, dense first, shared index 3", "dense"])
def test_a_model_trains_through_all_stages(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"model": model, "lr": 1e-3, "seed": 0, "device": "cpu", "tiny": True, "text": f"{tmp_path}/text.pt"}
    points: list[Point] = []
    run = StagedRun(job | {"seconds": 2.0}, points.append)
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    run.train(math.inf)
    run.measure()
    assert points[-1]["steps"] == [3, 3, 5]  # the first one of each takes no time
    assert points[-1]["looks"][-1][0] == 11
    assert 0 < points[-1]["report 32k"]["mean"] < 8.2


def test_jobs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "stages.json"
    jobs = ["--job", "nsa:1e-3:0", "--job", "dense:1e-3:0", "--text", f"{tmp_path}/text.pt"]
    main([*jobs, "--tiny", "--device", "cpu", "--seconds", "1", "--json", f"{recorded}"])
    assert [point["model"] for point in json.loads(recorded.read_text())["points"]] == ["nsa", "dense"]
    assert "report 32k" in capsys.readouterr().out
