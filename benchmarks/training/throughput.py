"""Measure training: tokens a second and peak memory of a decoder with NSA and of its dense baseline, whole steps.

    python -m benchmarks training.throughput --json training.json                  # on a GPU: 4k to 64k tokens a row
    python -m benchmarks training.throughput --device cpu --tiny --lengths 128     # rehearse

A step is forward, loss, backward and AdamW, bf16 under autocast, nothing checkpointed. Rows fill ``--tokens`` a step.
Seconds of the first step are those of compilation: of one layer for all of them, or with ``--compile model`` of all;
the compiler is imported before, and the seconds that this takes are recorded, too.
Steps are launched kernel by kernel; ``graph_step_ms`` is one that replays a captured step, as one CUDA graph.
Kernels of a step are those that the GPU ran in one; ``--kernels 40`` records the 40 that took longest, each with its
milliseconds and launches. Models with an indexer are taught by the selection loss. A point that is recorded is not
measured again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.graphs import capture
from benchmarks.harness.launches import time_kernels
from benchmarks.harness.setting import TINY_MODEL
from flexnsa import NSAConfig, SelectionLoss
from flexnsa.lm import DecoderConfig, DecoderLM, preset
from flexnsa.lm.measure.memory import MIB

MODELS = {
    "m7c-125m": preset("m7c-125m", checkpointing=False),
    "text-125m": preset("text-125m"),
    **{f"text-125m, shared index {layers}": preset("text-125m", share_index=layers) for layers in (2, 3, 6)},
    "text-125m without indexer": preset("text-125m", nsa=NSAConfig()),
    "16 heads of 128": DecoderConfig(dim=2048, num_layers=12, num_heads=16, num_kv_heads=4, head_dim=128),
    "tiny": TINY_MODEL,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "training.json",
        seconds=500,
        lengths=[8192, 32768, 16384, 65536, 4096],
        impl="auto",
        tiny=False,
    )
    parser.add_argument("--models", nargs="+", default=["m7c-125m", "16 heads of 128"], choices=MODELS)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="timed ones; default: %(default)s")
    parser.add_argument(
        "--compile", choices=("layers", "model", "nothing"), default="layers", help="default: %(default)s"
    )
    parser.add_argument("--kernels", type=int, default=0, help="so many of the longest; default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.models, arguments.compile, arguments.tokens = ["tiny"], "nothing", 1
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    recording = options.open_recording(arguments, __doc__, keep=True)
    started = time.monotonic()
    if arguments.compile != "nothing":
        torch.compile(lambda x: x.sin())(torch.zeros(16, device=arguments.device, requires_grad=True)).sum().backward()
        recording.note(import_compiler_s=time.monotonic() - started)
    for name in arguments.models:
        for length in arguments.lengths:
            for attention in ("nsa", "dense"):
                impl = arguments.impl if attention == "nsa" else "auto"
                key = {"model": name, "attention": attention, "impl": impl, "seq_len": length}
                key["compile"] = arguments.compile
                done = any(key.items() <= point.items() for point in recording.points)
                if done or time.monotonic() - started > arguments.seconds:
                    continue
                config = replace(MODELS[name], attention=attention, impl=impl)
                point = key | measure(config, length, arguments)
                recording.add(point, key)
                print(*(f"{field} {value}" for field, value in point.items()), flush=True)


def measure(config: DecoderConfig, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a fresh model for a few steps."""
    torch.manual_seed(0)
    device, cuda = arguments.device, arguments.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0  # by earlier points: workspaces of the graphs' streams
    model = DecoderLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda, capturable=cuda)
    if arguments.compile == "layers":
        model.compile_layers()
    forward = torch.compile(model) if arguments.compile == "model" else model
    batch = max(1, arguments.tokens // length)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), device=device)
    indexed = config.attention == "nsa" and config.nsa.index_heads is not None
    number = torch.zeros((), dtype=torch.int64, device=device)  # of the step; a tensor is compiled once for all steps

    def step() -> None:
        selection = SelectionLoss(step=number) if indexed else None
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens[:, :-1], targets=tokens[:, 1:], selection=selection)
        (loss if selection is None else loss + selection.total).backward()
        number.add_(1)
        optimizer.step()
        optimizer.zero_grad()

    try:
        first, _, *seconds = (_seconds_of(step, cuda=cuda) for _ in range(arguments.steps + 2))
        gpu = _on_gpu(step, before, arguments) if cuda else {}
    except torch.OutOfMemoryError:
        return {"batch": batch, "error": "out of memory"}
    finally:
        torch._dynamo.reset()
    point = {"batch": batch, "first_step_s": first, "step_ms": 1e3 * statistics.median(seconds)}
    return point | {"tokens_per_s": batch * length / statistics.median(seconds)} | gpu


def _seconds_of(step: Callable[[], object], *, cuda: bool) -> float:
    start = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _on_gpu(step: Callable[[], object], before: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Memory of the steps so far, kernels of another, and the time of steps that replay a captured one."""
    peak, kernels = (torch.cuda.max_memory_allocated() - before) / MIB, time_kernels(step)
    measured: dict[str, Any] = {"peak_mib": peak, "kernels_a_step": sum(kernel.launches for kernel in kernels)}
    if arguments.kernels:
        longest = kernels[: arguments.kernels]
        measured["longest_kernels"] = [[kernel.name[:100], round(kernel.ms, 3), kernel.launches] for kernel in longest]
    torch.cuda.empty_cache()
    try:
        replay, _ = capture(step)
    except torch.OutOfMemoryError:
        return measured
    _, *seconds = (_seconds_of(replay, cuda=True) for _ in range(arguments.steps + 1))
    return measured | {"graph_step_ms": 1e3 * statistics.median(seconds)}


if __name__ == "__main__":
    main()
