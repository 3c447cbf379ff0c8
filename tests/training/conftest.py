"""A small folder of text to train on, and one thread: models this small spend more on waking a second one."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    draws = random.Random(0)
    for index in range(20):
        words = draws.choices(["def", "return", "yield", "if", "else", "\n"], k=200)
        (folder / f"file_{index}.txt").write_text(f"# {index}\n" + " ".join(words))
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
