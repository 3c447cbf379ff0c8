"""A file that cannot be used is answered with one line that names it, and nothing is overwritten."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import SPOILT, SPOILT_FOR_TRAINING, contents, train, write_text

from flexnsa.files import FileWarning
from flexnsa.lm.checkpoint.checksum import unsealed
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


def test_a_damaged_log_is_named_and_left(text: Path, refused: Callable[..., str]) -> None:
    file = text.parent / "run" / "log.jsonl"
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for data, line in ((whole[:second] + whole[second:].replace(b"1", b"3", 1), 2), (whole + whole, 3)):
        file.write_bytes(data)
        before = contents(text.parent)
        said = refused(train, file.parent, text)
        assert f"error: {file}: line {line} is no record of a training step; " in said
        assert contents(text.parent) == before


def test_a_damaged_record_of_the_environment_is_written_anew(text: Path) -> None:
    run = text.parent / "run"
    file = run / "environment.json"
    whole = file.read_bytes()
    flipped = whole[:50] + bytes([whole[50] ^ 128]) + whole[51:]
    for damaged in (flipped, b"\xff\n", whole[:-9], b""):
        file.write_bytes(whole + damaged)
        (run / "checkpoint.safetensors").unlink()  # else there is nothing left to do
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(run, text)
        said = [str(warning.message) for warning in caught if warning.category is FileWarning]
        assert said == [f"{file}: damaged, and written anew without its damaged lines"] * (damaged != b"")
        lines = file.read_bytes().splitlines()
        assert lines[0] == whole.strip()
        assert [unsealed(line)["gpus"] for line in lines] == [[], []]


def test_another_text_is_named(text: Path, refused: Callable[..., str]) -> None:
    text.write_text("another text " * 100)
    line = refused(train, text.parent / "run", text)
    assert "text_sha256: expected " in line
    assert str(text.parent / "run" / "checkpoint.safetensors") in line


def test_training_that_diverges_says_so(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        train(text.parent / "new", text, "--lr", "1e30", "--warmup-steps", "0", "--steps", "9")
    assert leaving.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("flexnsa train: error: step ")
