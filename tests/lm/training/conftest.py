"""A small folder of text to train on."""

import random
from pathlib import Path

import pytest


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    draws = random.Random(0)
    for index in range(20):
        words = draws.choices(["def", "return", "yield", "if", "else", "\n"], k=200)
        (folder / f"file_{index}.txt").write_text(f"# {index}\n" + " ".join(words))
    return folder
