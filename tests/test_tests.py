"""Tests that cannot run or cannot fail, or pass what is wrong: more mistakes of earlier implementations."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig, sliding_window_attention
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL, make_inputs

ROOT = Path(__file__).parent.parent


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    """137 of 275 tests were skipped. What needs a GPU is deselected by its marker, and counted.

    ``importorskip`` remains: Triton has no builds for some systems.
    """
    excuses = re.compile(r"skip|skipif|xfail|skipTest")
    for file in (ROOT / "tests").rglob("test_*.py"):
        names = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
        assert not [name for name in names if excuses.fullmatch(name)], file


def test_a_test_that_is_left_out_says_what_installs_what_it_needs() -> None:
    """By itself, ``importorskip`` says no more than that a package could not be imported."""
    calls = [
        (file, call)
        for folder in ("tests", "benchmarks", "plots")
        for file in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "importorskip"
    ]
    assert calls
    for file, call in calls:
        reasons = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "reason"]
        assert reasons, f"{file}:{call.lineno}"
        assert "pip install" in reasons[0] or "not_installed(" in reasons[0], f"{file}:{call.lineno}"


def test_only_integrations_import_what_they_integrate() -> None:
    """``make test`` runs in an environment without transformers, torchtitan and vLLM."""
    others = r"(flexnsa\.|benchmarks\.)?(transformers|torchtitan|vllm)\b|tests\.integrations"
    for file in set((ROOT / "tests").rglob("*.py")) - set((ROOT / "tests" / "integrations").rglob("*.py")):
        for line in file.read_text().splitlines():
            assert not re.match(rf"(from|import) ({others})", line), f"{file}: {line}"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Two of one name cannot be collected in one call."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_continuous_integration_can_fail() -> None:
    """CI piped pytest into tee, whose status is always 0."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    commands = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    assert any("make test" in line for line in commands)
    for line in commands + (ROOT / "Makefile").read_text().splitlines():
        if "pytest" in line or "make test" in line:
            assert not re.search(r"\||;|\bset \+e\b", line), line


def run(config: NSAConfig) -> dict[str, Tensor]:
    x = make_inputs(77, dtype=torch.float32)
    return {"out": sliding_window_attention(x.q, x.k_win, x.v_win, config=config, impl="reference")[0]}


def exact() -> dict[str, Tensor]:
    x = make_inputs(77, dtype=torch.float32).to(torch.float64)
    return {"out": sliding_window_attention(x.q, x.k_win, x.v_win, config=SMALL, impl="reference")[0]}


def test_it_passes_the_plain_formula() -> None:
    assert_as_exact_as_plain(run(SMALL), run(SMALL), exact(), factor=1)


def changed(value: float) -> dict[str, Tensor]:
    out = run(SMALL)["out"]
    out.view(-1)[100] += value
    return {"out": out}


WRONG: dict[str, tuple[int, Callable[[], dict[str, Tensor]], str]] = {
    "a window of 23": (2, lambda: run(replace(SMALL, window_size=23)), "out: rms error"),
    "a window of 25": (2, lambda: run(replace(SMALL, window_size=25)), "out: rms error"),
    "half the precision": (3, lambda: {"out": run(SMALL)["out"].bfloat16().float()}, "out: rms error"),
    "one wrong element": (3, lambda: changed(1e-5), "out: max error"),
    "NaN": (3, lambda: changed(torch.nan), "finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_rejects_what_is_wrong(name: str) -> None:
    factor, wrong, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        assert_as_exact_as_plain(wrong(), run(SMALL), exact(), factor=factor)
