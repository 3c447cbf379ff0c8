"""The text: who trains and who validates."""

import sysconfig
from pathlib import Path
from typing import cast

import pytest
import torch

from flexnsa.lm.data.corpus import Corpus, read_corpus, split_files, standard_library_files, text_files
from flexnsa.lm.data.rows import Tokens
from flexnsa.lm.data.tokenizer import TextTokenizer


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
    for train, validation, part in ((count, count[:20], "validation"), (count[:20], count, "training")):
        corpus = Corpus(train, validation)
        with pytest.raises(ValueError, match=rf"seq_len: expected less than the 20 bytes of {part} text, got 20"):
            corpus.require_rows(20)
        corpus.require_rows(19)


def test_missing_and_empty_folders_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"text: .*nowhere"):
        read_corpus(tmp_path / "nowhere")
    (tmp_path / "single.txt").write_text("text")
    with pytest.raises(ValueError, match=r"text: expected at least two text files .* got 1"):
        read_corpus(tmp_path)
