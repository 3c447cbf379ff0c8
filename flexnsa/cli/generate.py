"""``python -m flexnsa generate``: continue a prompt with a trained model, printed as it is written."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from flexnsa.cli.options import add_config_options, add_device_option, config_options, require, utf8
from flexnsa.cli.spelling import ByteSpelling, Spelling, TokenizerSpelling
from flexnsa.errors import FileError
from flexnsa.models import DecoderLM, Sampling
from flexnsa.models.steps import STEPS
from flexnsa.training import TextTokenizer
from flexnsa.training.model_file import read_model_and_tokenizer
from flexnsa.validation import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="of `flexnsa train`, or the folder of its run")
    parser.add_argument("--prompt", type=utf8, required=True, help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        help="tokens to add, which are bytes unless trained with --tokenizer; default: %(default)s",
    )
    parser.add_argument("--stop", type=_characters, default="", help="end at any of these characters")
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: %(default)s")
    parser.add_argument(
        "--steps", choices=STEPS, default="auto", help="auto is a CUDA graph a step, and eager elsewhere; default: auto"
    )
    add_device_option(parser)
    add_config_options(parser, "sampling", Sampling)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print the prompt and what the model adds, token by token; the speed goes to stderr."""
    require("safetensors", extra="train")
    if not arguments.prompt:
        raise ValueError("prompt: expected at least one character, got none")
    check_positive_int("max_new_tokens", arguments.max_new_tokens)
    sampling = Sampling(**config_options(arguments, Sampling))
    model, tokenizer = load_model(arguments.checkpoint)
    spelling = ByteSpelling(arguments.stop) if tokenizer is None else TokenizerSpelling(tokenizer, arguments.stop)
    prompt = spelling.encode(arguments.prompt)
    text = _Stream(arguments.prompt, spelling)
    start = time.perf_counter()
    with suppress(_StopReachedError):
        model.to(arguments.device).generate(
            torch.tensor([prompt], device=arguments.device),
            arguments.max_new_tokens,
            sampling=sampling,
            stop_tokens=spelling.stop_tokens,
            seed=arguments.seed,
            on_token=text.write,
            steps=arguments.steps,
        )
    text.end()
    seconds = time.perf_counter() - start
    print(f"{text.count} {spelling.unit} in {seconds:.1f} s, {text.count / seconds:.0f} a second", file=sys.stderr)


def load_model(checkpoint: Path) -> tuple[DecoderLM, TextTokenizer | None]:
    """Build the model of a training checkpoint, on the CPU, and the tokenizer that it learned with, if not bytes.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileError: the file is no checkpoint of a model of text, or not a whole one.
    """
    model, file = read_model_and_tokenizer(checkpoint)
    if file is not None:
        require("tokenizers", extra="hf")
        return model, TextTokenizer(file)
    if model.config.vocab_size != 256:
        raise FileError(
            f"{checkpoint}: of {model.config.vocab_size} tokens, expected a model of bytes; take another one"
        )
    return model, None


def _characters(text: str) -> list[bytes]:
    return [utf8(character) for character in text]


class _StopReachedError(Exception):
    """All before a stop is printed."""


class _Stream:
    """Prints tokens as text as soon as they make up characters."""

    def __init__(self, prompt: bytes, spelling: Spelling) -> None:
        self.spelling, self.count = spelling, 0
        begin = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(prompt)
        print(begin, end="", flush=True)

    def write(self, _row: int, token: int) -> None:
        text = self.spelling.decode(token)
        kept = next((place for place, character in enumerate(text) if character in self.spelling.stop_characters), None)
        self.count += 1
        print(text[:kept], end="", flush=True)
        if kept is not None:
            raise _StopReachedError

    def end(self) -> None:
        print(self.spelling.end(), flush=True)
