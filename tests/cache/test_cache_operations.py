"""What a cache can do besides a step: go back, forget, reorder its rows, be saved and restored."""

from __future__ import annotations

import pytest
import torch

from tests.support.decoding import assert_equal_to_whole, assert_same_state, decode, make_layer, tokens


@pytest.mark.parametrize("chunks", [[80, *[1] * 20, 7], [107]], ids=["steps", "a prefill"])
def test_crop_takes_back_and_goes_on_differently(chunks: list[int]) -> None:
    layer = make_layer()
    x, other = tokens(2, 107), -tokens(2, 107)
    cache = layer.new_cache(2, 120, max_rewind=9)
    decode(layer, x, chunks, cache)
    cache.crop(100)
    cache.crop(98)
    out = decode(layer, other[:, 98:], [3, *[1] * 6], cache)
    assert_equal_to_whole(out, layer(torch.cat([x[:, :98], other[:, 98:]], dim=1))[:, 98:])


def test_crop_goes_back_anywhere_while_nothing_was_overwritten() -> None:
    layer = make_layer(branches=("slc", "cmp"))
    x = tokens(2, 8)
    cache = layer.new_cache(2, 40)
    decode(layer, x, [8], cache)
    cache.crop(torch.tensor([2, 5]))
    out = layer(x[:, :1], cache=cache)
    for row, length in enumerate((2, 5)):
        alone = torch.cat([x[row : row + 1, :length], x[row : row + 1, :1]], dim=1)
        assert_equal_to_whole(out[row, 0], layer(alone)[0, -1])


def test_crop_refuses_what_the_rings_have_forgotten() -> None:
    layer = make_layer()
    cache = layer.new_cache(2, 107, max_rewind=4)
    decode(layer, tokens(2, 107), [107], cache)
    for wrong in (108, 102, -1, torch.tensor([107, 1])):
        before = cache.state_dict()
        with pytest.raises(ValueError, match="lengths: expected 0, or up to max_rewind=4 less than the 107"):
            cache.crop(wrong)
        assert_same_state(cache, before)
    cache.crop(103)
    with pytest.raises(ValueError, match=r"the 103 tokens of row 0 \(once 107\), got 102"):
        cache.crop(102)
    cache.crop(torch.tensor([0, 103]))
    assert cache.lengths.tolist() == [0, 103]


def test_rows_cropped_to_nothing_begin_anew() -> None:
    """Nothing of their new tokens has been overwritten, so any of these may be taken back."""
    layer = make_layer()
    x, other = tokens(2, 107), -tokens(2, 107)
    cache = layer.new_cache(2, 107, max_rewind=4)
    decode(layer, other, [107], cache)
    cache.crop(0)
    decode(layer, x[:, :9], [9], cache)
    cache.crop(2)
    assert_equal_to_whole(decode(layer, x[:, 2:40], [5, *[1] * 33], cache), layer(x[:, :40])[:, 2:])


def test_reorder_moves_rows_with_all_they_hold() -> None:
    layer = make_layer()
    x = tokens(3, 70)
    cache = layer.new_cache(3, 70)
    layer(x[:, :60], cache=cache, lengths=torch.tensor([60, 41, 9]))
    order = torch.tensor([2, 0, 0])
    cache.reorder(order)
    assert cache.lengths.tolist() == [9, 60, 60]
    out = layer(x[:, 60:61], cache=cache)
    for row, (source, length) in enumerate(((2, 9), (0, 60), (0, 60))):
        alone = torch.cat([x[source : source + 1, :length], x[row : row + 1, 60:61]], dim=1)
        assert_equal_to_whole(out[row, 0], layer(alone)[0, -1])


def test_state_saved_and_restored_here_and_elsewhere() -> None:
    layer = make_layer()
    x = tokens(1, 60)
    cache, elsewhere = layer.new_cache(1, 60), layer.new_cache(1, 60)
    decode(layer, x[:, :40], [40], cache)
    state = cache.state_dict()
    expected = decode(layer, x[:, 40:], [1] * 20, cache)
    for restored in (cache, elsewhere):
        restored.load_state_dict(state)
        assert torch.equal(decode(layer, x[:, 40:], [1] * 20, restored), expected)


def test_state_of_other_sizes_is_refused() -> None:
    cache = make_layer().new_cache(1, 60)
    before = cache.state_dict()
    with pytest.raises(ValueError, match=r"state\['k_slc'\]: expected shape \(1, 2, 61, 8\), got"):
        cache.load_state_dict(before | {"k_slc": before["k_slc"][:, :, :-1]})
    with pytest.raises(ValueError, match=r"state: expected k_cmp, .*, got k_win, "):
        cache.load_state_dict(make_layer(branches=("win",)).new_cache(1, 60).state_dict())
    assert_same_state(cache, before)
