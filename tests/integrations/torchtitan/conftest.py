"""Stand-ins before torchtitan is imported; groups of processes run once, like those of the library's parallelism."""

from __future__ import annotations

from tests.integrations.torchtitan import without_gpu  # noqa: F401
from tests.parallel import processes
from tests.parallel.conftest import run_once

# Processes start with torchtitan imported, which would take each of them seconds.
processes.PRELOAD += ("tests.integrations.torchtitan.dense",)

__all__ = ["run_once"]
