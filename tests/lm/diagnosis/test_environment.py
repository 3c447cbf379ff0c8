"""The environment of a run is printed and kept in its folder; an allocator's settings stand in it from the start."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexnsa.lm import Trainer
from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis import Outcome
from flexnsa.lm.diagnosis.environment import report_environment
from flexnsa.lm.diagnosis.memory import report_peaks
from tests.lm.cli.tiny_run import train as train_small
from tests.lm.cli.tiny_run import write_text
from tests.lm.diagnosis.conftest import Diagnose


def test_the_command_gives_a_sentence_a_table_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "7"}
    for name, value in {**variables, "SECRET": "not ours to show"}.items():
        monkeypatch.setenv(name, value)
    main(["diagnose", "environment", "--json", str(tmp_path / "seen.json")])
    record = json.loads((tmp_path / "seen.json").read_text())["environment"]
    expected = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    assert expected.items() <= record.items()
    assert variables.items() <= record["variables"].items()
    assert "SECRET" not in record["variables"]
    assert {"triton", "cuda", "driver", "cudnn", "nccl", "commit", "python", "platform", "time"} <= record.keys()
    assert len(record["gpus"]) == torch.cuda.device_count()
    sentence, _, table = capsys.readouterr().out.partition("\n")
    assert sentence.endswith(".")
    assert f"torch {torch.__version__}" in sentence
    assert re.search(r"^NCCL_DEBUG +INFO$", table, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", table, re.MULTILINE)


def test_gpus_are_counted_by_kind_and_listed() -> None:
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8, "multiprocessors": 132}
    record = {"commit": "abc", "torch": "2.11", "cuda": "13.0", "driver": "580.1", "threads": 8, "cores": 16}
    record |= {"gpus": [gpu | {"index": 0}, gpu | {"index": 1}], "variables": {}}
    report = report_environment(record)
    assert "CUDA 13.0 with driver 580.1 on 2 x NVIDIA H200" in report.sentence
    assert re.search(r"^GPU 1 +NVIDIA H200, 139.8 GiB, 132 multiprocessors of 9.0$", report.table, re.MULTILINE)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    said = refused(main, ["diagnose", "environment", "--json", str(tmp_path)])
    assert f"argument --json: expected a file, got '{tmp_path}', which is a folder" in said


def test_every_start_of_a_run_adds_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> list[dict[str, object]]:
        train_small(tmp_path / "run", write_text(tmp_path / "text"))
        return [json.loads(line) for line in (tmp_path / "run" / "environment.json").read_text().splitlines()]

    with monkeypatch.context() as stopping:
        step = Trainer.train_step
        stopping.setattr(Trainer, "train_step", lambda self: (signal.raise_signal(signal.SIGTERM), step(self))[1])
        with pytest.raises(SystemExit):
            start()
    assert len(start()) == 2
    records = start()  # there is nothing left to do
    assert len(records) == 2
    assert records[0]["torch"] == torch.__version__
    assert not list((tmp_path / "run").glob("*.tmp"))


SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=3"


def test_the_command_takes_steps_under_a_setting(tmp_path: Path, diagnose: Diagnose) -> None:
    ran = diagnose("allocator", "--steps 2 --setting", SETTING)
    assert ran.out.startswith(f"resident memory peaks lowest under {SETTING}: ")
    assert ran.record["settings"][SETTING]["values"]["resident_mib"] > 50
    variables = json.loads((tmp_path / "out" / "0" / "environment.json").read_text())["variables"]
    assert SETTING.split() == [f"{name}={variables[name]}" for name in ("PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")]
    ran = diagnose("allocator", "--setting expandable")
    assert ran.status == 2
    assert "argument --setting: expected NAME=VALUE" in ran.err


def test_the_lowest_peak_is_named_with_its_speed() -> None:
    def outcome(reserved: float, speed: float) -> Outcome:
        values = {"reserved_mib": reserved, "allocated_mib": 80.0, "resident_mib": 9.0, "tokens_per_second": speed}
        return Outcome("passed", "", 1.0, values)

    report = report_peaks({"segments=off": outcome(2000, 100), "segments=on": outcome(1500, 90)})
    assert report.passed
    assert report.sentence == (
        "reserved memory peaks lowest under segments=on: 1,500 MiB at 0.90 times the speed of segments=off, "
        "whose peak is 2,000 MiB."
    )
    failed = report_peaks({"bad": Outcome("failed", "rank 0: no such setting", 1.0, {})})
    assert not failed.passed
    assert failed.sentence == "no setting came to its end."
    assert "no such setting" in failed.table
