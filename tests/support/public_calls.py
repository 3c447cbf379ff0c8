"""A right call of every public function and class, as data."""

from __future__ import annotations

from tests.support.right_calls.attention import ATTENTION
from tests.support.right_calls.call import Call
from tests.support.right_calls.models import MODELS
from tests.support.right_calls.rows import ROWS

CALLS: dict[str, Call] = {**ATTENTION, **ROWS, **MODELS}
