"""Prompts into an empty cache: computed as whole rows are, and kept as steps would keep them."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache
from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS
from flexnsa.cache.steps import ReadCounter
from flexnsa.config import BRANCHES
from flexnsa.layers.layouts import RowKeys
from tests.support.decoding import BRANCH_SETS, CONFIGS, assert_equal_to_whole, make_layer, tokens
from tests.support.inputs import SMALL

LENGTHS = [*range(1, SMALL.window_size + 2), *range(57, 73)]
"""Of every residue of the strides, blocks and windows, and where blocks are left out."""


def assert_kept(cache: NSACache, expected: NSACache) -> None:
    """Check that every slot but the spare one is equal."""
    torch.testing.assert_close(cache.lengths, expected.lengths)
    torch.testing.assert_close(cache.reached, expected.reached)
    for name, buffer in cache.buffers.items():
        torch.testing.assert_close(buffer[:, :, :-1], expected.buffers[name][:, :, :-1], rtol=0, atol=1e-5)


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    """Replace padding by other tokens."""
    real = torch.arange(x.shape[1]) < lengths[:, None]
    return torch.where(real[..., None], x, 3 * x.flip(1) - 1)


def pack(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Pack the first tokens of each sequence: ``(1, S, dim)`` and their document_ids."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None], 2 * ids[None] - 3


def stepwise(layer: NativeSparseAttention, x: Tensor, lengths: Tensor, **options: Any) -> NSACache:
    """Token by token, the rows that have ended standing still."""
    cache = layer.new_cache(len(x), 100, **options)
    for at in range(x.shape[1]):
        layer(x[:, at : at + 1], cache=cache, lengths=(at < lengths).long())
    return cache


@pytest.mark.parametrize(("branches", "max_rewind"), [(BRANCHES, 1), *((each, 5) for each in BRANCH_SETS)])
def test_a_prefill_of_any_length_stores_what_steps_store(branches: tuple[str, ...], max_rewind: int) -> None:
    layer = make_layer(branches=branches)
    lengths = torch.tensor([0, *LENGTHS])
    x = padded(tokens(len(lengths), 75), lengths)
    cache = layer.new_cache(len(x), 100, max_rewind=max_rewind)
    out, whole = layer(x, cache=cache, lengths=lengths), layer(x)
    assert_kept(cache, stepwise(layer, x, lengths, max_rewind=max_rewind))
    for row, length in enumerate(lengths.tolist()):
        assert_equal_to_whole(out[row, :length], whole[row, :length])


@pytest.mark.parametrize(("name", "compression"), zip(CONFIGS, cycle(["mlp", "mean"])))
def test_a_pack_is_kept_as_rows_are(name: str, compression: str) -> None:
    layer = make_layer(config=CONFIGS[name], compression=compression)
    x, lengths = tokens(len(LENGTHS), 75), torch.tensor(LENGTHS)
    packed, document_ids = pack(x, LENGTHS)
    together, apart = layer.new_cache(len(x), 100), layer.new_cache(len(x), 100)
    out, rows = layer(packed, document_ids=document_ids, cache=together), layer(x, cache=apart, lengths=lengths)
    assert_kept(together, apart)
    assert_kept(together, stepwise(layer, x, lengths))
    now, after = x[torch.arange(len(x)), lengths][:, None], layer(x)
    for row, part in enumerate(out[0].split(LENGTHS)):
        assert_equal_to_whole(part, rows[row, : len(part)])
        assert_equal_to_whole(part, after[row, : len(part)])
    assert_equal_to_whole(layer(now, cache=together)[:, 0], after[torch.arange(len(x)), lengths])


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("impl", ["reference", "sdpa", "flex"])
def test_a_prefill_equals_a_step_on_an_empty_cache(impl: str) -> None:
    layer = make_layer(impl)
    rows = make_layer("sdpa" if impl == "flex" else impl)  # rows by flex have tests of their own, and are compiled
    lengths = torch.tensor([60, 33, 2])
    x = padded(tokens(3, 60), lengths)
    known, unknown = layer.new_cache(3, 64), layer.new_cache(3, 64)
    unknown.load_state_dict(known.state_dict())
    assert (known.is_empty, unknown.is_empty) == (True, False)
    out, expected = rows(x, cache=known, lengths=lengths), layer(x, cache=unknown, lengths=lengths)
    assert_kept(known, unknown)
    for row, length in enumerate(lengths.tolist()):
        assert_equal_to_whole(out[row, :length], expected[row, :length])


def test_a_prefill_uses_no_cached_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = make_layer(), make_layer().new_cache(2, 70)
    with monkeypatch.context() as patch:
        patch.delitem(CACHED_IMPLEMENTATIONS, "sdpa")
        layer(tokens(2, 60), cache=cache)
        with pytest.raises(KeyError):
            layer(tokens(2, 1), cache=cache)
    for emptied in (lambda: cache.crop(0), cache.reset):
        layer(tokens(2, 1), cache=cache)
        assert not cache.is_empty
        emptied()
        assert cache.is_empty


def test_reads_of_a_prefill_are_counted() -> None:
    """As those of a step are: padding reads what the last token does, a document what it would alone."""
    layer = make_layer()
    x, lengths = tokens(3, 50), [50, 9, 31]

    def counted(parts: list[tuple[Tensor, dict[str, Any]]], rows: int, *, known: bool = True) -> dict[str, int]:
        total = ReadCounter()
        for part, options in parts:
            cache = layer.new_cache(rows, 50)
            cache.reads = total
            if not known:
                cache.load_state_dict(cache.state_dict())
            layer(part, cache=cache, **options)
        return total.keys

    ragged = [(x, {"lengths": torch.tensor(lengths)})]
    assert counted(ragged, 3) == counted(ragged, 3, known=False)
    packed, document_ids = pack(x, lengths)
    alone: list[tuple[Tensor, dict[str, Any]]] = [
        (row[None, :length], {}) for row, length in zip(x, lengths, strict=True)
    ]
    assert counted([(packed, {"document_ids": document_ids})], 3) == counted(alone, 1)


PACK = pack(tokens(2, 20), [20, 11])
SPREAD = replace(make_layer().layout(31, PACK[1]), source=RowKeys())
"""As of a rank, in that its keys do not come with the tokens alone."""


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (PACK[0], {"document_ids": torch.zeros_like(PACK[1])}, "document_ids: expected 2 documents, .* got 1"),
        (PACK[0], {"document_ids": torch.arange(31)[None] // 11}, "document_ids: expected 2 documents, .* got 3"),
        (PACK[0], {"document_ids": (torch.arange(31) > 28).long()[None]}, "x: expected at most 25 tokens, .* got 29"),
        (PACK[0], {"document_ids": -PACK[1]}, "document_ids: expected ids that never decrease"),
        (PACK[0], {"document_ids": PACK[1][:, 1:]}, r"document_ids: expected shape \(1, 31\)"),
        (PACK[0], {"document_ids": PACK[1], "lengths": torch.tensor([20, 11])}, "lengths: expected None with document"),
        (tokens(2, 9), {"document_ids": torch.zeros(2, 9, dtype=torch.long)}, "x: expected one packed row .* got 2"),
        (PACK[0], {"layout": make_layer().layout(31)}, "cache: expected batch_size=1, .* got 2"),
        (PACK[0], {"document_ids": PACK[1], "layout": make_layer().layout(31)}, "document_ids: expected None with a"),
        (PACK[0], {"layout": SPREAD}, "layout: expected one of whole rows with a cache, got tokens that are spread"),
    ],
)
def test_a_wrong_prefill_raises_and_leaves_the_cache_empty(x: Tensor, options: Any, message: str) -> None:
    layer = make_layer()
    cache = layer.new_cache(2, 25)
    with pytest.raises(ValueError, match=f"^{message}"):
        layer(x, cache=cache, **options)
    assert cache.is_empty
    assert all(not tensor.any() for tensor in cache.state_dict().values())
