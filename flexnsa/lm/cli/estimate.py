"""``python -m flexnsa estimate``: memory of training and cost of decoding, from the configuration alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from fractions import Fraction

import torch

from flexnsa.attention.plan import choose_name
from flexnsa.lm.cli.options import add_checkpointing_option, add_config_option, add_stages_options
from flexnsa.lm.estimate.decoding import DecodingEstimate, estimate_decoding
from flexnsa.lm.estimate.training import IMPLEMENTATIONS, MemoryEstimate, estimate_training
from flexnsa.lm.measure.table import format_table
from flexnsa.lm.model.config import PRESETS, DecoderConfig
from flexnsa.lm.training.checks import check_dense_stages
from flexnsa.lm.training.config import TRAIN_PRESETS

MIB = 2**20
UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; the preset gives the defaults."""
    parser.add_argument(
        "--preset", choices=PRESETS, default="large", help="sizes and hyper-parameters; default: %(default)s"
    )
    parser.add_argument("--seq", dest="seq_len", type=int, help="tokens of a sequence; default: 2048, or of --stages")
    add_stages_options(parser)
    parser.add_argument(
        "--batch", dest="batch_size", type=int, help="number of sequences; default: as the preset trains"
    )
    parser.add_argument("--layers", dest="num_layers", type=int, help="number of layers; default: of the preset")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="precision of training; default: as the preset trains; bf16 is autocast",
    )
    add_checkpointing_option(parser)
    add_config_option(parser, DecoderConfig, "recompute")
    parser.add_argument(
        "--attention", choices=("nsa", "dense"), default="nsa", help="kind of attention; default: %(default)s"
    )
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
    training = TRAIN_PRESETS[arguments.preset]
    batch_size = training.batch_size if arguments.batch_size is None else arguments.batch_size
    precision = arguments.precision or training.precision
    config = _config(arguments)
    largest_dim = max(config.head_dim, config.v_head_dim or 0)
    impl = choose_name(arguments.impl, is_cuda=torch.cuda.is_available(), modded=False, largest_dim=largest_dim)
    stages = getattr(arguments, "stages", ())
    last = stages[-1][0] if stages else 2048
    seq_len = last if arguments.seq_len is None else arguments.seq_len
    dense_stages = getattr(arguments, "dense_stages", 0)
    shapes = [(batch_size, seq_len)]
    if stages or dense_stages:
        sizes = {"seq_len": seq_len, "batch_size": batch_size, "stages": stages, "dense_stages": dense_stages}
        planned = replace(training, **sizes)
        check_dense_stages(config, planned)
        # A dense stage saves less: one branch of as many tokens
        shapes = [(stage.batch_size, stage.seq_len) for stage in planned.by_stage().values()][dense_stages:]
    steps = {
        (rows, tokens): estimate_training(
            config,
            seq_len=tokens,
            batch_size=rows,
            precision=precision,
            impl=impl,
            fused_norm=impl != "sdpa",
            optimizer=True,
            compiled=arguments.compile,
        )
        for rows, tokens in shapes
    }
    (rows, tokens), step = max(steps.items(), key=lambda item: max(item[1].peak_forward, item[1].peak_training))
    token = estimate_decoding(config, seq_len=seq_len, batch_size=batch_size)
    print(
        f"{arguments.preset}: {config.num_layers} layers of width {config.dim}, {config.attention} attention, "
        f"B={rows}, S={tokens:,}, {precision}, impl={impl}, "
        f"checkpointing {_checkpointing(config)}{', compiled' if arguments.compile else ''}\n"
    )
    print(training_table(step, config) + "\n\n" + decoding_table(token, config.attention))
    if arguments.budget is not None:
        peak = max(step.peak_forward, step.peak_training)
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


def _config(arguments: argparse.Namespace) -> DecoderConfig:
    names = ("num_layers", "checkpointing", "recompute", "attention")
    changes = {name: getattr(arguments, name, None) for name in names}
    return replace(PRESETS[arguments.preset], **{name: x for name, x in changes.items() if x is not None})


def _checkpointing(config: DecoderConfig) -> str:
    """Describe which layers are checkpointed."""
    count = sum(map(config.is_checkpointed, range(config.num_layers)))
    return {0: "off", config.num_layers: "on"}.get(count, f"of {count} layers")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]I?B)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 65GiB or 800MB, got {text!r}")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])
