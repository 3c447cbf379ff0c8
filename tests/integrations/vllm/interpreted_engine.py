"""An engine whose decoding steps run the kernels of a GPU, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import tests.integrations.vllm.conftest  # noqa: F401  (vLLM reads its settings when it is imported)
from flexnsa.vllm import decoding
from tests.integrations.vllm.engines import ask, engine


def interpret(question: str) -> dict[str, object]:
    """Answer ``{"folder", "prompts", "new_tokens"}``; return tokens, logarithms and the number of steps by kernels."""
    asked = json.loads(question)
    with (
        mock.patch.object(decoding, "step_in_pages", wraps=decoding.step_in_pages) as steps,
        engine(Path(asked["folder"])) as llm,
    ):
        answers, _ = ask(llm, asked["prompts"], asked["new_tokens"])
    return {"answers": [(each.tokens, each.logs) for each in answers], "steps": steps.call_count}
