"""``flexnsa generate``: what the model writes is what is printed, as it comes, and wrong options are named."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexnsa.lm import DecoderConfig, DecoderLM, Sampling
from flexnsa.lm.cli import main
from flexnsa.lm.training.model_file import save_model
from tests.support.inputs import TINY

CONFIG = DecoderConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, nsa=TINY)


@pytest.fixture
def model() -> DecoderLM:
    return DecoderLM(CONFIG).eval()


@pytest.fixture
def checkpoint(model: DecoderLM, tmp_path: Path) -> Path:
    save_model(tmp_path / "checkpoint.safetensors", model)
    return tmp_path


def generate(checkpoint: Path, options: str) -> None:
    main(["generate", "--checkpoint", str(checkpoint), "--device", "cpu", "--prompt", "zürich", *options.split()])


def test_it_prints_the_prompt_and_what_the_model_adds(
    model: DecoderLM, checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    prompt = "zürich".encode()
    (added,) = model.generate(torch.tensor([list(prompt)]), 40, sampling=Sampling(top_k=90, temperature=1.5), seed=4)
    for path in (checkpoint, checkpoint / "checkpoint.safetensors"):
        generate(path, "--max-new-tokens 40 --top-k 90 --temperature 1.5 --seed 4")
        printed = capsys.readouterr()
        assert printed.out == (prompt + bytes(added)).decode(errors="replace") + "\n"
        assert printed.err.startswith("40 bytes in ")


def test_a_model_of_kernels_that_the_device_has_not_is_refused_in_one_line(tmp_path: Path, refused: Callable[..., str]):
    save_model(tmp_path / "checkpoint.safetensors", DecoderLM(replace(CONFIG, impl="triton")))
    said = refused(generate, tmp_path, "--max-new-tokens 4")
    assert "impl='triton', expected a CUDA device, got --device cpu" in said


def test_it_ends_at_a_stop_character(model: DecoderLM, checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    (added,) = model.generate(torch.tensor([list("zürich".encode())]), 200)
    stop = next(byte for byte in added if 32 < byte < 127)
    generate(checkpoint, f"--max-new-tokens 200 --stop {chr(stop)}")
    assert capsys.readouterr().err.startswith(f"{added.index(stop)} bytes in ")


@pytest.mark.parametrize("stop", ["é", "xé", "xöé"])
def test_a_stop_character_is_all_of_its_bytes(
    stop: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    written = iter("aÃ¡ãæ\N{COPYRIGHT SIGN}éb".encode())  # these share both bytes of é, \xc3\xa9, one at a time
    monkeypatch.setattr(Sampling, "draw_unchecked", lambda *_: torch.tensor([next(written)]))
    generate(checkpoint, f"--max-new-tokens 100 --stop {stop}")
    printed = capsys.readouterr()
    assert printed.out == "züricha\u00c3\u00a1\u00e3\u00e6\u00a9\n"
    assert printed.err.startswith("11 bytes in ")


def test_bytes_of_a_prompt_that_are_no_utf8_stay_what_they_are(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = []

    def spy(_model: DecoderLM, prompt: torch.Tensor, *_: object, **__: object) -> list[list[int]]:
        prompts.append(prompt.tolist())
        return [[]]

    monkeypatch.setattr(DecoderLM, "generate", spy)
    generate(checkpoint, "--prompt a\udcff")  # as Python gives the byte ff of a command line
    assert prompts == [[[97, 255]]]


def test_it_streams(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    class Screen(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    generate(checkpoint, "--max-new-tokens 30")
    assert screen.flushes >= 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--checkpoint /nowhere", "argument --checkpoint: expected a checkpoint of `flexnsa train`, got '/nowhere'"),
        ("--temperature -1", "argument --temperature: expected at least 0, got -1.0"),
        ("--prompt \ud800", r"argument --prompt: expected text that UTF-8 can hold, got '\ud800'"),
        ("--stop \ud800", r"argument --stop: expected text that UTF-8 can hold, got '\ud800'"),
        ("--seed 12345678901234567890", "argument --seed: expected a number of at most 64 bits, got 1234567890123456"),
        ("--max-new-tokens 1000000000000000", "argument --max-new-tokens: expected at most 1073741824"),
        ("--steps graph", "argument --steps: expected 'compiled' or 'eager' on cpu, got 'graph'"),
        ("--top-k 0", "argument --top-k: expected at least 1, got 0"),
        ("--top-p 2", "argument --top-p: expected more than 0 and at most 1, got 2.0"),
        ("--max-new-tokens 0", "argument --max-new-tokens: expected at least 1, got 0"),
        ("--prompt=", "argument --prompt: expected at least one character, got none"),
        ("--device abacus", "argument --device: expected a device such as cpu or cuda:0, got 'abacus'"),
    ],
)
def test_wrong_options_are_named(options: str, message: str, checkpoint: Path, refused: Callable[..., str]):
    assert message in refused(generate, checkpoint, options)
