"""The CUDA kernels without a GPU: ``pytest tests/emitted --toolkit DIR``.

``DIR`` holds a toolkit that emits Inductor's kernels without a GPU, as the modules ``emit``, ``cubin`` and
``interpret``. It gives the whole process a pretended device, so these tests want a process of their own; without the
option they are not collected.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--toolkit", metavar="DIR", help="toolkit that emits, compiles and interprets kernels")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--toolkit", default=None) is None and collection_path.name.startswith("test_"):
        return True
    return None


def pytest_configure(config: pytest.Config) -> None:
    toolkit = config.getoption("--toolkit", default=None)
    if toolkit is not None:
        sys.path.insert(0, toolkit)
