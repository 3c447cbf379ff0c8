"""Steps that fail half way, and steps for which there is no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS
from tests.support.decoding import assert_equal_to_whole, decode, make_layer, tokens


@pytest.mark.parametrize("count", [30, 1])
def test_a_failed_step_changes_nothing_but_the_window(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of one token are in the ring buffer already, in the slot of the oldest: no step can go back that far."""

    def fail(*_: object) -> Any:
        raise RuntimeError("the window failed")

    layer, x = make_layer(), tokens(2, 90)
    cache = layer.new_cache(2, 90)
    decode(layer, x[:, :50], [50], cache)
    with monkeypatch.context() as patch:
        patch.setitem(CACHED_IMPLEMENTATIONS, "sdpa", replace(CACHED_IMPLEMENTATIONS["sdpa"], window=fail))
        with pytest.raises(RuntimeError, match="the window failed"):
            layer(-x[:, 50 : 50 + count], cache=cache)
    if count == 1:
        with pytest.raises(ValueError, match="lengths: expected 0, or up to max_rewind=1 less than the 50"):
            cache.crop(49)
    assert_equal_to_whole(decode(layer, x[:, 50:], [1] * 40, cache), layer(x)[:, 50:])


def test_a_full_sequence_raises_after_uncounted_steps() -> None:
    layer = make_layer()
    cache = layer.new_cache(2, 30)
    layer(tokens(2, 20), cache=cache, lengths=torch.tensor([20, 3]))
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True, backend="eager")
    for _ in range(9):
        step(tokens(2, 1), cache=cache)
    layer(tokens(2, 1), cache=cache)
    with pytest.raises(ValueError, match=r"x: expected at most 0 tokens, .* of 30 has room in row 0, got 1"):
        layer(tokens(2, 1), cache=cache)
    cache.crop(torch.tensor([29, 12]))
    assert layer(tokens(2, 1), cache=cache).isfinite().all()
    cache.reset()
    assert layer(tokens(2, 30), cache=cache).isfinite().all()
