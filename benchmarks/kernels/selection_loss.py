"""Time what an indexer costs: the loss that teaches it, with its gradient, and a decoded token.

    python -m benchmarks kernels.selection_loss --json selection_loss.json      # a minute on an H200
    python -m benchmarks kernels.selection_loss --tiny --device cpu --lengths 256     # a rehearsal

One step has ``--tokens`` tokens in sequences of each length, in the attention of the ``large`` preset. Each scorer is
timed by the implementation of the device and in chunks of products, whose results it must repeat; ``difference`` is the
largest of loss and gradients, relative to the largest of each. Decoding is one layer's step at the longest length, as a
CUDA graph on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding.gpu import graph_ms, wall_ms
from benchmarks.decoding.workloads import Sparse
from benchmarks.harness import options
from benchmarks.harness.session import Point, Session
from benchmarks.harness.setting import TINY_SIZES, Setting, large
from flexnsa import NSAConfig, selection_loss
from flexnsa.config import num_compressed

CHUNKS = "sdpa"
"""The implementation that computes the loss in chunks of products on every device."""
ROUNDS = 20


def scorers(config: NSAConfig, group: int) -> dict[str, NSAConfig]:
    """The paper's compressed keys, and index keys for one head up to all heads of a group."""
    fine = {"index_block_size": 8, "index_stride": 8}
    counts = [count for count in (1, 2, 3, group) if group % count == 0]
    heads = {f"index heads: {count}": replace(config, index_heads=count, **fine) for count in dict.fromkeys(counts)}
    return {"compressed keys": config, **heads}


def loss_inputs(setting: Setting, config: NSAConfig, batch: int, length: int) -> dict[str, Any]:
    """Random arguments of the loss; the scorer's keys and queries are leaves."""
    heads = setting.num_heads, setting.num_kv_heads
    q, k = (setting.random(batch, count, length, setting.head_dim) for count in heads)
    keys = setting.random(batch, heads[1], num_compressed(length, config.scoring), setting.head_dim)
    inputs: dict[str, Any] = {"q": q, "k": k, "k_cmp": keys.requires_grad_(), "config": config}
    if config.index_heads is not None:
        index_heads = heads[1] * config.index_heads
        inputs["q_index"] = setting.random(batch, index_heads, length, setting.head_dim).requires_grad_()
    return inputs


def differentiated(x: dict[str, Any], impl: str) -> list[Tensor]:
    loss = selection_loss(**x, impl=impl)
    return [loss.detach(), *torch.autograd.grad(loss, [x[name] for name in ("k_cmp", "q_index") if name in x])]


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    pairs = ((a.float(), b.float()) for a, b in zip(first, second, strict=True))
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def measure_loss(session: Session, x: dict[str, Any], point: Point) -> None:
    """Compare and time both implementations."""
    runs = {name: partial(differentiated, x, impl) for name, impl in (("ms", "auto"), ("chunks_ms", CHUNKS))}
    results = [run() for run in runs.values()]
    point["difference"] = difference(*results)
    for name, run in runs.items():
        point[name] = session.clock.median(run, ROUNDS if name == "ms" else 3)


def measure_decoding(session: Session, setting: Setting, length: int, point: Point) -> None:
    """Time one token of one layer after ``length``."""
    workload = Sparse(setting, 1, length + 64)
    workload.go_to(length)
    call = workload.calls()["layer"]
    clock: Callable[..., float] = graph_ms if session.clock.cuda else wall_ms
    point["ms"] = clock(session, next(iter(call.values())))


def main(argv: Sequence[str] | None = None) -> None:
    lengths = [8192, 32768, 65536]
    parser = options.parser(
        __doc__, json=options.RESULTS / "selection_loss.json", seconds=230, lengths=lengths, tiny=False
    )
    parser.add_argument("--tokens", type=int, default=65536, help="of a step")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    torch.manual_seed(0)
    setting = large(arguments.device)
    if arguments.tiny:
        setting = replace(setting, num_heads=4, head_dim=16, dim=None, config=TINY_SIZES)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict() | {"tokens": arguments.tokens})
    session = Session(setting, recording, arguments.seconds)

    def take(point: Point, action: Callable[[], object]) -> None:
        session.attempt(point, action)
        recording.add(point)
        print(f"{time.monotonic() - start:5.0f} s ", *(f"{key} {value}" for key, value in point.items()), flush=True)

    for length in arguments.lengths:
        for name, config in scorers(setting.config, setting.num_heads // setting.num_kv_heads).items():
            point: Point = {"part": "loss", "name": name, "seq_len": length}
            x = loss_inputs(setting, config, max(1, arguments.tokens // length), length)
            take(point, partial(measure_loss, session, x, point))
    with torch.no_grad():
        for name, config in scorers(setting.config, setting.num_heads // setting.num_kv_heads).items():
            point = {"part": "decoding", "name": name, "seq_len": max(arguments.lengths)}
            indexed = replace(setting, config=config)
            take(point, partial(measure_decoding, session, indexed, max(arguments.lengths), point))


if __name__ == "__main__":
    main()
