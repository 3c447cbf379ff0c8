"""The text: who trains and who validates, and that what runs and diagnoses write below its folder is none of it."""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.lm.data.corpus import Corpus, read_corpus, split_files, standard_library_files, text_files
from flexnsa.lm.data.rows import Tokens
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.diagnosis.cases import run_case
from tests.lm.training.runs import train
from tests.parallel.processes import run_together


def test_split_is_disjoint_complete_and_independent_of_the_order_and_place_of_the_files(
    text_folder: Path, tmp_path: Path
):
    files = text_files(text_folder)
    train, validation = split_files(files, text_folder)
    assert sorted(train + validation) == sorted(files)
    assert not set(train) & set(validation)
    assert len(validation) == 2
    assert split_files(files[::-1], text_folder) == (train, validation)
    moved = text_folder.rename(tmp_path / "elsewhere")
    assert [file.name for file in split_files(text_files(moved), moved)[1]] == [file.name for file in validation]


@pytest.mark.parametrize(("files", "validating"), [(2, 1), (10, 1), (11, 2), (19, 2)])
def test_a_tenth_of_the_files_validates_rounded_up_so_that_one_always_does(files: int, validating: int):
    root = Path("text")
    train, validation = split_files([root / f"{number}.txt" for number in range(files)], root)
    assert (len(train), len(validation)) == (files - validating, validating)


def test_validation_text_never_trains(text_folder: Path):
    corpus = read_corpus(text_folder)
    train, validation = (bytes(part.tolist()) for part in (corpus.train, corpus.validation))
    for file in text_files(text_folder):
        assert (file.read_bytes() in train) != (file.read_bytes() in validation)
    assert train.count(b"\0") == 18


def test_hidden_and_binary_files_are_no_text(text_folder: Path):
    count = len(text_files(text_folder))
    (text_folder / "image.png").write_bytes(b"\x89PNG\0")
    (text_folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (text_folder / ".git").mkdir()
    (text_folder / ".git" / "config").write_text("text")
    assert len(text_files(text_folder)) == count


def test_one_file_validates_on_its_last_tenth(tmp_path: Path):
    file = tmp_path / "book.txt"
    file.write_bytes(b"a" * 90 + b"b" * 10)
    corpus = read_corpus(file)
    assert bytes(corpus.train.tolist()) == b"a" * 90 + b"\0"
    assert bytes(corpus.validation.tolist()) == b"b" * 10 + b"\0"


def test_one_file_is_cut_between_characters_where_a_tokenizer_reads_them(tmp_path: Path):
    class Letters:
        def tokens(self, data: torch.Tensor) -> Tokens:
            bytes(data.tolist()).decode()
            return Tokens.of_bytes(data)

    file = tmp_path / "book.txt"
    file.write_bytes(b"a" * 88 + "😀".encode() + b"b" * 8)  # the cut is before byte 90, the third of four
    corpus = read_corpus(file, cast("TextTokenizer", Letters()))
    assert bytes(corpus.train.tolist()) == b"a" * 88 + b"\0"
    assert len(read_corpus(file).train) == 90 + 1


def test_standard_library_is_found_without_its_tests_and_without_installed_packages():
    assert len(read_corpus().train) > 5_000_000
    modules = Path(sysconfig.get_path("stdlib"))
    parts = {part for file in standard_library_files(modules) for part in file.relative_to(modules).parts}
    assert "argparse.py" in parts
    assert not parts & {"test", "site-packages"}


def test_text_shorter_than_a_row_is_named():
    count = torch.arange(1000).to(torch.uint8)
    for training, validating, part in ((count, count[:20], "validation"), (count[:20], count, "training")):
        corpus = Corpus(training, validating)
        with pytest.raises(ValueError, match=rf"seq_len: expected less than the 20 bytes of {part} text, got 20"):
            corpus.require_rows(20)
        corpus.require_rows(19)


def test_missing_and_empty_folders_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"text: .*nowhere"):
        read_corpus(tmp_path / "nowhere")
    (tmp_path / "single.txt").write_text("text")
    with pytest.raises(ValueError, match=r"text: expected at least two text files .* got 1"):
        read_corpus(tmp_path)


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
