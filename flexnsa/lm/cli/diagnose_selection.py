"""``python -m flexnsa diagnose selection``: how good the choice of blocks of a trained model is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import torch

from flexnsa.checks.primitives import check_positive_int
from flexnsa.lm.cli.generate import check_device, load_model
from flexnsa.lm.cli.options import add_device_option, require
from flexnsa.lm.data.corpus import read_corpus
from flexnsa.lm.diagnosis import selection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="checkpoint of `flexnsa train`, or the folder of its run"
    )
    parser.add_argument(
        "--text", type=Path, help="text file or folder; default: the source of Python's standard library"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence; default: %(default)s")
    parser.add_argument(
        "--sequences", type=int, default=4, help="sequences, spread over the validation text; default: %(default)s"
    )
    add_device_option(parser)


def report(arguments: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """Return a sentence, a table and plain values."""
    require("safetensors", "numpy", extra="train")
    check_positive_int("seq_len", arguments.seq_len)
    check_positive_int("sequences", arguments.sequences)
    model, tokenizer = load_model(arguments.checkpoint)
    check_device(model, arguments.checkpoint, arguments.device)
    corpus = read_corpus(arguments.text, tokenizer)
    corpus.require_rows(arguments.seq_len)
    ids = corpus.tokens("validation").ids
    starts = torch.linspace(0, len(ids) - arguments.seq_len, arguments.sequences).long()
    tokens = torch.stack([ids[start : start + arguments.seq_len] for start in starts.tolist()]).long()
    traced = selection.trace_selection(model.to(arguments.device), tokens.to(arguments.device))
    heads = [{name: None if _is_nan(x) else x for name, x in asdict(head).items()} for head in traced]
    record = {"seq_len": arguments.seq_len, "sequences": arguments.sequences, "heads": heads}
    return selection.sentence(traced), selection.table(traced), record


def _is_nan(x: object) -> bool:
    return isinstance(x, float) and isnan(x)
