"""``python -m flexnsa generate``: continue a prompt with a trained model, printed as it is written."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from pathlib import Path

import torch

from flexnsa.cli.options import add_config_options, add_device_option, config_options, require, utf8
from flexnsa.errors import FileError
from flexnsa.models import DecoderLM, Sampling
from flexnsa.models.steps import STEPS
from flexnsa.training.model_file import read_model
from flexnsa.validation import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="of `flexnsa train`, or the folder of its run")
    parser.add_argument("--prompt", type=utf8, required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="bytes to add; default: %(default)s")
    parser.add_argument("--stop", type=_characters, default="", help="end at any of these characters")
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: %(default)s")
    parser.add_argument(
        "--steps", choices=STEPS, default="auto", help="auto is a CUDA graph a step, and eager elsewhere; default: auto"
    )
    add_device_option(parser)
    add_config_options(parser, "sampling", Sampling)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print the prompt and what the model adds, byte by byte; the speed goes to stderr."""
    require("safetensors", extra="train")
    if not arguments.prompt:
        raise ValueError("prompt: expected at least one character, got none")
    check_positive_int("max_new_tokens", arguments.max_new_tokens)
    sampling = Sampling(**config_options(arguments, Sampling))
    model = load_model(arguments.checkpoint).to(arguments.device)
    text = _Stream(arguments.prompt)
    start = time.perf_counter()
    (added,) = model.generate(
        torch.tensor([list(arguments.prompt)], device=arguments.device),
        arguments.max_new_tokens,
        sampling=sampling,
        stop_tokens=arguments.stop,
        seed=arguments.seed,
        on_token=text.write,
        steps=arguments.steps,
    )
    text.end()
    seconds = time.perf_counter() - start
    print(f"{len(added)} bytes in {seconds:.1f} s, {len(added) / seconds:.0f} a second", file=sys.stderr)


def load_model(checkpoint: Path) -> DecoderLM:
    """Build the model of a training checkpoint, on the CPU.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileError: the file is no checkpoint of a model of bytes, or not a whole one.
    """
    model = read_model(checkpoint)
    if model.config.vocab_size != 256:
        raise FileError(
            f"{checkpoint}: of {model.config.vocab_size} tokens, expected a model of bytes; take another one"
        )
    return model


def _characters(text: str) -> list[bytes]:
    return [utf8(character) for character in text]


class _Stream:
    """Prints bytes as text as soon as they make up characters."""

    def __init__(self, prompt: bytes) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._print(prompt)

    def write(self, _row: int, byte: int) -> None:
        self._print(bytes([byte]))

    def end(self) -> None:
        self._print(b"", final=True)
        print(flush=True)

    def _print(self, data: bytes, final: bool = False) -> None:
        print(self.decoder.decode(data, final), end="", flush=True)
