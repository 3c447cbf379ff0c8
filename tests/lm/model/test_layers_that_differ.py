"""A model whose layers have sizes of their own: its tokens one by one are what they are together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from flexnsa import NSAConfig
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.model.decoder import DecoderLayer, build_attention
from tests.lm.model.sessions import prompts
from tests.support.decoding import assert_equal_to_whole

SIZES = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=8)
CONFIG = DecoderConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, nsa=SIZES)
CHANGES: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
    "rope_base": lambda config: replace(config, rope_base=1e6),
    "heads": lambda config: replace(config, num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=12),
    "rope_base and stride": lambda config: replace(config, rope_base=1e6, nsa=replace(SIZES, compress_stride=8)),
    "blocks": lambda config: replace(config, nsa=replace(SIZES, compress_block_size=16, select_block_size=16)),
    "window and selection": lambda config: replace(config, nsa=replace(SIZES, window_size=5, num_selected_blocks=3)),
    "branches": lambda config: replace(config, branches=("slc", "win"), compression="mean"),
    "the other attention": lambda config: replace(
        config, attention="nsa" if config.attention == "dense" else "dense", rope_base=1e6
    ),
}
CASES = [("nsa", name) for name in CHANGES] + [
    ("dense", "rope_base"),
    ("dense", "heads"),
    ("dense", "the other attention"),
]
LENGTHS = torch.tensor([13, 27])
IDS = torch.arange(2).repeat_interleave(LENGTHS)[None]


def make_model(attention: str, name: str, num_layers: int = 3, **changes: Any) -> DecoderLM:
    """Let every other layer differ from the first."""
    torch.manual_seed(0)
    config = replace(CONFIG, attention=attention, num_layers=num_layers, **changes)
    model = DecoderLM(config)
    for index in range(1, num_layers, 2):
        layer = cast("DecoderLayer", model.layers[index])
        layer.attention = build_attention(CHANGES[name](config))
        layer.reset_parameters()
    return model.requires_grad_(False)


@pytest.mark.parametrize(("attention", "name"), CASES)
def test_one_by_one_is_what_it_is_together(attention: str, name: str) -> None:
    model, x = make_model(attention, name), prompts(2, 40)
    whole = model(x)
    for chunks in ([1] * 40, [9, 3, 28]):  # one by one; whole rows first, then some at a time
        caches = model.new_caches(2, 40)
        assert_equal_to_whole(torch.cat([model(part, caches=caches) for part in x.split(chunks, dim=1)], dim=1), whole)


@pytest.mark.parametrize(("attention", "name"), CASES)
def test_packed_documents_are_what_each_is_alone(attention: str, name: str) -> None:
    model, x = make_model(attention, name), prompts(1, 40)
    alone = torch.cat([model(part) for part in x.split(LENGTHS.tolist(), dim=1)], dim=1)
    assert_equal_to_whole(model(x, document_ids=IDS), alone)
    assert_equal_to_whole(model(x, document_ids=IDS, caches=model.new_caches(2, 27)), alone)


@pytest.mark.parametrize(("attention", "name"), [("nsa", "rope_base and stride"), ("dense", "rope_base")])
def test_compiled_layers_keep_to_their_own_sizes(attention: str, name: str) -> None:
    model, x = make_model(attention, name, num_layers=2, compression="mean"), prompts(2, 40)
    caches, whole = model.new_caches(2, 40), model(x)
    first = model(x[:, :39], caches=caches)
    torch.compiler.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)  # one graph holds all of them
    assert_equal_to_whole(torch.cat([first, step(x[:, 39:], caches=caches)], dim=1), whole)
    torch.compiler.reset()
    model.compile_layers(backend="eager", fullgraph=True)
    assert_equal_to_whole(model(x), whole)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_layers_of_the_same_sizes_share_a_layout(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = make_model(attention, "rope_base"), list[float]()
    for layer in cast("list[DecoderLayer]", [*model.layers]):

        def layout(*given: Any, attention: Any = layer.attention, make: Any = layer.attention.row_layout) -> Any:
            made.append(attention.rope_base)
            return make(*given)

        monkeypatch.setattr(layer.attention, "row_layout", layout)
    model(prompts(2, 40))
    assert made == [1e4, 1e6]
