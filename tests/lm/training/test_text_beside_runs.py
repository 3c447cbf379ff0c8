"""What runs and diagnoses write below a folder of text is no text, so that every start finds the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.lm.data.corpus import read_corpus, text_files
from flexnsa.lm.diagnosis.cases import run_case
from tests.lm.training.runs import train
from tests.parallel.processes import run_together


@pytest.mark.parametrize("place", ["run", "runs/a/b", "notes", "link", "new-link/run"])
def test_a_run_below_its_text_goes_on(text_folder: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text_folder / "notes").mkdir()
    (text_folder / "notes" / "mine.txt").write_text("was there before the run")
    (text_folder / "link").symlink_to(text_folder / "notes")
    (text_folder / "new-link").symlink_to(text_folder / "notes")
    for steps in ("2", "4"):
        train("--text", text_folder, "--out", text_folder / place, "--steps", steps)
    assert len(read_log(text_folder / place / "log.jsonl")) == 4
    assert "error" not in capsys.readouterr().err


def test_a_run_of_shards_below_the_current_folder_goes_on(text_folder: Path) -> None:
    for steps in ("2", "4"):
        run_together(2, text_folder.parent / "output", _train_here, text_folder, "--steps", steps)
    assert len(read_log(text_folder / "runs" / "train" / "log.jsonl")) == 4
    assert list((text_folder / "runs" / "train").glob("*.dcp/header.json"))


def _train_here(folder: Path, *options: str) -> None:
    os.chdir(folder)
    train("--text", ".", "--parallel", "fsdp2", "--log-ranks", *options)


def _diagnosed(folder: Path) -> None:
    assert run_case(folder, _nothing, seconds=60).passed


def _nothing() -> dict[str, str]:
    print("a line of its log")
    return {}


def _locked(folder: Path) -> None:
    folder.mkdir()
    (folder / LOCK_NAME).touch()
    (folder / "environment.json").write_text("{}\n")


def _copied_without_hidden_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 0, "loss": 5.5}\n')
    (folder / "environment.json").write_text("{}\n")
    (folder / "samples").mkdir()
    (folder / "samples" / "0.txt").write_text("what it has written")


def _linked(folder: Path) -> None:
    run = folder.parents[1] / "elsewhere"
    _copied_without_hidden_files(run)
    folder.mkdir()
    (folder / "latest.jsonl").symlink_to(run / "log.jsonl")


@pytest.mark.parametrize("make", [_diagnosed, _locked, _copied_without_hidden_files, _linked])
def test_folders_of_other_runs_are_no_text(text_folder: Path, make: Callable[[Path], None]) -> None:
    files, before = text_files(text_folder), read_corpus(text_folder).sha256()
    make(text_folder / "other")
    assert list((text_folder / "other").iterdir())
    assert text_files(text_folder) == files
    assert read_corpus(text_folder).sha256() == before


@pytest.mark.parametrize("content", ['{"event": 1}\n', "", '{"steps": 3}\n', "words"])
def test_a_log_of_something_else_is_text(text_folder: Path, content: str) -> None:
    (text_folder / "service").mkdir()
    for name in ("log.jsonl", "other.txt"):
        (text_folder / "service" / name).write_text(content)
    assert [file.name for file in text_files(text_folder / "service")] == ["log.jsonl", "other.txt"]


@pytest.mark.parametrize("make", [_locked, _copied_without_hidden_files])
def test_the_folder_of_a_run_is_refused_as_text(
    tmp_path: Path, make: Callable[[Path], None], refused: Callable[..., str]
) -> None:
    make(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^text: expected a folder to which no run writes, got '.*run'; "):
        read_corpus(tmp_path / "run")
    said = refused(train, "--text", tmp_path / "run", "--out", tmp_path / "another")
    assert "argument --text: expected a folder to which no run writes" in said


@pytest.mark.parametrize("name", ["text", "./text/.", "link"])
def test_text_and_run_in_one_folder_are_refused_before_the_run_writes_to_it(
    text_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.chdir(text_folder.parent)
    Path("link").symlink_to(text_folder)
    before = sorted(text_folder.iterdir())
    said = refused(train, "--text", "text", "--out", name)
    assert "argument --text: expected a folder to which no run writes, got 'text'; " in said
    assert sorted(text_folder.iterdir()) == before


def test_text_below_the_folder_of_a_run_is_text(tmp_path: Path) -> None:
    _copied_without_hidden_files(tmp_path / "run")
    (tmp_path / "run" / "samples" / "1.txt").write_text("and more of it")
    assert [file.name for file in text_files(tmp_path / "run" / "samples")] == ["0.txt", "1.txt"]
