"""The text: who trains, who validates, and which windows a step sees."""

import sysconfig
from pathlib import Path

import pytest
import torch

from flexnsa.training.data import Corpus, read_corpus, split_files, standard_library_files, text_files


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


def test_standard_library_is_found_without_its_tests_and_without_installed_packages():
    assert len(read_corpus().train) > 5_000_000
    modules = Path(sysconfig.get_path("stdlib"))
    parts = {part for file in standard_library_files(modules) for part in file.relative_to(modules).parts}
    assert "argparse.py" in parts
    assert not parts & {"test", "site-packages"}


def test_batch_is_a_function_of_seed_and_step():
    corpus = _counting_corpus()
    first = corpus.batch(seed=0, step=3, num_sequences=4, seq_len=16)
    assert first.shape == (4, 17)
    assert first.dtype == torch.int64
    corpus.batch(seed=0, step=4, num_sequences=4, seq_len=16)
    assert torch.equal(first, corpus.batch(seed=0, step=3, num_sequences=4, seq_len=16))
    for seed, step in ((0, 4), (1, 3), (2**32, 3)):
        assert not torch.equal(first, corpus.batch(seed=seed, step=step, num_sequences=4, seq_len=16))
    assert (first.diff(dim=1) % 256 == 1).all()  # neighbours in the text stay neighbours


def test_validation_windows_reach_from_the_first_byte_to_the_last():
    corpus = _counting_corpus()
    batches = list(corpus.validation_batches(num_sequences=5, seq_len=9, batch_size=2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    windows = torch.cat(batches)
    assert windows[0, 0] == corpus.validation[0]
    assert windows[-1, -1] == corpus.validation[-1]


def test_text_shorter_than_a_window_is_named():
    count = torch.arange(1000).to(torch.uint8)
    for train, validation, part in ((count, count[:20], "validation"), (count[:20], count, "training")):
        corpus = Corpus(train, validation)
        with pytest.raises(ValueError, match=rf"seq_len: expected less than the 20 bytes of {part} text, got 20"):
            corpus.batch(seed=0, step=0, num_sequences=1, seq_len=20)
        assert corpus.batch(seed=0, step=0, num_sequences=1, seq_len=19).shape == (1, 20)


def test_missing_and_empty_folders_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"text: .*nowhere"):
        read_corpus(tmp_path / "nowhere")
    (tmp_path / "single.txt").write_text("text")
    with pytest.raises(ValueError, match=r"text: expected at least two text files .* got 1"):
        read_corpus(tmp_path)


def _counting_corpus() -> Corpus:
    count = torch.arange(1000).to(torch.uint8)
    return Corpus(count, count[:100])
