"""What is read off the measurements: ratios, exponents, labels, and figures that cannot be made; and the runner."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks.attention.cpu_throughput import ratios
from benchmarks.attention.exponents import exponents_table, fit_polynomial
from benchmarks.suite.summary import summary

TICKS = itertools.count()
NEEDED = {
    "transformers.decoding": "transformers",
    "transformers.teaching": "transformers",
    "transformers.up_training": "transformers",
}

ENVIRONMENT = {"device": "abacus", "threads": 1, "torch": "2", "commit": "c0ffee", "load_average": 0.0}


def test_ratios_leave_labelled_points_out() -> None:
    points = [
        {"name": "NSA", "seq_len": 1024, "forward_ms": 1.0, "backward_ms": 1.0},
        {"name": "flash SDPA", "seq_len": 1024, "forward_ms": 2.0, "backward_ms": 3.0},
        {"name": "NSA", "seq_len": 2048, "forward_ms": 1.0, "backward_ms": 1.0},
        {"name": "flash SDPA", "seq_len": 2048, "label": "out of memory"},
    ]
    assert ratios(points, "flash SDPA") == {1024: 2.5}


def test_quadratic_time_is_told_from_linear() -> None:
    lengths = (8192, 16384, 32768, 65536)
    fit = fit_polynomial({length: 1.0 + 2e-4 * length + 5e-9 * length**2 for length in lengths})
    assert (fit.fixed, fit.linear, fit.quadratic) == (pytest.approx(1), pytest.approx(2e-4), pytest.approx(5e-9))
    assert fit.residual == pytest.approx(0, abs=1e-9)
    half = fit.half_at
    assert 5e-9 * half**2 == pytest.approx(1 + 2e-4 * half)
    fit = fit_polynomial({length: 3e-3 * length for length in lengths})
    assert fit.half_at > 1e6
    # Growth that slows down wants a negative quadratic term; it gets none.
    assert fit_polynomial({length: length**0.5 for length in lengths}).quadratic == 0
    with pytest.raises(ValueError, match="three lengths"):
        fit_polynomial({1024: 1.0, 2048: 2.0})


def test_exponents_name_lengths_and_residuals() -> None:
    points = [{"name": "NSA", "seq_len": s, "peak_mib": s / 8, "forward_ms": float(s * s)} for s in (8, 16, 32)]
    points += [{"name": "flash SDPA", "seq_len": 8, "peak_mib": 1.0}, {"name": "NSA", "seq_len": 64, "label": "no"}]
    table = exponents_table(points).splitlines()
    assert table[0].split() == ["exponent", "of", "S", "peak", "forward"]
    assert " ".join(table[2].split()) == "NSA 1.00 (3, off by 0.0%) 2.00 (3, off by 0.0%)"
    assert table[3].split() == ["flash", "SDPA", "-", "-"]


def test_summary_compares_like_with_like_and_keeps_labels() -> None:
    case = {"seq_len": 1024, "group": 6, "dtype": "float32", "work": "forward_backward", "peak_mib": 10.0}
    points = [
        {**case, "name": "NSA", "seconds": 0.1, "tokens_per_s": 10240.0},
        {**case, "name": "flash SDPA", "seconds": 0.3, "tokens_per_s": 3413.0, "peak_mib": 5.0},
        {**case, "name": "flash SDPA", "group": 1, "seconds": 9.0, "tokens_per_s": 114.0},
        {"name": "math SDPA", **{name: case[name] for name in case if name != "peak_mib"}, "label": "out of memory"},
    ]
    text = summary(points, ENVIRONMENT)
    time, memory = ([row for row in text.splitlines() if row.startswith("NSA")][i].split() for i in (0, 1))
    assert time[-4:] == ["100.0", "3.00", "-", "10,240"]
    assert memory[5:7] == ["10.0", "0.50"]
    assert "out of memory" in text


def test_figures_without_measurements_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plots", "--results", str(tmp_path), "--out", str(tmp_path)]
    command += ["--only", "peak_memory_gpu", "language"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("not made") == 2
    assert "h200.json is not recorded; python -m benchmarks attention.gpu" in printed
    assert not list(tmp_path.iterdir())


def test_runner_lists_every_benchmark_and_runs_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    runner.main([])
    printed = capsys.readouterr().out
    for name, measures in runner.listed().items():
        assert f"{name} " in printed
        assert measures.endswith(".")
    with pytest.raises(SystemExit, match=r"expected one of these, got 'attention\.npu'"):
        runner.main(["attention.npu"])
    capsys.readouterr()
    runner.main(["attention.exponents", "benchmarks/results/h200.json"])
    assert "NSA" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "package"), NEEDED.items())
def test_a_benchmark_without_its_package_names_what_installs_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [*sys.modules]:  # as if no test had imported it
        if module.startswith((f"benchmarks.{name}", "flexnsa.transformers", package)):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"^{re.escape(name)}: {package} not installed: pip install "):
        runner.main([name])


@pytest.mark.parametrize("name", [name for name in runner.listed() if name != "suite"])
def test_options_have_one_name_everywhere(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=runner.not_installed(NEEDED[name]))
    monkeypatch.setattr(sys, "argv", ["benchmarks"])  # which the runner changes
    with pytest.raises(SystemExit) as left:
        runner.main([name, "--help"])
    assert not left.value.code
    printed = capsys.readouterr().out
    assert f"usage: python -m benchmarks {name}" in printed
    assert ("--out" in printed) == (name == "demo"), "all but the demo, which draws a picture, write one file"
    assert "--json JSON" in printed or name in ("attention.exponents", "demo", "tables")
    if "--device" in printed:
        assert "CUDA if there is one" in printed


def steady_clock() -> float:
    """By this clock everything takes one second."""
    return float(next(TICKS))


def slower_clock() -> float:
    """And by this one 30 % more."""
    return 1.3 * next(TICKS)


def test_comparing_runs_flags_a_third_more_time(tmp_path: Path) -> None:
    def run(clock: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "benchmarks/suite/test_attention.py",
            "--smoke",
        ]
        command += ["-k", "gate", f"--benchmark-timer=benchmarks.suite.test_reports.{clock}", *options]
        command += [f"--benchmark-storage={tmp_path}"]
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=alone)

    assert run("steady_clock", "--benchmark-autosave").returncode == 0
    slower = run("slower_clock", "--benchmark-compare", "--benchmark-compare-fail=median:20%")
    assert slower.returncode != 0
    assert "Performance has regressed" in slower.stdout + slower.stderr
    assert "30.0" in slower.stdout + slower.stderr
