"""A file that cannot be used is answered with one line that names it, and nothing is overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import SPOILT, SPOILT_FOR_TRAINING, contents, train, write_text

from flexnsa.lm.cli import main


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a run that has ended."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder / "run", write_text(folder / "text"))
    return contents(folder)


@pytest.fixture
def text(tmp_path: Path, whole_run: dict[str, bytes]) -> Path:
    """The text, in the same folder as ``run``."""
    (tmp_path / "run").mkdir()
    for name, data in whole_run.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / "text"


@pytest.mark.parametrize("how", SPOILT_FOR_TRAINING)
def test_training_names_the_checkpoint_and_leaves_it(how: str, text: Path, refused: Callable[..., str]) -> None:
    file = text.parent / "run" / "checkpoint.safetensors"
    SPOILT_FOR_TRAINING[how](file)
    before = contents(text.parent)
    line = refused(train, file.parent, text, "--steps", "2")
    assert line.startswith("flexnsa train: error: ")
    assert str(file) in line
    assert contents(text.parent) == before


@pytest.mark.parametrize("how", SPOILT)
def test_generation_names_the_checkpoint(how: str, text: Path, refused: Callable[..., str]) -> None:
    file = text.parent / "run" / "checkpoint.safetensors"
    SPOILT[how](file)
    line = refused(main, ["generate", "--checkpoint", str(file.parent), "--prompt", "def", "--device", "cpu"])
    assert line.startswith("flexnsa generate: error: ")
    assert str(file) in line


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe\n", b'{"step": 0}\nnotes', b'[{"step": 0}]\n'])
def test_a_log_that_is_none_is_named_and_left(text: Path, refused: Callable[..., str], content: bytes) -> None:
    file = text.parent / "run" / "log.jsonl"
    file.write_bytes(content)
    if not content:  # begins anew, as the log of a checkpoint that came from elsewhere
        train(file.parent, text)
        return
    before = contents(text.parent)
    line = refused(train, file.parent, text)
    assert f"{file}: line " in line
    assert contents(text.parent) == before


def test_another_text_is_named(text: Path, refused: Callable[..., str]) -> None:
    text.write_text("another text " * 100)
    line = refused(train, text.parent / "run", text)
    assert "text_sha256: expected " in line
    assert str(text.parent / "run" / "checkpoint.safetensors") in line


def test_an_output_folder_that_is_a_file_is_left(text: Path, refused: Callable[..., str]) -> None:
    before = contents(text.parent)
    for name in (text, text / "below"):
        line = refused(main, ["train", "--out", str(name)])
        assert f"argument --out: expected a folder, got '{name}', but '{text}' is a file" in line
    assert contents(text.parent) == before


def test_a_full_disk_names_the_file(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SystemExit) as leaving:
        train(text.parent / "new", text)
    assert leaving.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"error: {text.parent / 'new' / 'checkpoint.safetensors'}: No space left on device")


def test_training_that_diverges_says_so(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        train(text.parent / "new", text, "--lr", "1e30", "--warmup-steps", "0", "--steps", "9")
    assert leaving.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("flexnsa train: error: step ")
