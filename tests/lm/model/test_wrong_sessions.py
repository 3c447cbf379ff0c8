"""Wrong calls of a session, and wrong options of generation, are named before any token is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.lm import DecodingSession, Sampling, generate_tokens
from tests.lm.model.sessions import make_model, prompts


def generate(sampling: dict[str, Any] | None = None, **options: Any) -> None:
    generate_tokens(make_model(), **options, sampling=Sampling(**sampling or {}))


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": {"temperature": -1.0}}, "temperature: expected at least 0, got -1.0"),
        ({"sampling": {"temperature": float("nan")}}, "temperature: expected a finite number, got nan"),
        ({"sampling": {"temperature": None}}, "temperature: expected a number, got None"),
        ({"sampling": {"top_k": 0}}, "top_k: expected at least 1, got 0"),
        ({"sampling": {"top_p": 0.0}}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"sampling": {"top_p": 1.5}}, "top_p: expected more than 0 and at most 1, got 1.5"),
        ({"prompts": torch.zeros(1, 0, dtype=torch.int64)}, "prompts: expected no empty dimension"),
        ({"prompts": torch.zeros(1, 4)}, "prompts: expected dtype torch.int32 or torch.int64"),
        ({"prompts": torch.zeros(4, dtype=torch.int64)}, "prompts: expected shape"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"seed": 10**20}, "seed: expected at most"),
        ({"stop_tokens": [()]}, "stop_tokens: expected at least one token in a sequence"),
        ({"steps": "graph"}, "steps: expected 'compiled' or 'eager' on cpu, got 'graph'"),
        ({"steps": "graph", "mask_mod": near}, "steps: expected 'compiled' or 'eager' with mask_mod, got 'graph'"),
        ({"steps": "fast"}, "steps: expected one of 'auto', 'graph', 'compiled', 'eager', got 'fast'"),
        ({"steps": "compiled", "cached": False}, "steps: expected one of 'auto', 'eager', got 'compiled'"),
        ({"steps": 1}, "steps: expected one of .*, got 1"),
        ({"group": 0}, "group: expected at least 1, got 0"),
        ({"group": 9}, "group: expected at most 8, got 9"),
        ({"score_mod": 3}, "score_mod: expected"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        generate(**{"prompts": prompts(), "max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.step(), "prompts: expected some to continue, got a step before the first prefill"),
        (lambda session: session.step(9), "count: expected at most 8, got 9"),
        (lambda session: session.prefill(prompts(2)), "prompts: expected 3 rows, as the session has, got a tensor"),
        (lambda session: session.generate(prompts(2), 3), "prompts: expected 3 rows, as the session has"),
        (lambda session: session.set_active([True]), "active: expected one for each of 3 rows, got 1"),
        (lambda session: session.set_active([2, 0, 1]), "active: expected bool, got 2"),
        (lambda session: session.set_active(True), "active: expected Sequence, got True"),
        (lambda session: session.reserve(0), "max_seq_len: expected at least 1, got 0"),
    ],
)
def test_wrong_calls_of_a_session_are_named(call: Callable[[DecodingSession], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(DecodingSession(make_model("dense"), 3, 20))
