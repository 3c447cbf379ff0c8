"""``flexnsa train --tokenizer``: the same text in other ids, still measured by its bytes, and written in characters."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from flexnsa.files import FileError
from flexnsa.lm import Corpus, Sampling, TextTokenizer, TrainConfig, Trainer, preset, read_corpus
from flexnsa.lm.cli import main
from flexnsa.lm.cli.generate import TokenizerSpelling
from flexnsa.lm.diagnosis import recipe as recipe_module
from flexnsa.lm.training.model_file import read_model
from flexnsa.lm.transformers_model import FlexNSAForCausalLM
from tests.lm.cli.tiny_run import contents, train
from tests.support.damage import flip, places

TEXT = "def zürich():\n    return '😀' * 8001\n\n\nclass Fluß:\n    pass\n\n"


def write_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """One of bytes, merged as in the text; blank lines and what follows them would be merged too."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"vocab_size": vocab_size, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT, "\n\nclass \n\ndef "] * 9, trainers.BpeTrainer(**options))
    tokenizer.enable_truncation(8)  # which is for who asks it, and would cut every document short
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a text, a tokenizer and a run of both."""
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "text.txt").write_text(TEXT * 60)
    write_tokenizer(folder / "tokenizer.json")
    train(folder / "run", folder / "text.txt", "--tokenizer", str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return read_corpus(folder / "text.txt", TextTokenizer(folder / "tokenizer.json"))


def decoded(folder: Path, ids: torch.Tensor) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)


def test_all_of_the_text_is_there_once_in_tokens_of_one_document_each(folder: Path, corpus: Corpus) -> None:
    for part in ("train", "validation"):
        data, tokens = getattr(corpus, part), corpus.tokens(part)
        text = bytes(data.tolist())
        assert decoded(folder, tokens.ids).encode() == text
        assert tokens.ids.dtype == torch.uint16
        assert len(tokens.ids) < len(text) / 2
        assert int(tokens.widths.sum()) == len(text)
        assert int(tokens.widths.min()) >= 0
    tokens = corpus.tokens("train")
    assert tokens.documents is not None
    whole = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    assert any(re.search("Ċ[^Ċ]", name) for name in whole)  # which would cross the blank lines where packing cuts
    documents = [decoded(folder, tokens.ids[start:end]) for start, end in tokens.documents]
    assert set(documents[:-1]) == {TEXT[: TEXT.index("class")], TEXT[TEXT.index("class") :]}
    assert all(first[1] == second[0] for first, second in pairwise(tokens.documents))


@pytest.mark.parametrize("pack", [False, True])
def test_bits_are_counted_by_bytes_of_text(folder: Path, corpus: Corpus, pack: bool) -> None:
    """Of a model that knows nothing: as many bits as its tokens have, over the bytes that they stand for."""
    model = read_model(folder / "run")
    torch.nn.init.zeros_(model.head.weight)
    trainer = Trainer(model, corpus, TrainConfig(batch_size=1, seq_len=24, eval_sequences=3, pack=pack))
    batch = trainer.validation_rows.spread(3)
    predicted = batch.targets[batch.targets >= 0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # It writes each byte as a letter.
    num_bytes = sum(len(tokenizer.id_to_token(token) or "") for token in predicted.tolist())
    num_ends = int((batch.targets < 0).sum()) + 2 * len(batch)
    cut = 3 * num_ends  # of a character that a first or a last token halves, all bytes are the first half's
    want = len(predicted) * math.log2(model.config.vocab_size)
    assert cut < num_bytes / 4
    got = trainer.validation_bits_per_byte()
    assert want / (num_bytes + cut) <= got <= want / (num_bytes - cut)


def test_a_run_is_resumed_with_its_tokenizer_alone(folder: Path, tmp_path: Path, refused: Callable[..., str]):
    other = write_tokenizer(tmp_path / "other.json", 290)
    before = contents(folder / "run")
    for options in (["--tokenizer", str(other)], []):
        assert "tokenizer_sha256: expected '" in refused(train, folder / "run", folder / "text.txt", *options)
    assert contents(folder / "run") == before
    assert (folder / "run" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    train(folder / "run", folder / "text.txt", "--tokenizer", str(folder))  # of a folder, as transformers writes it
    assert contents(folder / "run").keys() == before.keys()


@pytest.mark.parametrize("own", [True, False])
def test_a_flipped_bit_of_the_tokenizer_is_refused_and_named(
    folder: Path, tmp_path: Path, refused: Callable[..., str], own: bool
) -> None:
    run = shutil.copytree(folder / "run", tmp_path / "run")
    file = run / "tokenizer.json"
    whole = file.read_bytes()

    def resume() -> None:
        train(run, folder / "text.txt", "--tokenizer", str(file if own else folder / "tokenizer.json"))

    for place in places(file, 8):
        flip(file, place, place % 8)
        before = contents(tmp_path)
        for command in (resume, lambda: generate(tmp_path)):
            assert str(file) in refused(command)
        with pytest.raises(FileError, match=rf"^{file}: expected the tokenizer of checkpoint.safetensors, of sha256 "):
            FlexNSAForCausalLM.from_run(run)
        assert contents(tmp_path) == before
        file.write_bytes(whole)
    resume()


def test_an_outcome_of_another_tokenizer_under_the_same_path_is_not_taken(tmp_path: Path, folder: Path) -> None:
    recorded: list[dict[str, Any]] = []
    for size in (300, 290):
        file = write_tokenizer(tmp_path / "tokenizer.json", size)
        model, text = preset("small", num_layers=1, vocab_size=300), folder / "text.txt"
        recipe_module.corpus.cache_clear()
        recorded.append(recipe_module.Recipe(model=model, training=TrainConfig(), text=text, tokenizer=file).record())
    changed = {name for name in recorded[0] if recorded[0][name] != recorded[1][name]}
    assert changed == {"tokenizer_sha256"}


def generate(folder: Path, *options: str) -> None:
    main(["generate", "--checkpoint", str(folder / "run"), "--device", "cpu", "--prompt", "def zürich", *options])


def test_text_is_streamed_in_whole_characters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    tokenizer = TextTokenizer(folder / "tokenizer.json")
    ids = [*tokenizer.encode("ö😀 Fluß\n\n"), tokenizer.encode("é")[0]]
    drawn = iter(ids)
    monkeypatch.setattr(Sampling, "draw_unchecked", lambda *_: torch.tensor([next(drawn)]))
    monkeypatch.setattr(sys, "stdout", Screen())
    generate(folder, "--max-new-tokens", str(len(ids)))
    assert "".join(written) == "def zürichö😀 Fluß\n\n\n"  # and not the half of another character
    assert f"{len(ids)} tokens in " in capsys.readouterr().err


def test_text_behind_a_prompt_is_what_the_tokenizer_makes_of_both_together(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1}, unk_token="▁the"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(tmp_path / "words.json"))
    spelling = TokenizerSpelling(TextTokenizer(tmp_path / "words.json"), [])
    assert spelling.encode(b"the") == [0]
    assert spelling.decode(1) == " cat"  # at the beginning of a text it would be "cat"


def test_a_stop_may_stand_anywhere_in_a_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = iter(TextTokenizer(folder / "tokenizer.json").encode("return class Fluß:"))
    monkeypatch.setattr(Sampling, "draw_unchecked", lambda *_: torch.tensor([next(ids)]))
    generate(folder, "--stop", "xß")
    assert capsys.readouterr().out == "def zürichreturn class Flu\n"


def test_a_model_of_transformers_is_written_with_its_tokenizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(folder, "--temperature", "0", "--max-new-tokens", "5")
    want = capsys.readouterr().out
    model: Any = FlexNSAForCausalLM.from_run(folder / "run")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "run")
    assert model.config.vocab_size == len(tokenizer) == 300
    assert tokenizer("def zürich").input_ids == TextTokenizer(folder / "tokenizer.json").encode("def zürich")
    tokenizer.save_pretrained(tmp_path / "transformers")
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "checkpoint.safetensors"
    model.save_run(file, tokenizer=tmp_path / "transformers")
    generate(tmp_path, "--temperature", "0", "--max-new-tokens", "5")
    assert capsys.readouterr().out == want
    assert AutoTokenizer.from_pretrained(file.parent)("def").input_ids
    with pytest.raises(FileExistsError, match=r"tokenizer.json: expected the tokenizer of checkpoint"):
        model.save_run(file, tokenizer=write_tokenizer(tmp_path / "other.json", 290))
    with pytest.raises(ValueError, match=r"tokenizer: expected one of 300 tokens or fewer, .* got one of 301"):
        model.save_run(file, tokenizer=write_tokenizer(tmp_path / "larger.json", 301))


def test_wrong_tokenizers_are_named(folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1") * 900)
    cases = [
        (folder / "text.txt", tmp_path / "nowhere", "argument --tokenizer: expected a file, or a folder"),
        (folder / "text.txt", tmp_path, "argument --tokenizer: expected a file, or a folder with tokenizer.json"),
        (folder / "text.txt", tmp_path / "broken.json", "argument --tokenizer: expected a file of `tokenizers`, got"),
        (tmp_path / "latin.txt", folder, "argument --text: expected UTF-8 for a tokenizer"),
    ]
    for text, tokenizer, message in cases:
        assert message in refused(train, tmp_path / "run", text, "--tokenizer", str(tokenizer))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_its_tokenizer_is_named(folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (moved := tmp_path / "run").mkdir()
    (moved / "checkpoint.safetensors").write_bytes((folder / "run" / "checkpoint.safetensors").read_bytes())
    for content, found in ((None, "there is none"), (b"{}", "that one's is ")):
        if content is not None:
            (moved / "tokenizer.json").write_bytes(content)
        assert found in refused(generate, tmp_path)
