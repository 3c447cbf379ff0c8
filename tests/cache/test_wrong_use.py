"""Wrong use of a cache: named, and the cache is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexnsa import NSACache
from tests.support.decoding import CONFIGS, assert_same_state, make_layer, tokens
from tests.support.inputs import SMALL


def other() -> NSACache:
    """Three rows of 5 tokens."""
    cache = LAYER.new_cache(3, 9)
    LAYER(tokens(3, 5), cache=cache)
    return cache


LAYER = make_layer()
STEP = tokens(2, 3)
WRONG_USE: list[tuple[Callable[[NSACache], object], str]] = [
    (lambda _: LAYER(STEP, lengths=torch.tensor([1, 1])), "lengths: expected None without a cache"),
    (lambda cache: make_layer(config=CONFIGS["no overlap"])(STEP, cache=cache), "cache: expected config=NSAConfig"),
    (lambda cache: make_layer(branches=("cmp",))(STEP, cache=cache), "cache: expected branches="),
    (lambda cache: make_layer(v_head_dim=8)(STEP, cache=cache), "cache: expected v_head_dim=8, .* got 12"),
    (lambda cache: make_layer(rope_base=1e6)(STEP, cache=cache), "cache: expected rope_base=1000000.0, .* got 10000.0"),
    (lambda _: LAYER(STEP, cache={}), "cache: expected NSACache, got"),  # pyright: ignore[reportArgumentType]
    (lambda cache: LAYER(STEP[:, :0], cache=cache), r"x: expected no empty dimension, got \(2, 0, 32\)"),
    (lambda cache: LAYER(STEP, cache=cache, lengths=torch.tensor([1.5, 1])), "lengths: expected dtype torch.int32"),
    (lambda cache: cache.begin(0), "num_tokens: expected at least 1, got 0"),
    (lambda cache: cache.crop(19.5), "lengths: expected an int, got 19.5"),  # pyright: ignore[reportArgumentType]
    (lambda cache: cache.crop(True), "lengths: expected an int, got True"),
    (lambda cache: cache.crop(10**30), "lengths: expected at most"),
    (lambda cache: cache.crop(torch.tensor([19.5, 33.0])), "lengths: expected dtype torch.int32"),
    (lambda cache: cache.crop(torch.tensor([2**32 + 20, 33])), r"lengths: expected 0, or up to .*, got 4294967316"),
    (lambda cache: cache.reorder(torch.tensor([1.0, 0.0])), "rows: expected dtype torch.int32"),
    (lambda cache: cache.reorder(torch.tensor([0, 2])), r"rows: expected 0 .. 1, got \[0, 2\]"),
    (lambda cache: cache.reorder(torch.tensor([-1, 0])), r"rows: expected 0 .. 1, got \[-1, 0\]"),
    (lambda cache: cache.reset(2), r"rows: expected 0 .. 1, got \[2\]"),
    (lambda cache: cache.reset([0, -1]), r"rows: expected 0 .. 1, got \[0, -1\]"),
    (lambda cache: cache.reset(torch.tensor([0, 2])), r"rows: expected 0 .. 1, got \[0, 2\]"),
    (lambda cache: cache.reset(torch.tensor([True])), r"rows: expected shape \(2,\), got \(1,\)"),
    (lambda cache: cache.reset(torch.tensor([0.0])), "rows: expected dtype torch.int32 or torch.int64"),
    (lambda cache: cache.reset(torch.tensor(0)), r"rows: expected shape \(K,\), got \(\)"),
    (lambda cache: cache.reset([True, False]), "rows: expected an int, got True"),
    (lambda cache: cache.reset("0"), "rows: expected an int, got '0'"),  # pyright: ignore[reportArgumentType]
    (lambda cache: cache.insert([0, 0], other(), [0, 1]), r"rows: expected each row once, got \[0, 0\]"),
    (lambda cache: cache.insert(2, other(), 0), r"rows: expected 0 .. 1, got \[2\]"),
    (lambda cache: cache.insert(0, other(), 3), r"other_rows: expected 0 .. 2, got \[3\]"),
    (lambda cache: cache.insert(0, other()), "other_rows: expected one row or 1, as many as rows, got 3"),
    (lambda cache: cache.insert([0, 1], other(), [0, 1, 2]), "other_rows: expected one row or 2, .* got 3"),
    (lambda cache: cache.insert(torch.tensor([True, False]), other(), 0), "rows: expected dtype torch.int32"),
    (lambda cache: cache.insert(0, {}), "other: expected NSACache, got"),  # pyright: ignore[reportArgumentType]
    (lambda cache: cache.insert(0, LAYER.new_cache(1, 41)), "other: expected max_seq_len of at most 40, got 41"),
    (lambda cache: cache.insert(0, LAYER.new_cache(1, 9, max_rewind=2)), "other: expected max_rewind=1, .* got 2"),
    (lambda cache: cache.insert(0, LAYER.new_cache(1, 9, dtype=torch.float64)), "other: expected dtype=torch.float32"),
    (lambda cache: cache.insert(0, make_layer(branches=("cmp",)).new_cache(1, 9)), "other: expected branches="),
    (lambda cache: cache.insert(0, make_layer(v_head_dim=8).new_cache(1, 9)), "other: expected v_head_dim=12"),
    (lambda cache: cache.insert(0, make_layer(rope_base=1e6).new_cache(1, 9)), "other: expected rope_base=10000.0"),
    (lambda cache: cache.grow(0), "max_seq_len: expected at least 1, got 0"),
    (lambda cache: cache.grow(2**31), "max_seq_len: expected at most"),
    (lambda cache: cache.grow(50.0), "max_seq_len: expected an int, got 50.0"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("call", "message"), WRONG_USE, ids=[message for _, message in WRONG_USE])
def test_wrong_use_raises_and_changes_nothing(call: Callable[[NSACache], object], message: str) -> None:
    cache = LAYER.new_cache(2, 40)
    LAYER(tokens(2, 33), cache=cache, lengths=torch.tensor([20, 33]))
    before = cache.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(cache)
    assert_same_state(cache, before)


def test_an_unsupported_dtype_leaves_the_cache_empty() -> None:
    layer = make_layer("flex").double()
    cache = layer.new_cache(2, 40)
    with pytest.raises(ValueError, match=r"x: expected float32, bfloat16 or float16 .*, got torch.float64"):
        layer(STEP.double(), cache=cache)
    assert cache.is_empty


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"max_seq_len": -1}, "max_seq_len: expected at least 1, got -1"),
        ({"max_rewind": 0}, "max_rewind: expected at least 1, got 0"),
        ({"head_dim": 8.0}, r"head_dim: expected an int, got 8.0"),
        ({"config": None}, "config: expected NSAConfig, got None"),
    ],
)
def test_wrong_sizes_are_named(sizes: dict[str, Any], message: str) -> None:
    arguments = {"batch_size": 1, "max_seq_len": 40, "num_kv_heads": 2, "head_dim": 8, "config": SMALL} | sizes
    with pytest.raises((TypeError, ValueError), match=message):
        NSACache(**arguments)
