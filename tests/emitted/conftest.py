"""The CUDA kernels without a GPU: ``pytest tests/emitted``, on Linux with a CPU build of PyTorch and a C++ compiler.

These tests pretend to their whole process that it has an H200 (:mod:`tests.emitted.pretended_gpu`). So they run where
nothing else does, and are deselected, and counted, beside other tests.

What they prove: functions compile without a graph break; kernels fit the device, and their arithmetic, masks and grids
are right. What they do not: time, races and whatever else only hardware shows, and the rounding of tensor cores.
"""

from __future__ import annotations

import pytest

from tests.emitted.pretended_gpu import pretend
from tests.emitted.targets import TARGETS


@pytest.fixture(scope="session", autouse=True)
def _on_hopper() -> None:
    pretend(TARGETS["sm_90"])
