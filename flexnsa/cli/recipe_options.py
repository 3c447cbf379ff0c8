"""Which model, trained how, on which text: the options that ``train`` and ``diagnose`` share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from flexnsa.cli.options import (
    add_checkpointing_option,
    add_config_options,
    add_device_option,
    add_recompute_option,
    config_options,
    require,
)
from flexnsa.config import NSAConfig
from flexnsa.models import PRESETS, DecoderConfig
from flexnsa.training import TRAIN_PRESETS, TextTokenizer, TrainConfig

_NOT_OPTIONS = ("nsa", "branches", "vocab_size", "checkpointing", "recompute")
_LISTS = ("branches", "recompute")


def add_recipe_options(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Declare them; sizes that are not given come from the preset.

    Args:
        parser: of the command.
        skip: fields of :class:`~flexnsa.training.TrainConfig` that the command has no use for, or names otherwise.
    """
    parser.add_argument("--text", type=Path, help="a text file or a folder; default: Python's standard library")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a file of Hugging Face tokenizers, or a folder with tokenizer.json; default: a token is a byte",
    )
    parser.add_argument("--preset", choices=PRESETS, default="small", help="default: %(default)s")
    add_device_option(parser)
    parser.add_argument("--compile", action="store_true", help="run the layers through torch.compile")
    add_checkpointing_option(parser)
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="fill rows with whole documents, kept apart: what stands between blank lines (default: cut rows anywhere)",
    )
    parser.add_argument("--branches", nargs="+", default=argparse.SUPPRESS, metavar="TAG", help="of cmp, slc and win")
    add_recompute_option(parser)
    add_config_options(parser, "model", DecoderConfig, skip=_NOT_OPTIONS)
    add_config_options(parser, "branches of NSA, in tokens or blocks", NSAConfig)
    add_config_options(parser, "training", TrainConfig, skip=("pack", *skip))


def model_config(arguments: argparse.Namespace) -> DecoderConfig:
    """Give the model that the options name."""
    base = PRESETS[arguments.preset]
    overrides = config_options(arguments, DecoderConfig, skip=("nsa",))
    tokenizer = text_tokenizer(arguments)
    overrides |= {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size}
    overrides |= {name: tuple(overrides[name]) for name in _LISTS if name in overrides}
    return replace(base, nsa=replace(base.nsa, **config_options(arguments, NSAConfig)), **overrides)


def text_tokenizer(arguments: argparse.Namespace) -> TextTokenizer | None:
    """Read the tokenizer that the options name, if they name one."""
    if arguments.tokenizer is None:
        return None
    require("tokenizers", extra="hf")
    return TextTokenizer(arguments.tokenizer)


def train_config(arguments: argparse.Namespace) -> TrainConfig:
    """Give the hyper-parameters that the options name."""
    return replace(TRAIN_PRESETS[arguments.preset], **config_options(arguments, TrainConfig))
