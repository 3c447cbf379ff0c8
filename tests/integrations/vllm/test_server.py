"""``vllm serve`` with many clients: some cancel, some ask for what cannot be; every other answer is right."""

from __future__ import annotations

import asyncio
import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import torch
from transformers import AutoTokenizer

from flexnsa.lm.transformers_model import FlexNSAForCausalLM
from tests.integrations.vllm.references import NEW_TOKENS, NSA, SIZES, answer, draw_weights

EXAMPLE = Path(__file__).parents[3] / "examples/vllm/serve.py"
PAGE = Path(__file__).parents[3] / "docs/vllm.md"
REQUESTS, CANCELLED, LONGEST = 64, 8, 2048
LENGTHS = (1, 30, 63, 200, 300, 450, 511, 640)


def test_samples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for sample in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(sample, PAGE.name, "exec"), names)
    assert len(names["answer"].outputs[0].token_ids) == 4


def test_many_clients_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLE))
    folder = str(tmp_path)
    example["save_untrained_model"](folder, **SIZES, nsa=NSA, max_position_embeddings=LONGEST)
    model: Any = FlexNSAForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(1)
    draw_weights(model)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["".join(chr(97 + int(x)) for x in torch.randint(26, (length,))) for length in LENGTHS]
    expected = [tokenizer.decode(answer(model, torch.tensor(tokenizer(x).input_ids)).tokens) for x in prompts]
    options = ("--dtype", "float32", "--max-model-len", str(LONGEST), "--max-num-seqs", "16")
    with example["serve"](folder, *options, port=8766) as url:
        found, wrong, refused = asyncio.run(_ask_all(url, folder, prompts))
        metrics = urlopen(url.replace("/v1", "/metrics")).read().decode()
        monkeypatch.setitem(example["main"].__globals__, "serve", lambda *_: nullcontext(url))
        assert len(example["main"](folder, max_tokens=4)) == 3
    assert wrong == [openai.BadRequestError] * 2, refused
    assert str(LONGEST) in refused[0]
    assert "max_tokens" in refused[1]
    # A stream ends before bytes that are no whole character.
    whole = [text.rstrip("\ufffd") for text in expected]
    assert [text.rstrip("\ufffd") for text in found] == [whole[x % len(whole)] for x in range(REQUESTS - CANCELLED)]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.findall(rf"^vllm:{name}{{.*}} (.*)$", metrics, re.MULTILINE) == ["0.0"], name


async def _ask_all(url: str, model: str, prompts: list[str]) -> tuple[list[str], list[type], list[str]]:
    """Return the answers to requests that are not cancelled, and the errors of one too long and one invalid."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300, max_retries=0) as client:

        async def stream(index: int, **options: Any) -> str:
            sent = {"prompt": prompts[index % len(prompts)], "max_tokens": NEW_TOKENS, "temperature": 0} | options
            ignore = {"ignore_eos": True}
            parts: Any = await client.completions.create(model=model, stream=True, extra_body=ignore, **sent)
            text = ""
            async for part in parts:
                text += part.choices[0].text
                if index >= REQUESTS - CANCELLED:
                    await parts.close()
                    return text
            return text

        requests = [stream(index) for index in range(REQUESTS)]
        wrong = [stream(0, prompt="x" * (LONGEST + 1)), stream(0, max_tokens=-1)]
        answers: list[Any] = await asyncio.gather(*requests, *wrong, return_exceptions=True)
        await asyncio.sleep(2)  # for the last of those that were cancelled
        errors = answers[REQUESTS:]
        return answers[: REQUESTS - CANCELLED], [type(x) for x in errors], [str(x) for x in errors]
