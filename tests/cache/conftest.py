"""What a test of decoding may watch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS, IMPLEMENTATIONS
from flexnsa.attention.interface import Implementation


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The blocks that each call selects from now on."""
    recorded: list[Tensor] = []

    def recording(implementation: Implementation) -> Implementation:
        def select(*args: Any) -> Tensor:
            recorded.append(implementation.select(*args))
            return recorded[-1]

        return replace(implementation, select=select)

    for table in (IMPLEMENTATIONS, CACHED_IMPLEMENTATIONS):
        monkeypatch.setitem(table, "sdpa", recording(table["sdpa"]))
    return recorded
