"""A step with a cache gives what the whole sequence gives, and selects the same blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexnsa.config import num_compressed
from flexnsa.functional.indices import record_indices
from tests.support.comparison import rms
from tests.support.decoding import BRANCH_SETS, CONFIGS, assert_equal_to_whole, chunks_of, decode, make_layer, tokens
from tests.support.inputs import SMALL

WINDOW = SMALL.window_size


@pytest.mark.parametrize("branches", BRANCH_SETS, ids="+".join)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 100])
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_in_chunks_from_an_empty_cache(impl: str, size: int, branches: tuple[str, ...]) -> None:
    layer = make_layer(impl, branches=branches)
    x = tokens(2, 107)
    assert_equal_to_whole(decode(layer, x, chunks_of(size, 107)), layer(x))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_after_a_prefill_of_any_length(impl: str) -> None:
    """All lengths up to ``3 w`` and so all residues of the strides and block sizes, then five steps."""
    layer = make_layer(impl)
    x = tokens(1, 3 * WINDOW + 5)
    whole = layer(x)
    for length in range(1, 3 * WINDOW + 1):
        out = decode(layer, x[:, : length + 5], [length, *[1] * 5])
        assert_equal_to_whole(out, whole[:, : length + 5])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
def test_in_every_geometry(name: str, compression: str) -> None:
    layer = make_layer(config=CONFIGS[name], compression=compression)
    x = tokens(1, 61)
    assert_equal_to_whole(decode(layer, x, [13, *[1] * 30, 9, 9]), layer(x))


@pytest.mark.parametrize("branches", BRANCH_SETS, ids="+".join)
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_in_a_batch_of_different_lengths(impl: str, branches: tuple[str, ...]) -> None:
    """Rows advance by 0 to 40 tokens at a time, at their own pace, past the window."""
    layer = make_layer(impl, branches=branches)
    x = tokens(3, 90)
    whole = layer(x)
    cache = layer.new_cache(3, 90)
    done = torch.zeros(3, dtype=torch.int64)
    for counts in ([40, 1, 9], [0, 3, 31], [1, 1, 1], [1, 0, 1], [7, 40, 12], [1, 1, 1], [40, 40, 30]):
        steps = max(counts)
        index = (done[:, None] + torch.arange(steps)).clamp_max(89)
        out = layer(x[torch.arange(3)[:, None], index], cache=cache, lengths=torch.tensor(counts))
        for row, count in enumerate(counts):
            assert_equal_to_whole(out[row, :count], whole[row, done[row] : done[row] + count])
        done += torch.tensor(counts)
    assert cache.lengths.tolist() == done.tolist() == [90, 86, 85]


def test_selected_blocks_are_identical() -> None:
    layer, x = make_layer(), tokens(2, 107)
    with record_indices(layer) as handle:
        layer(x)
        (whole,) = handle.indices()
        for chunks in ([1] * 107, [37, *[1] * 70], chunks_of(16, 107)):
            decode(layer, x, chunks)
            assert torch.equal(handle.indices()[0], whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    layer = make_layer(config=replace(SMALL, num_selected_blocks=8)).to(dtype)  # every block: no choice to flip
    x = tokens(2, 107).to(dtype)
    out = decode(layer, x, [50, *[1] * 57])
    whole = layer(x)
    assert rms(out - whole) <= (2**-6 if dtype == torch.bfloat16 else 1e-12) * rms(whole)


def test_compressed_tokens_appear_when_their_last_token_does() -> None:
    layer = make_layer()
    x = tokens(1, 60)
    cache = layer.new_cache(1, 60)
    for length in range(1, 61):
        layer(x[:, length - 1 : length], cache=cache)
        written = cache.buffers["k_cmp"][:, :, :-1].abs().sum((0, 1, 3)) > 0
        assert int(written.sum()) == num_compressed(length, SMALL)
        assert written[: num_compressed(length, SMALL)].all()
