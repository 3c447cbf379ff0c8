"""What the pages say: their samples run, links and commands lead somewhere, and the tables are what was recorded."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from math import log
from pathlib import Path
from typing import Any

import pytest

from flexnsa.lm.cli import COMMANDS, parser_for

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
BRANDS = {
    "flexnsa": "NSA with compression",
    "cuDNN": "cuDNN SDPA",
    "FlashAttention-2": "flash SDPA",
    "FlexAttention": "dense Flex",
}

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


@pytest.mark.parametrize("page", [PAGES[0], ROOT / "docs" / "performance.md"], ids=lambda page: page.stem)
def test_the_table_of_the_h200_is_what_was_recorded(page: Path) -> None:
    recorded = {
        (point["name"], point["seq_len"]): point
        for point in json.loads((ROOT / "benchmarks/results/attention_h200.json").read_text())["points"]
        if point["kind"] == "whole"
    }
    rows = re.findall(r"^\| \W*(flexnsa|dense, \w[\w-]+)\W* \| (.*? GiB) \|$", page.read_text(), re.MULTILINE)
    assert len(rows) == len(BRANDS)
    for label, cells in rows:
        name = BRANDS[label.removeprefix("dense, ")]
        *times, memory = cells.split(" | ")
        points = [recorded[name, 1024 * k] for k in (8, 16, 32, 64)]
        if page == PAGES[0]:
            assert times == [f"{point['forward_ms'] + point['backward_ms']:.1f}" for point in points]
        else:
            assert times == [f"{point['forward_ms']:.1f} / {point['backward_ms']:.1f}" for point in points]
        assert memory == f"{points[-1]['peak_mib'] / 1024:.1f} GiB"


def test_the_table_of_training_is_what_was_recorded() -> None:
    content = json.loads((ROOT / "benchmarks/results/training_h200.json").read_text())
    recorded = {(point["model"], point["attention"], point["seq_len"]): point for point in content["points"]}
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(
        r"^\| (?:.*, NSA|dense baseline|NSA / dense|NSA / dense, steps as CUDA graphs) \| (.*) \|$", page, re.MULTILINE
    )
    expected = []
    for model in ("m7c-125m", "16 heads of 128"):
        nsa, dense = ([recorded[model, kind, 1024 * k] for k in (4, 8, 16, 32, 64)] for kind in ("nsa", "dense"))
        expected += [
            [f"{x['tokens_per_s'] / 1e3:.0f}, {x['peak_mib'] / 1024:.1f}" for x in row] for row in (nsa, dense)
        ]
        expected += [[f"{x['tokens_per_s'] / y['tokens_per_s']:.2f}" for x, y in zip(nsa, dense, strict=True)]]
        expected += [[f"{y['graph_step_ms'] / x['graph_step_ms']:.2f}" for x, y in zip(nsa, dense, strict=True)]]
    assert [cells.split(" | ") for cells in rows] == expected
    own, dense = (f"{recorded['m7c-125m', kind, 8192]['first_step_s']:.0f}" for kind in ("nsa", "dense"))
    compiler = f"{content['import_compiler_s']:.0f}"
    first = f"with empty caches {own} s (`m7c-125m` at 8k), dense {dense}, after {compiler} to import the compiler"
    assert first in " ".join(page.split())


KERNELS = {
    "selected: `hopper_forward_parts`": ["hopper_forward_parts"],
    "`hopper_combine`: joins parts, the window, the gated sum; before without the sum": ["hopper_combine"],
    "`hopper_backward_parts`": ["hopper_backward_parts"],
    "`hopper_sum_slots`: sums parts, with the gradients of queries from the other branches": ["hopper_sum_slots"],
    "compressed: `hopper_forward`": ["hopper_forward"],
    "`hopper_backward_queries`, and `hopper_backward_keys` also of the window": [
        "hopper_backward_queries",
        "hopper_backward_keys",
    ],
    "gates: `gated_stats`; before with the sum": ["gated_stats"],
    "importance and top-n": ["hopper_importance", "top_blocks_kernel"],
}
"""Rows of the table of kernels, and the recorded ones that they sum."""


def test_the_table_of_kernels_is_what_was_recorded() -> None:
    points = json.loads((ROOT / "benchmarks/results/training_h200.json").read_text())["points"]
    point = next(x for x in points if (x["model"], x["attention"], x["seq_len"]) == ("m7c-125m", "nsa", 8192))
    took = {name: ms for name, ms, _ in point["longest_kernels"]}
    page = (ROOT / "benchmarks/results/speed.md").read_text()
    assert f"milliseconds in one step of {point['step_ms']:.0f}" in page
    shown = {cells[0]: cells[-1] for cells in (row.strip("| ").split(" | ") for row in page.splitlines())}
    assert {label: shown[label] for label in KERNELS} == {
        label: f"{sum(took[name] for name in names):.1f}" for label, names in KERNELS.items()
    }


def test_the_table_of_training_on_two_gpus_is_what_was_recorded() -> None:
    points = json.loads((ROOT / "benchmarks/results/ranks_h100.json").read_text())["points"]
    nsa, dense = ([x["tokens_per_s"] for x in points if x["attention"] == kind] for kind in ("nsa", "dense"))
    expected = [[f"{x / 1e3:.0f}" for x in row] for row in (nsa, dense)]
    expected += [[f"{x / y:.2f}" for x, y in zip(nsa, dense, strict=True)]]
    page = (ROOT / "docs" / "distributed.md").read_text()
    rows = re.findall(r"^\| (?:NSA|dense baseline|NSA / dense) \| (.*) \|$", page, re.MULTILINE)
    assert [cells.split(" | ") for cells in rows] == expected


def test_the_times_of_models_of_transformers_are_what_was_recorded() -> None:
    text = (ROOT / "docs" / "transformers.md").read_text()
    words = " ".join(text.split())
    content = json.loads((ROOT / "benchmarks/results/transformers_decoding_h200.json").read_text())
    points = {(point["name"], point["context"] // 1024): point for point in content["points"]}
    names = dict.fromkeys(name for name, _ in points)
    cells = {name: [points[name, k] for k in (32, 64)] for name in names}
    rows = [
        f"| {name} | " + " | ".join(f"{x['token_ms']:.1f} / {x['first_ms']:,.0f}" for x in cells[name]) + " |"
        for name in names
    ]
    assert "\n".join(rows) in text
    served = json.loads((ROOT / "benchmarks/results/transformers_serving_h200.json").read_text())["points"]
    rate = {(x["name"], x["way"]): f"{x['tokens_per_second']:.0f}" for x in served if "seconds" in x}
    paged, whole = (rate["drop-in", way] for way in ("continuous batching", "static batch"))
    assert f"of the drop-in gives {paged} tokens per second, `generate` {whole} (converted:" in words
    assert f"(converted: {rate['converted', 'static batch']}), dense `generate_batch` " in words
    assert f"dense `generate_batch` {rate['dense', 'continuous batching']} (" in words
    runs = json.loads((ROOT / "benchmarks/results/up_training_h200.json").read_text())["points"]
    last = {run["name"]: run["held_out"][-1][1] / log(2) for run in runs}
    three, slc, dense = (f"{last[name]:.3f}" for name in ("three branches", "selected branch", "dense"))
    assert f"the three branches have {three}, the selected branch alone {slc}, dense attention {dense}" in words


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
