"""Time generation by a whole model with NSA and by its dense baseline: the first token, and those that follow.

    python -m benchmarks decoding.generation --json generation.json         # at most 150 seconds on an H200
    python -m benchmarks decoding.generation --device cpu --tiny            # a rehearsal

Both go through one :class:`flexnsa.lm.DecodingSession`, on CUDA one graph a step, bf16; tokens are drawn on the
device from the model's probabilities and reach the host in groups of 8. The dense baseline is not slowed by a mask: its
steps are flash attention split over the keys, which stops where a row does, the heads of a group in rows; its prompts
are causal flash attention. Times are those of the wall: *first token* from the call to the first token on the host, the
second time that these prompts are read; *tokens a second*, of all rows, from then to the end. *Session* is making the
caches and the step: the first time, which also compiles, and again, which captures. A point that is recorded is not
measured again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.launches import count_launches
from benchmarks.harness.session import Session
from benchmarks.harness.setting import TINY_MODEL, published
from flexnsa.lm import DecoderConfig, DecoderLM, DecodingSession, preset
from flexnsa.lm.measure.memory import MIB


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    recording = options.open_recording(arguments, __doc__, keep=True)
    session = Session(published(arguments.device), recording, arguments.seconds)
    recording.note(model="tiny" if arguments.tiny else "m7c-125m", device=arguments.device, tokens=arguments.tokens)
    for batch, context, attention in itertools.product(arguments.batches, arguments.contexts, ("nsa", "dense")):
        key = {"attention": attention, "batch": batch, "context": context, "steps": arguments.steps}
        if any(key.items() <= point.items() and "label" not in point for point in recording.points):
            continue
        point: dict[str, Any] = dict(key)
        measured = session.attempt(point, lambda key=key: measure(key, arguments))
        if measured is not None:
            point |= measured
            print(*(f"{name} {value}" for name, value in point.items()), flush=True)
        recording.add(point, key)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "generation.json",
        seconds=130,
        contexts=[1024, 32768],
        batches=[1, 32],
        tiny=False,
    )
    parser.add_argument("--tokens", type=int, default=257, help="of a row, the first included; default: %(default)s")
    parser.add_argument("--steps", default="auto", help="graph, compiled, eager; default: a graph on CUDA, else eager")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.contexts, arguments.batches, arguments.tokens = [64, 200], [1, 3], 17
    return arguments


@torch.no_grad()
def measure(key: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate twice from random prompts, and time the second time."""
    torch.manual_seed(0)
    cuda, batch, context = arguments.device == "cuda", key["batch"], key["context"]
    config = TINY_MODEL if arguments.tiny else preset("m7c-125m", checkpointing=False)
    with torch.device(arguments.device):
        model = DecoderLM(DecoderConfig.from_dict(config.to_dict() | {"attention": key["attention"]})).eval()
        prompts = torch.randint(config.vocab_size, (batch, context))
    if cuda:
        model = model.to(torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()

    def make() -> DecodingSession:
        return DecodingSession(model, batch, context + arguments.tokens, steps=key["steps"])

    session, first_session_s = _timed(make, cuda)
    del session  # before its caches are made once more
    session, session_s = _timed(make, cuda)
    _, first_call_s = _timed(lambda: session.prefill(prompts), cuda)

    stamps: list[float] = []
    start = time.perf_counter()
    rows = session.generate(prompts, arguments.tokens, on_token=lambda *_: stamps.append(time.perf_counter()))
    assert all(len(row) == arguments.tokens for row in rows)
    result: dict[str, Any] = {
        "tokens_per_s": round(batch * (arguments.tokens - 1) / (stamps[-1] - stamps[batch - 1]), 1),
        "first_token_ms": round(1e3 * (stamps[0] - start), 2),
        "first_session_s": round(first_session_s, 2),
        "session_s": round(session_s, 3),
        "first_prompts_s": round(first_call_s, 2),
        "ran": session.steps,
    }
    if cuda:
        result["peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB)
        session.prefill(prompts)
        result["launches_per_token"] = round(count_launches(lambda: session.step(8)) / 8, 1)
    return result


def _timed(action: Any, cuda: bool) -> tuple[Any, float]:
    start = time.perf_counter()
    result = action()
    if cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
