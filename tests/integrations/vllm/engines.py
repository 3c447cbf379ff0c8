"""Engines of vLLM in this process, and what they answer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.metrics.reader import Counter, Gauge

from tests.integrations.vllm.references import NEW_TOKENS, Answer

BASE: dict[str, Any] = {
    "block_size": 16,
    "disable_log_stats": False,
    "dtype": "float32",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 4096,
    "num_gpu_blocks_override": 1024,  # a gigabyte of zeros takes as long as all answers
    "skip_tokenizer_init": True,
}


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """Serve a checkpoint, and forget it."""
    gc.freeze()  # vLLM collects garbage nine times, each time among a million objects of what was imported
    with patch("gc.freeze"), patch("gc.unfreeze"):
        try:
            llm = LLM(str(folder), **BASE | options)
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
        finally:  # a refused model leaves processes connected, too
            cleanup_dist_env_and_memory()
            gc.collect()


def ask(llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **others: Any) -> tuple[list[Answer], int]:
    """Return what follows prompts that arrive together, and how many of their tokens were cached."""
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False, **others)
    answers, cached = [], 0
    for prompt, out in zip(prompts, outputs, strict=True):
        new: Any = out.outputs[0]
        logs = [step[token].logprob for step, token in zip(new.logprobs, new.token_ids, strict=True)]
        answers.append(Answer(prompt, list(new.token_ids), logs))
        cached += out.num_cached_tokens or 0
    return answers, cached


def metrics(llm: LLM) -> dict[str, float]:
    """Return the engine's counters by their names."""
    return {x.name.removeprefix("vllm:"): x.value for x in llm.get_metrics() if isinstance(x, Counter | Gauge)}
