"""The page and the examples of this integration run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "transformers"
SMALL: dict[str, dict[str, Any]] = {
    "long_context": {"short": 256, "long": 1200},
    "long_prompt": {"prompt": 1280, "new": 3, "steps": 2, "row": 256},
    "up_train": {"steps": 6, "seq_len": 64},
    "chat": {"max_new_tokens": 6},
    "teach_selector": {"pretrain": 20, "steps": 12},
    "teach_indexers": {"warmup": 12, "steps": 16, "seq_len": 96},
}


def test_each_example_has_a_small_size() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
def test_the_example_runs(name: str) -> None:
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**SMALL[name])
    if name == "teach_selector":
        before, after = result
        assert after > before + 0.05
    if name == "teach_indexers":
        assert all(0 < recall <= 1 for recall in result)


def test_samples_of_the_page_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page = ROOT / "docs" / "transformers.md"
    samples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert samples
    for sample in samples:
        exec(compile(sample, page.name, "exec"), names)
