"""``python -m flexnsa generate``: continue a prompt with a trained model, and print tokens as they come."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from flexnsa.files import FileError
from flexnsa.lm.cli.options import add_config_options, add_device_option, config_options, require, utf8
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.generation.sampling import Sampling
from flexnsa.lm.generation.steps import STEPS
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.training.model_file import read_model_and_tokenizer
from flexnsa.primitives import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="checkpoint of `flexnsa train`, or the folder of its run"
    )
    parser.add_argument("--prompt", type=utf8, required=True, help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        help="number of new tokens, which are bytes unless trained with --tokenizer; default: %(default)s",
    )
    parser.add_argument(
        "--stop", type=lambda text: [*map(utf8, text)], default="", help="characters, at any of which to end"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws; default: %(default)s")
    parser.add_argument(
        "--steps",
        choices=STEPS,
        default="auto",
        help="how to run steps; auto is a CUDA graph per step on CUDA, and eager elsewhere; default: auto",
    )
    add_device_option(parser)
    add_config_options(parser, "sampling", Sampling)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print the prompt and its continuation, token by token, and the speed to stderr."""
    require("safetensors", extra="train")
    if not arguments.prompt:
        raise ValueError("prompt: expected at least one character, got none")
    check_positive_int("max_new_tokens", arguments.max_new_tokens)
    sampling = Sampling(**config_options(arguments, Sampling))
    model, tokenizer = load_model(arguments.checkpoint, arguments.device)
    spelling = ByteSpelling(arguments.stop) if tokenizer is None else TokenizerSpelling(tokenizer, arguments.stop)
    prompt = spelling.encode(arguments.prompt)
    text = _Stream(arguments.prompt, spelling)
    start = time.perf_counter()
    with suppress(_StopReachedError):
        model.generate(
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


def load_model(checkpoint: Path, device: torch.device) -> tuple[DecoderLM, TextTokenizer | None]:
    """Build the model of a training checkpoint, on a device, and its tokenizer, or None for bytes.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileError: the file is not a whole checkpoint of a model of text, or its kernels do not run on the device.
    """
    model, file = read_model_and_tokenizer(checkpoint)
    config, tokenizer = model.config, None
    if file is not None:
        require("tokenizers", extra="hf")
        tokenizer = TextTokenizer(file)
    elif config.vocab_size != 256:
        raise FileError(f"{checkpoint}: of {config.vocab_size} tokens, expected a model of bytes; take another one")
    if config.attention == "nsa" and config.impl == "triton" and device.type != "cuda":
        raise FileError(f"{checkpoint}: of a model with impl='triton', expected a CUDA device, got --device {device}")
    return model.to(device), tokenizer


class _StopReachedError(Exception):
    """The text before a stop has been printed."""


class _Stream:
    """Prints tokens as text as soon as they make up characters."""

    def __init__(self, prompt: bytes, spelling: Spelling) -> None:
        self.spelling, self.count = spelling, 0
        begin = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(prompt)
        print(begin, end="", flush=True)

    def write(self, _row: int, token: int) -> None:
        text = self.spelling.decode(token)
        stop = next((place for place, character in enumerate(text) if character in self.spelling.stop_characters), None)
        self.count += 1
        print(text[:stop], end="", flush=True)
        if stop is not None:
            raise _StopReachedError

    def end(self) -> None:
        print(self.spelling.end(), flush=True)


class ByteSpelling:
    """A prompt as bytes, and those after it as whole characters; an unfinished one of the prompt continues in them."""

    unit, stop_characters = "bytes", ""

    def __init__(self, stop: list[bytes]) -> None:
        self.stop_tokens = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, prompt: bytes) -> list[int]:
        """Return the bytes."""
        self._decoder.decode(prompt)
        return list(prompt)

    def decode(self, token: int) -> str:
        """Return the characters that a byte completes."""
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        """Return a replacement character for an unfinished one."""
        return self._decoder.decode(b"", True)


class TokenizerSpelling:
    """A prompt as tokens of a tokenizer, and those after it as whole characters.

    Stops are characters of the text and no tokens, because a token may have them among other characters.
    """

    unit = "tokens"

    def __init__(self, tokenizer: TextTokenizer, stop: list[bytes]) -> None:
        self.stop_tokens: list[bytes] = []
        self.stop_characters = b"".join(stop).decode(errors="replace")
        self._tokenizer = tokenizer
        self.decode = tokenizer.stream([])
        """Gives the characters that a token completes."""

    def encode(self, prompt: bytes) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            ValueError: it is not UTF-8, or the tokenizer makes no token of it.
        """
        try:
            tokens = self._tokenizer.encode(prompt.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt: expected UTF-8 for a tokenizer, got {error}") from error
        if not tokens:
            raise ValueError(f"prompt: expected text of at least one token, got {prompt.decode()!r}")
        self.decode = self._tokenizer.stream(tokens)
        return tokens

    def end(self) -> str:
        """Return nothing: unfinished characters are dropped."""
        return ""


Spelling = ByteSpelling | TokenizerSpelling
