"""Compiled steps: one graph for all lengths, which cannot raise."""

from __future__ import annotations

import pytest
import torch

from tests.support.decoding import assert_equal_to_whole, make_layer, mods_of_heads, tokens


def test_256_steps_of_one_graph_and_those_beyond_the_capacity_are_nan() -> None:
    """``error_on_recompile`` makes any second compilation an error; ``fullgraph`` any break."""
    layer = make_layer()
    x = tokens(2, 276)
    whole = layer(x)
    cache = layer.new_cache(2, 270)
    layer(x[:, :20], cache=cache, lengths=torch.tensor([20, 12]))
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps = [step(torch.stack([x[0, 20 + at], x[1, 12 + at]])[:, None], cache=cache) for at in range(256)]
    first, second = torch.cat(steps, dim=1)
    assert_equal_to_whole(first[:250], whole[0, 20:270])
    assert first[250:].isnan().all()
    assert_equal_to_whole(second, whole[1, 12:268])
    assert cache.lengths.tolist() == [270, 268]


@pytest.mark.usefixtures("eager_flex")
def test_flex_steps_with_mods_never_recompile_after_a_prefill() -> None:
    """Each branch compiles itself, once, for rows of any length. Chunks have no mod in test_prefill.py."""
    layer, options = make_layer(), mods_of_heads(4)
    x = tokens(2, 84)
    whole = layer(x, **options)
    cache = layer.new_cache(2, 90)
    layer(x[:, :20], cache=cache, lengths=torch.tensor([20, 7]), **options)
    layer.impl = "flex"
    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for at in range(64):
            now = torch.stack([x[0, 20 + at], x[1, 7 + at]])[:, None]
            out = layer(now, cache=cache, **options)
            assert_equal_to_whole(out[:, 0], torch.stack([whole[0, 20 + at], whole[1, 7 + at]]))
