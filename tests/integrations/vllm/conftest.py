"""What holds for all tests with vLLM: engines in this process, no network; a checkpoint is drawn once."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles even how it ranks a token among others
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tests that run at once else share a core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm.model_executor.models import registry

from tests.integrations.vllm.references import Reference, make_reference

registry._run_in_subprocess = lambda function: function()  # a process that imports vLLM takes 15 seconds


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return a function that makes a checkpoint by its name, and its answers."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(tmp_path_factory.mktemp("model"), name)
        return made[name]

    return get
