"""Tokens per second of transformers' continuous batching, drop-in and dense, beside ``generate`` on a static batch.

    python -m benchmarks transformers.serving --json benchmarks/results/transformers_serving.json

A Llama of 1.1B parameters with random weights in bf16, as in ``transformers.decoding``, answers requests of 2k to 32k
random tokens with 128 tokens each. The static batch is padded to its longest request. Points that the file holds
already are not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.harness import options
from benchmarks.transformers.decoding import SIZES, TINY, make, measure_each

WAYS = ("static batch", "continuous batching")


def requests(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Draw requests of a sixteenth of the longest up to the longest, evenly."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest // 16, longest, count).long().tolist()
    return [torch.randint(1, vocab_size, (length,), generator=draw).tolist() for length in lengths]


def answer(model: Any, way: str, prompts: list[list[int]], tokens: int) -> None:
    """Generate the same number of tokens for every request.

    Raises:
        RuntimeError: some request was not answered to its end.
    """
    greedy = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    if way == "continuous batching":
        batching = ContinuousBatchingConfig()
        answers = model.generate_batch(prompts, greedy, continuous_batching_config=batching, progress_bar=False)
        lengths = [len(one.generated_tokens) for one in answers.values()]
    else:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        lengths = [len(row) - longest for row in model.generate(ids, greedy, attention_mask=(ids != 0).long())]
    if lengths != [tokens] * len(prompts):
        raise RuntimeError(f"answers: expected {len(prompts)} of {tokens} tokens, got {lengths}")


def measure(point: dict[str, Any], sizes: dict[str, Any], device: str, tokens: int) -> dict[str, Any]:
    """Answer a few tokens, and time the answers of all."""
    model = make(point["name"], sizes, device)
    prompts = requests(point["requests"], point["longest"], sizes["vocab_size"])
    answer(model, point["way"], prompts[:2], 2)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    answer(model, point["way"], prompts, tokens)
    seconds = time.perf_counter() - begin
    result: dict[str, Any] = {"seconds": seconds, "tokens_per_second": tokens * len(prompts) / seconds}
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, contexts=[32_768], deadline=540, tiny=False)
    parser.add_argument("--names", nargs="+", default=["dense", "drop-in", "converted"], help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each; default: %(default)s")
    arguments: argparse.Namespace = parser.parse_args(argv)
    if arguments.tiny:
        arguments.contexts, arguments.requests, arguments.tokens = [160], 3, 3
    sizes, count = TINY if arguments.tiny else SIZES, arguments.requests
    ways = [(longest, way, name) for longest in arguments.contexts for way in WAYS for name in arguments.names]
    points = [{"name": name, "way": way, "requests": count, "longest": longest} for longest, way, name in ways]
    measure_each(points, lambda x: measure(x, sizes, arguments.device, arguments.tokens), arguments, __doc__)


if __name__ == "__main__":
    main()
