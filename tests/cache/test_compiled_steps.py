"""Compiled steps: one graph for all lengths, which cannot raise."""

from __future__ import annotations

import torch

from tests.support.decoding import assert_equal_to_whole, make_layer, tokens


def test_256_steps_of_one_graph() -> None:
    """``error_on_recompile`` makes any second compilation an error; ``fullgraph`` any break."""
    layer = make_layer()
    x = tokens(2, 276)
    whole = layer(x)
    cache = layer.new_cache(2, 276)
    layer(x[:, :20], cache=cache)
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        out = torch.cat([step(part, cache=cache) for part in x[:, 20:].split(1, dim=1)], dim=1)
    assert_equal_to_whole(out, whole[:, 20:])


def test_flex_steps_never_recompile_after_a_prefill() -> None:
    """Each branch compiles itself, once, for rows of any length."""
    layer = make_layer()
    x = tokens(2, 84)
    whole = layer(x)
    cache = layer.new_cache(2, 90)
    layer(x[:, :20], cache=cache, lengths=torch.tensor([20, 7]))
    layer.impl = "flex"
    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for at in range(64):
            now = torch.stack([x[0, 20 + at], x[1, 7 + at]])[:, None]
            out = layer(now, cache=cache)
            assert_equal_to_whole(out[:, 0], torch.stack([whole[0, 20 + at], whole[1, 7 + at]]))


def test_a_compiled_step_beyond_the_capacity_is_nan() -> None:
    layer = make_layer()
    cache = layer.new_cache(2, 30)
    layer(tokens(2, 29), cache=cache, lengths=torch.tensor([29, 12]))
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = step(tokens(2, 2), cache=cache)
    assert out.isnan().all(-1).tolist() == [[False, True], [False, False]]
    assert cache.lengths.tolist() == [30, 14]
