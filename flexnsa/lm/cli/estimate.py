"""``python -m flexnsa estimate``: memory of training and cost of decoding, from the configuration alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from flexnsa.attention.plan import choose_name
from flexnsa.lm.cli.options import add_checkpointing_option, add_config_option, add_stages_options, config_options
from flexnsa.lm.estimate.decoding import DecodingEstimate, estimate_decoding
from flexnsa.lm.estimate.training import IMPLEMENTATIONS, MemoryEstimate, estimate_training
from flexnsa.lm.measure.table import format_table
from flexnsa.lm.model.config import PRESETS, DecoderConfig
from flexnsa.lm.training.checks import check_dense_stages
from flexnsa.lm.training.config import TRAIN_PRESETS, TrainConfig

MIB = 2**20
UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; the preset gives the defaults."""
    parser.add_argument(
        "--preset", choices=PRESETS, default="large", help="sizes and hyper-parameters; default: %(default)s"
    )
    for option, name, words in (
        ("--seq", "seq_len", "tokens of a sequence; default: 2048, or of --stages"),
        ("--batch", "batch_size", "number of sequences; default: as the preset trains"),
        ("--layers", "num_layers", "number of layers; default: of the preset"),
    ):
        parser.add_argument(option, dest=name, type=int, default=argparse.SUPPRESS, help=words)
    add_stages_options(parser)
    add_config_option(parser, TrainConfig, "precision")
    add_checkpointing_option(parser)
    for name in ("recompute", "attention"):
        add_config_option(parser, DecoderConfig, name)
    parser.add_argument(
        "--impl",
        choices=("auto", *IMPLEMENTATIONS),
        default="auto",
        help="implementation; flex and triton train on CUDA; default: %(default)s, what would run here",
    )
    parser.add_argument("--compile", action="store_true", help="layers run through torch.compile")
    parser.add_argument(
        "--budget", type=_size, help="memory limit, such as 65GiB; exit with status 1 if training takes more"
    )


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print the estimates, and compare training, in the largest of its stages that select, with the budget."""
    config = replace(PRESETS[arguments.preset], **config_options(arguments, DecoderConfig, skip=("impl",)))
    last = arguments.stages[-1][0] if "stages" in arguments else 2048
    training = replace(TRAIN_PRESETS[arguments.preset], **({"seq_len": last} | config_options(arguments, TrainConfig)))
    check_dense_stages(config, training)
    largest_dim = max(config.head_dim, config.v_head_dim or 0)
    impl = choose_name(arguments.impl, is_cuda=torch.cuda.is_available(), modded=False, largest_dim=largest_dim)
    estimates: list[tuple[int, TrainConfig, MemoryEstimate]] = []
    # A dense stage saves less: one branch of as many tokens; and one of indexers, what these do
    for stage in list(training.by_stage().values())[training.dense_stages + training.indexer_stages :]:
        sizes: dict[str, Any] = {name: getattr(stage, name) for name in ("seq_len", "batch_size", "precision")}
        options = {"fused_norm": impl != "sdpa", "optimizer": True, "compiled": arguments.compile}
        step = estimate_training(config, impl=impl, **sizes, **options)
        estimates.append((max(step.peak_forward, step.peak_training), stage, step))
    peak, stage, step = max(estimates, key=lambda estimate: estimate[0])
    token = estimate_decoding(config, seq_len=training.seq_len, batch_size=training.batch_size)
    print(
        f"{arguments.preset}: {config.num_layers} layers of width {config.dim}, {config.attention} attention, "
        f"B={stage.batch_size}, S={stage.seq_len:,}, {stage.precision}, impl={impl}, "
        f"checkpointing {_checkpointing(config)}{', compiled' if arguments.compile else ''}\n"
    )
    print(training_table(step, config) + "\n\n" + decoding_table(token, config.attention))
    if arguments.budget is not None:
        verdict = "within" if peak <= arguments.budget else "over"
        print(f"\n{verdict} the budget: {peak / 2**30:,.2f} GiB of {arguments.budget / 2**30:,.2f} GiB")
        if peak > arguments.budget:
            raise SystemExit(1)


def training_table(step: MemoryEstimate, config: DecoderConfig) -> str:
    """Return a table of the memory of a training step, and of the parts that one layer saves."""
    rows = [
        ["parameters, fp32", step.parameters],
        ["gradients", step.parameters],
        ["AdamW's moments", step.optimizer],
        [f"saved for backward, {config.num_layers} layers and head", step.saved],
        ["after forward: parameters and saved", step.after_forward],
        ["peak of forward, moments included", step.peak_forward],
        ["peak of forward and backward, moments included", step.peak_training],
    ]
    parts = [[f"  {name}", size] for name, size in sorted(step.saved_by.items(), key=lambda item: -item[1])]
    when = "by each layer" if _checkpointing(config) == "off" else "of a layer while it is recomputed"
    total = [[f"saved {when}", sum(step.saved_by.values())]]
    return format_table(["training", "MiB"], [[name, f"{size / MIB:,.1f}"] for name, size in rows + total + parts])


def decoding_table(token: DecodingEstimate, attention: str) -> str:
    """Return a table of the cost of a decoded token, keys and values in bf16, with the dense baseline of NSA."""
    pairs = [
        ("cache, MiB", token.cache_bytes / MIB, token.dense_cache_bytes / MIB),
        ("keys and values read, MiB", token.bytes_read / MIB, token.dense_bytes_read / MIB),
        ("GFLOP", token.flops / 1e9, token.dense_flops / 1e9),
    ]
    if attention == "dense":
        return format_table(["decoding one token", "dense"], [[name, f"{dense:,.2f}"] for name, _, dense in pairs])
    rows = [[name, f"{nsa:,.2f}", f"{dense:,.2f}", f"{dense / nsa:.2f}"] for name, nsa, dense in pairs]
    return format_table(["decoding one token", "NSA", "dense", "dense / NSA"], rows)


def _checkpointing(config: DecoderConfig) -> str:
    """Describe which layers are checkpointed."""
    count = sum(map(config.is_checkpointed, range(config.num_layers)))
    return {0: "off", config.num_layers: "on"}.get(count, f"of {count} layers")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]I?B)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 65GiB or 800MB, got {text!r}")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])
