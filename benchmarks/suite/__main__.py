"""Time and memory of attention, its phases and its baselines, as pytest-benchmark tests whose runs can be compared.

python -m benchmarks suite --smoke      # the same as: pytest benchmarks --smoke
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest


def main(argv: Sequence[str] | None = None) -> None:
    raise SystemExit(pytest.main(["benchmarks", *(sys.argv[1:] if argv is None else argv)]))


if __name__ == "__main__":
    main()
