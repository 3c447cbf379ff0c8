"""``python -m flexnsa train``: a language model on text, resumed exactly if it was stopped."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from flexnsa.cli.options import (
    add_config_options,
    add_device_option,
    add_recompute_option,
    config_options,
    output_folder,
    require,
)
from flexnsa.config import NSAConfig
from flexnsa.models import PRESETS, DecoderConfig, DecoderLM
from flexnsa.training import TRAIN_PRESETS, TrainConfig, Trainer, read_corpus, run

_NOT_OPTIONS = ("nsa", "branches", "vocab_size", "checkpointing", "recompute")
_LISTS = ("branches", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; sizes that are not given come from the preset."""
    parser.add_argument("--text", type=Path, help="a text file or a folder; default: Python's standard library")
    parser.add_argument("--out", type=output_folder, default="runs/train", help="folder of the log and the checkpoint")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="default: %(default)s")
    add_device_option(parser)
    parser.add_argument("--compile", action="store_true", help="run the layers through torch.compile")
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="recompute every layer in backward instead of keeping its activations",
    )
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
    add_config_options(parser, "training", TrainConfig, skip=("pack",))


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Train, from the checkpoint in ``--out`` if there is one."""
    require("numpy", "safetensors", "tqdm", extra="train")
    model_config = _model_config(arguments)
    train_config = replace(TRAIN_PRESETS[arguments.preset], **config_options(arguments, TrainConfig))
    corpus = read_corpus(arguments.text)
    torch.manual_seed(train_config.seed)
    model = DecoderLM(model_config).to(arguments.device)
    trainer = Trainer(model, corpus, train_config, compiled=arguments.compile)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters; {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate")
    stopped_by = run(trainer, arguments.out)
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)


def _model_config(arguments: argparse.Namespace) -> DecoderConfig:
    base = PRESETS[arguments.preset]
    overrides = config_options(arguments, DecoderConfig, skip=("nsa",))
    overrides |= {name: tuple(overrides[name]) for name in _LISTS if name in overrides}
    return replace(base, nsa=replace(base.nsa, **config_options(arguments, NSAConfig)), **overrides)
