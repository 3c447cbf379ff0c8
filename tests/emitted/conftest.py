"""The CUDA kernels without a GPU: ``pytest tests/emitted --toolkit DIR``.

``DIR`` holds a toolkit that emits Inductor's kernels without a GPU, as the modules ``emit``, ``cubin`` and
``interpret``. It gives the whole process a pretended device, so these tests want a process of their own; without the
option they are deselected, and counted.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def toolkit(request: pytest.FixtureRequest) -> SimpleNamespace:
    """``emit``, ``compile_all`` and ``interpreted``: make a module of kernels, compile them, run them."""
    sys.path.insert(0, str(request.config.getoption("--toolkit")))
    from cubin import compile_all  # pyright: ignore[reportMissingImports]
    from emit import emit  # pyright: ignore[reportMissingImports]
    from interpret import interpreted  # pyright: ignore[reportMissingImports]

    return SimpleNamespace(emit=emit, compile_all=compile_all, interpreted=interpreted)
