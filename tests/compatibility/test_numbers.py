"""What version 0.1 computed of ten attention calls and of layers is still what is computed, in fp64, to 12 digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attention_cases import ATTENTION_CASES, run_attention_case
from fingerprints import assert_same
from layer_cases import LAYER_CASES
from torch import Tensor

NUMBERS: dict[str, dict[str, list[float]]] = json.loads(
    (Path(__file__).parent / "recorded" / "numbers.json").read_text()
)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_computes_what_it_did(name: str, impl: str):
    _compare(name, run_attention_case(ATTENTION_CASES[name], impl, torch.float64))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("name", LAYER_CASES)
def test_layers_compute_what_they_did(name: str, impl: str):
    _compare(name, LAYER_CASES[name](impl, torch.float64))


def _compare(name: str, found: dict[str, Tensor]) -> None:
    recorded = NUMBERS[name]
    assert found.keys() == recorded.keys()
    for key, tensor in found.items():
        assert_same(tensor, recorded[key], tolerance=1e-12)
