"""Whatever version 0.1 offered is still there and is called as it was; see ``public_api.py`` for what may be added."""

from __future__ import annotations

import json
from typing import Any

import pytest
from public_api import broken_calls, broken_promises, describe, look_up
from recorded_run import RECORDED

OFFERED: dict[str, dict[str, Any]] = json.loads((RECORDED / "public_api.json").read_text())


@pytest.mark.parametrize("name", OFFERED)
def test_name_offers_what_it_offered(name: str):
    now = json.loads(json.dumps(describe(look_up(name))))
    assert not broken_promises(OFFERED[name], now)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("(q, k)", "(q)"),
        ("(q, k)", "(k, q)"),
        ("(q, k)", "(q, *, k)"),
        ("(q, k=1)", "(q, k=2)"),
        ("(q, k=1)", "(q, k)"),
        ("(q)", "(q, k)"),
        ("(q)", "(q, *, scale)"),
        ("(q, *, scale=None)", "(q)"),
        ("(q, *, scale=None)", "(q, *, scale=1.0)"),
        ("(q, *, scale=None)", "(q, scale=None)"),
        ("(q, **options)", "(q)"),
    ],
)
def test_a_narrower_signature_is_noticed(was: str, now: str):
    assert broken_calls(was, now)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("(q)", "(q, k=None)"),
        ("(q, *, a, b=2)", "(q, *, positions=None, b=2, a)"),
        ("(q)", "(q, *rest, **options)"),
    ],
)
def test_a_wider_signature_is_welcome(was: str, now: str):
    assert not broken_calls(was, now)
