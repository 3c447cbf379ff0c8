"""The same steps under settings of an allocator, which a process finds before it loads any library."""

from __future__ import annotations

import json
from pathlib import Path

from flexnsa.lm.diagnosis import Outcome
from flexnsa.lm.diagnosis.memory import report_peaks
from tests.lm.diagnosis.conftest import Diagnose

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
