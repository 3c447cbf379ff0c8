"""The options that ``train`` and ``diagnose`` share: the model, its training, and the text."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from flexnsa.config import NSAConfig
from flexnsa.lm.cli.options import (
    add_checkpointing_option,
    add_config_options,
    add_device_option,
    config_options,
    require,
)
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.diagnosis.recipe import Recipe, corpus
from flexnsa.lm.model.config import PRESETS, DecoderConfig, changed
from flexnsa.lm.training.checkpoint import configs_of_run
from flexnsa.lm.training.config import TRAIN_PRESETS, TrainConfig

_NOT_OPTIONS = ("nsa", "vocab_size", "checkpointing")
_NOT_AXES = ("stages", "model", "training", "nsa", "text", "device", "leave_out", "reduce_dtype", "context_parallel")


def add_recipe_options(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Declare the options; sizes that are not given come from the preset.

    Args:
        parser: of the command.
        skip: fields of :class:`~flexnsa.lm.TrainConfig` that the command does not use, or names differently.
    """
    parser.add_argument("--text", type=Path, help="a text file or a folder; default: Python's standard library")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a file of Hugging Face tokenizers, or a folder with tokenizer.json; default: a token is a byte",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="sizes and hyper-parameters; default: text-125m on a GPU, text-small on a CPU"
    )
    add_device_option(parser)
    parser.add_argument("--compile", action="store_true", help="run the layers through torch.compile")
    add_checkpointing_option(parser)
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="fill sequences with whole documents, which blank lines separate (default: cut the text anywhere)",
    )
    add_config_options(parser, "model", DecoderConfig, skip=_NOT_OPTIONS)
    add_config_options(parser, "branches of NSA, in tokens or blocks", NSAConfig)
    add_config_options(parser, "training", TrainConfig, skip=("pack", "stages", *skip))


def recipe_of_options(arguments: argparse.Namespace, resumed: Path | None = None, **others: Any) -> Recipe:
    """Return what the options name, with other fields of the recipe.

    Args:
        arguments: of the command.
        resumed: the folder of a run, which says what is left open if there is one and no ``--preset``.
        **others: fields of the recipe.

    Raises:
        FileError: the checkpoint of the run cannot be read.
        ValueError: an option is out of range, or does not fit another.
    """
    require("numpy", "safetensors", "tqdm", extra="train")
    run = configs_of_run(resumed) if resumed is not None and arguments.preset is None else None
    model, training = run or (None, None)
    corpus.cache_clear()  # the text may have changed since another command of this process
    return Recipe(
        model=model_config(arguments, model),
        training=train_config(arguments, training),
        text=arguments.text,
        tokenizer=arguments.tokenizer,
        device=str(arguments.device),
        compiled=arguments.compile,
        **others,
    )


def model_config(arguments: argparse.Namespace, base: DecoderConfig | None = None) -> DecoderConfig:
    """Return the model that the options name; what they leave open is as in ``base``, or in the preset."""
    overrides = config_options(arguments, DecoderConfig, skip=("nsa",))
    tokenizer = text_tokenizer(arguments)
    overrides |= {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size}
    config = changed(base or PRESETS[preset_of_options(arguments)], **overrides)
    return replace(config, nsa=replace(config.nsa, **config_options(arguments, NSAConfig)))


def preset_of_options(arguments: argparse.Namespace) -> str:
    """Return the preset that the options name, or that of the device."""
    return arguments.preset or ("text-125m" if torch.device(arguments.device).type == "cuda" else "text-small")


def text_tokenizer(arguments: argparse.Namespace) -> TextTokenizer | None:
    """Read the tokenizer that the options name, or return None."""
    if arguments.tokenizer is None:
        return None
    require("tokenizers", extra="hf")
    return TextTokenizer(arguments.tokenizer)


def train_config(arguments: argparse.Namespace, base: TrainConfig | None = None) -> TrainConfig:
    """Return the hyper-parameters that the options name; what they leave open is as in ``base``, or in the preset."""
    options = config_options(arguments, TrainConfig)
    if "stages" in options:
        options = {"seq_len": options["stages"][-1][0]} | options
    return replace(base or TRAIN_PRESETS[preset_of_options(arguments)], **options)


def axis_of_options(text: str) -> tuple[str, list[Any]]:
    """Read the name of an option and the values to try, such as ``seq_len=512,1024``.

    Raises:
        ValueError: there is no such option, or a value is not of its kind.
    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    classes = (Recipe, DecoderConfig, NSAConfig, TrainConfig)
    kinds = {field.name: str(field.type) for config in classes for field in fields(config)}
    if name in _NOT_AXES or name not in kinds or not values:
        raise ValueError(f"axis: expected NAME=VALUE,VALUE with the name of an option, got {text!r}")
    try:
        return name, [_value(kinds[name], value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"axis: expected values of {name}, {kinds[name]}, got {values!r}") from error


def _value(kind: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return tuple(text.split("+")) if text else ()
    if kind.startswith("bool") and text in ("true", "false"):
        return text == "true"
    if kind == "bool":
        raise ValueError(f"expected true or false, got {text!r}")
    return {"int": int, "float": float}.get(kind.split(" |")[0], str)(text)
