"""Groups of processes whose results many tests look at: each group runs once, also where pytest has several workers."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.processes import run_together

RunOnce = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """Return what ``function(file, *arguments)`` has saved in its file, run by a group of ``size`` processes."""
    of_worker = tmp_path_factory.getbasetemp()
    shared = of_worker.parent if hasattr(request.config, "workerinput") else of_worker

    @cache
    def get(size: int, function: Callable[..., object], *arguments: Any) -> dict[str, Any]:
        folder: Path = shared / "-".join([function.__name__, str(size), *map(str, arguments)])
        folder.mkdir(exist_ok=True)
        file = folder / "results.pt"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                run_together(size, folder, function, file, *arguments)
        return torch.load(file, weights_only=False)

    return get
