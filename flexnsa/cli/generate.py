"""``python -m flexnsa generate``: continue a prompt with a trained model, printed as it is written."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from pathlib import Path

import torch

from flexnsa.cli.options import add_config_options, config_options, device, reported_by, require
from flexnsa.models import DecoderConfig, DecoderLM, Sampling
from flexnsa.training.checkpoint import read_checkpoint
from flexnsa.training.run import CHECKPOINT_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="of `flexnsa train`: the file or its folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="bytes to add; default: %(default)s")
    parser.add_argument("--stop", default="", help="end at any of these characters")
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: %(default)s")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default_device, help="default: %(default)s")
    add_config_options(parser, "sampling", Sampling)


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print the prompt and what the model adds, byte by byte; the speed goes to stderr."""
    require("safetensors", extra="train")
    with reported_by(parser):
        prompt = arguments.prompt.encode()
        if not prompt:
            raise ValueError("prompt: expected at least one character, got none")
        sampling = Sampling(**config_options(arguments, Sampling))
        model = load_model(arguments.checkpoint).to(arguments.device)
        text = _Stream(prompt)
        start = time.perf_counter()
        (added,) = model.generate(
            torch.tensor([list(prompt)], device=arguments.device),
            arguments.max_new_tokens,
            sampling=sampling,
            stop_tokens=arguments.stop.encode(),
            seed=arguments.seed,
            on_token=text.write,
        )
    text.end()
    seconds = time.perf_counter() - start
    print(f"{len(added)} bytes in {seconds:.1f} s, {len(added) / seconds:.0f} a second", file=sys.stderr)


def load_model(checkpoint: Path) -> DecoderLM:
    """Build the model of a training checkpoint, on the CPU.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    file = checkpoint / CHECKPOINT_NAME if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint: expected a checkpoint of `flexnsa train`, got {str(file)!r}")
    header, tensors = read_checkpoint(file)
    with torch.device("meta"):
        model = DecoderLM(DecoderConfig.from_dict(header["model"]))
    weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    model.load_state_dict(weights, assign=True)
    return model.eval()


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
