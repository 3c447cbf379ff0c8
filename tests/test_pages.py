"""Examples and samples of pages run, links and commands lead somewhere, and the tables are what was recorded."""

from __future__ import annotations

import functools
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tables import __main__ as tables
from flexnsa.lm.cli import COMMANDS, parser_for

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "layer": {"seq_len": 256},
    "train": {"steps": 5, "seq_len": 64, "batch_size": 2, "dim": 64, "num_layers": 1},
    "pack": {"lengths": (40, 1, 70)},
    "own_mod": {"seq_len": 320, "passage": 160},
    "decode": {"prompt_len": 100, "new_tokens": 4, "chunk": 40},
    "serve": {},
    "generate": {"prompt_len": 40, "new_tokens": 12, "batch_size": 2},
}


def run(name: str) -> Any:
    """Run ``main`` of an example at its small size."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**SMALL[name])


def test_each_has_a_small_size() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == SMALL.keys()


@pytest.mark.parametrize("name", [name for name in SMALL if name != "train"])
def test_runs(name: str) -> None:
    run(name)


def test_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of the compiler but its last part: Inductor would spend half a minute in a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    losses = run("train")
    assert losses[-1] < losses[0]


ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
# Those of these pages need packages of their own, and run with their tests.
WITH_SAMPLES = [page for page in PAGES if page.stem not in ("transformers", "torchtitan", "vllm")]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.mark.parametrize("page", WITH_SAMPLES, ids=lambda page: page.stem)
def test_samples_run_from_top_to_bottom(page: Path) -> None:
    names: dict[str, Any] = {}
    for sample in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(sample, page.name, "exec"), names)


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text):
        target, _, heading = "".join(link).partition("#")
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not heading or heading in anchors(file.read_text()), heading


@every_page
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets
    for command in re.findall(r"python -m\s+flexnsa\s+([a-z][^`\n#]*)", text):
        name, *options = shlex.split(command)
        assert name in COMMANDS
        if options:  # SystemExit: an option that the command does not have
            parser_for([name]).parse_args([name, *options])
    for name in re.findall(r"python -m\s+benchmarks\s+([a-z]\S*?)[`\s]", text):
        module = ROOT / "benchmarks" / name.replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), name
    for path in re.findall(r"(?:pytest|python) ([\w/]+\.py)", text):
        assert (ROOT / path).is_file()


def test_tables_are_what_was_recorded() -> None:
    tables.main(["--check"])
    shown = re.findall(r"<!-- table: (.*) -->", "".join(page.read_text() for page in tables.PAGES))
    assert sorted(shown) == sorted(tables.TABLES)


def test_a_table_that_is_not_what_was_recorded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs/learning.md").read_text().replace("0.7351", "0.7350"))
    monkeypatch.setattr(tables, "PAGES", [page])
    with pytest.raises(SystemExit, match=r"page\.md: equal seconds at 32k"):
        tables.main(["--check"])
    tables.main([])
    assert page.read_text() == (ROOT / "docs/learning.md").read_text()


def anchors(text: str) -> set[str]:
    """Give the names under which GitHub finds the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_is_recorded_is_of_commits_in_the_history() -> None:
    """A plus after a commit stands for changes to it. A checkout without history has nothing to compare with."""
    asked = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    history = asked.stdout.split()
    if not history or (ROOT / ".git" / "shallow").exists():
        return
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        for commit in set(re.findall(r'"commit": ?"([^"+]*)[^"]*"', file.read_text())):
            assert any(known.startswith(commit) for known in history), f"{file.name}: {commit}"
