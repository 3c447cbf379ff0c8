"""Serve a checkpoint with vLLM, and stream the answers to several requests with the client of OpenAI.

python examples/vllm/serve.py [folder of a checkpoint with its tokenizer]
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import urlopen

import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM

PROMPTS = ("Once upon a time", "The sum of two and three is", "A long story. " * 100)


def main(folder: str | None = None, prompts: Sequence[str] = PROMPTS, max_tokens: int = 32) -> list[str]:
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = made
            save_untrained_model(folder)
        with serve(folder, "--max-model-len", "4096") as url:
            answers = asyncio.run(ask(url, folder, prompts, max_tokens))
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt[:40]!r}: {answer!r}")
    return answers


def save_untrained_model(folder: str, **fields: object) -> None:
    """Save a model of bytes, and a tokenizer of bytes beside it."""
    torch.manual_seed(0)
    FlexNSAForCausalLM(FlexNSAConfig(**fields)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def serve(folder: str, *options: str, port: int = 8765) -> Iterator[str]:
    """Start a server; return its address when it answers."""
    # "vllm serve" is the same, but asks for the version of a package "vllm", which builds for CPUs are not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    server = subprocess.Popen([*command, "--block-size", "64", "--enforce-eager", *options])
    try:
        while server.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except URLError:
                time.sleep(0.5)
        else:
            raise RuntimeError(f"vllm serve: expected a server, got exit status {server.returncode}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


async def ask(url: str, model: str, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Send all requests at once."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:

        async def stream(prompt: str) -> str:
            options = {"max_tokens": max_tokens, "temperature": 0.0, "stream": True}
            parts = await client.completions.create(model=model, prompt=prompt, **options)
            return "".join([part.choices[0].text async for part in parts])

        return await asyncio.gather(*map(stream, prompts))


if __name__ == "__main__":
    main(*sys.argv[1:2])
