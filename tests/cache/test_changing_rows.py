"""A batch that changes: rows that end, come from elsewhere and grow are each what they would be alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.cache.rows import RowCache
from flexnsa.lm import DenseAttention
from tests.support.decoding import BRANCH_SETS, CONFIGS, assert_equal_to_whole, decode, make_layer, tokens

Layer = Any


def make_dense() -> DenseAttention:
    torch.manual_seed(0)
    return DenseAttention(32, 4, 2, 8, v_head_dim=12).requires_grad_(False)


LAYERS: dict[str, Callable[[], Layer]] = {
    "sdpa": make_layer,
    "reference": lambda: make_layer("reference"),
    **{"+".join(branches): lambda branches=branches: make_layer(branches=branches) for branches in BRANCH_SETS[1:]},
    **{name: lambda config=config: make_layer(config=config) for name, config in [*CONFIGS.items()][1:]},
    "dense": make_dense,
}
of_every_layer = pytest.mark.parametrize("layer", [make() for make in LAYERS.values()], ids=LAYERS)
of_both = pytest.mark.parametrize("layer", [make_layer(), make_dense()], ids=["nsa", "dense"])


class Server:
    """Sequences that come and go in the rows of one cache, each with what it has given so far."""

    def __init__(self, layer: Layer, cache: RowCache, sequences: Tensor) -> None:
        self.layer, self.cache = layer, cache
        self.waiting = list(enumerate(sequences))
        self.running: dict[int, tuple[int, Tensor, int]] = {}
        self.given: dict[int, list[Tensor]] = {number: [] for number in range(len(sequences))}

    def join(self, rows: list[int], prompts: list[int]) -> None:
        """Insert the next sequences, their prompts packed in one."""
        taken = [self.waiting.pop(0) for _ in rows]
        packed = torch.cat([x[:length] for (_, x), length in zip(taken, prompts, strict=True)])[None]
        document_ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(prompts))[None]
        prefilled = self.layer.new_cache(len(rows), max(prompts))
        out = self.layer(packed, document_ids=document_ids, cache=prefilled)[0].split(prompts)
        self.cache.insert(rows, prefilled)
        for row, (number, x), length, given in zip(rows, taken, prompts, out, strict=True):
            self.running[row] = number, x, length
            self.given[number].append(given)

    def leave(self, row: int) -> None:
        self.cache.reset(row)
        del self.running[row]

    def step(self, counts: dict[int, int]) -> None:
        """Run a step on the next tokens of each sequence; sequences without any stay as they are."""
        most = max(counts.values())
        x, lengths = torch.full((self.cache.batch_size, most, 32), 7.0), torch.zeros(self.cache.batch_size).long()
        for row, count in counts.items():
            number, sequence, done = self.running[row]
            x[row, :count], lengths[row] = sequence[done : done + count], count
            self.running[row] = number, sequence, done + count
        out = self.layer(x, cache=self.cache, lengths=lengths)
        for row, count in counts.items():
            self.given[self.running[row][0]].append(out[row, :count])


@of_every_layer
def test_sequences_that_join_and_leave_equal_each_alone(layer: Layer) -> None:
    """Twelve sequences in four rows, 80 steps of one to three tokens."""
    draw = random.Random(0)
    sequences = tokens(12, 80)
    server = Server(layer, layer.new_cache(4, 80), sequences)
    for _ in range(80):
        free = [row for row in range(4) if row not in server.running]
        joining = free[: draw.randint(0, min(len(free), len(server.waiting)))]
        if joining:
            server.join(joining, [draw.randint(1, 40) for _ in joining])
        counts = {row: min(draw.choice([1, 1, 1, 3]), 80 - done) for row, (_, _, done) in server.running.items()}
        if counts:
            server.step(counts)
        for row, (_, _, done) in list(server.running.items()):
            if done == 80 or draw.random() < 0.03:
                server.leave(row)
    assert len(server.waiting) < 4
    for given, whole in zip(server.given.values(), layer(sequences), strict=True):
        out = torch.cat(given) if given else sequences[:0, 0]
        assert_equal_to_whole(out, whole[: len(out)])


@of_every_layer
def test_a_prefix_starts_many_rows(layer: Layer) -> None:
    x = tokens(4, 90)
    x[:, :37] = x[:1, :37]
    prefix, cache = layer.new_cache(1, 37), layer.new_cache(4, 90)
    layer(x[:1, :37], cache=prefix)
    decode(layer, -x[:, :30], [30], cache)
    cache.insert([3, 0, 1], prefix, 0)
    cache.insert(2, prefix)
    assert_equal_to_whole(decode(layer, x[:, 37:], [20, *[1] * 33], cache), layer(x)[:, 37:])


@of_both
@pytest.mark.parametrize("rows", [1, [1], torch.tensor([1]), torch.tensor([False, True, False])], ids=str)
def test_reset_empties_one_sequence_and_keeps_the_others(layer: Layer, rows: Any) -> None:
    x = tokens(3, 70)
    cache = layer.new_cache(3, 70)
    poisoned = torch.where(torch.tensor([False, True, False])[:, None, None], torch.nan, x)
    layer(poisoned[:, :40], cache=cache)
    cache.reset(rows)
    assert cache.lengths.tolist() == [40, 0, 40]
    now = torch.stack([x[0, 40:70], x[1, :30], x[2, 40:70]])
    out, whole = decode(layer, now, [7, *[1] * 23], cache), layer(x)
    assert_equal_to_whole(out, torch.stack([whole[0, 40:], whole[1, :30], whole[2, 40:]]))


@of_both
def test_reset_of_none_and_of_all_sequences(layer: Layer) -> None:
    x, cache = tokens(2, 60), layer.new_cache(2, 60)
    fresh = cache.state_dict()
    layer(x * torch.nan, cache=cache)
    before = cache.state_dict()
    cache.reset([])
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(cache.state().values(), before.values(), strict=True))
    cache.reset()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in cache.state_dict().items())
    assert_equal_to_whole(decode(layer, x, [25, *[1] * 35], cache), layer(x))


@of_both
def test_insert_replaces_the_whole_sequence(layer: Layer) -> None:
    """Slots that the other cache does not have are as empty as in a new one."""
    x, cache, other = tokens(3, 60), layer.new_cache(3, 60), layer.new_cache(2, 20)
    layer(x * torch.nan, cache=cache)
    layer(x[:2, :20], cache=other, lengths=torch.tensor([20, 13]))
    cache.insert(torch.tensor([2, 0, 1]), other, torch.tensor([1, 0, 1]))
    assert cache.lengths.tolist() == [20, 13, 13]
    expected = layer.new_cache(3, 60)
    layer(torch.stack([x[0], x[1], x[1]])[:, :20], cache=expected, lengths=cache.lengths)
    for name, buffer in cache.buffers.items():
        torch.testing.assert_close(buffer[:, :, :-1], expected.buffers[name][:, :, :-1], rtol=0, atol=1e-5)


@of_both
def test_a_row_can_be_copied_within_a_cache(layer: Layer) -> None:
    x, cache = tokens(3, 50), layer.new_cache(3, 50)
    layer(x[:, :30], cache=cache, lengths=torch.tensor([30, 21, 9]))
    cache.insert([0, 2], cache, [2, 0])
    assert cache.lengths.tolist() == [9, 21, 30]
    out, whole = layer(torch.stack([x[2, 9], x[1, 21], x[0, 30]])[:, None], cache=cache)[:, 0], layer(x)
    assert_equal_to_whole(out, torch.stack([whole[2, 9], whole[1, 21], whole[0, 30]]))


@of_both
def test_nothing_moves_in_memory_when_rows_change(layer: Layer) -> None:
    cache, other = layer.new_cache(2, 40), layer.new_cache(1, 9)
    where = {name: tensor.data_ptr() for name, tensor in cache.state().items()}
    layer(tokens(2, 30), cache=cache)
    layer(tokens(1, 9), cache=other)
    cache.reset(0)
    cache.insert(0, other)
    cache.reset()
    assert {name: tensor.data_ptr() for name, tensor in cache.state().items()} == where


@of_both
def test_a_row_that_came_full_is_noticed(layer: Layer) -> None:
    cache, other = layer.new_cache(2, 30), layer.new_cache(1, 30)
    layer(tokens(1, 30), cache=other)
    cache.insert(1, other)
    assert not cache.is_empty
    with pytest.raises(ValueError, match=r"x: expected at most 0 tokens, .* of 30 has room in row 1, got 1"):
        layer(tokens(2, 1), cache=cache)
    cache.reset(1)
    decode(layer, tokens(2, 30), [1] * 30, cache)


def test_crop_after_insert_reorder_and_reset() -> None:
    layer = make_layer()
    cache, other = layer.new_cache(2, 60), layer.new_cache(1, 50)
    layer(tokens(1, 50), cache=other)
    cache.insert(0, other)
    with pytest.raises(ValueError, match=r"lengths: expected 0, .* the 50 tokens of row 0 \(once 50\), got 20"):
        cache.crop(torch.tensor([20, 0]))
    cache.crop(torch.tensor([49, 0]))
    cache.reset(0)
    layer(tokens(2, 5), cache=cache)
    cache.crop(2)
    assert cache.lengths.tolist() == [2, 2]


class TestGrowth:
    @of_every_layer
    def test_rows_go_on_in_a_cache_that_grew(self, layer: Layer) -> None:
        x = tokens(2, 107)
        cache = layer.new_cache(2, 13)
        parts = [layer(x[:, :13], cache=cache)]
        for at in range(13, 107):
            if at == cache.max_seq_len:
                cache.grow(at + 1)
            parts.append(layer(x[:, at : at + 1], cache=cache))
        assert_equal_to_whole(torch.cat(parts, dim=1), layer(x))
        assert cache.max_seq_len == 13 * 2**4

    @of_every_layer
    def test_a_grown_cache_has_the_bytes_of_a_new_one(self, layer: Layer) -> None:
        cache = layer.new_cache(3, 25)
        for wanted, capacity in ((1, 25), (25, 25), (26, 50), (390, 400)):
            cache.grow(wanted)
            new = layer.new_cache(3, capacity)
            assert cache.max_seq_len == capacity
            assert cache.num_bytes == new.num_bytes == sum(x.untyped_storage().nbytes() for x in cache.buffers.values())
            assert {name: x.shape for name, x in cache.buffers.items()} == {n: x.shape for n, x in new.buffers.items()}

    def test_what_slides_stays_where_it_is(self) -> None:
        layer = make_layer()
        cache = layer.new_cache(2, 30, max_rewind=3)
        where = {name: buffer.data_ptr() for name, buffer in cache.buffers.items()}
        cache.grow(31)
        moved = {name for name, buffer in cache.buffers.items() if buffer.data_ptr() != where[name]}
        assert moved == {"k_slc", "v_slc", "k_cmp", "v_cmp"}

    @of_both
    def test_grow_in_inference_mode(self, layer: Layer) -> None:
        x = tokens(2, 30)
        cache = layer.new_cache(2, 20)
        with torch.inference_mode():
            cache.grow(30)
        assert_equal_to_whole(decode(layer, x, [12, 1, 17], cache), layer(x))

    @of_both
    def test_insert_from_a_smaller_cache_into_a_grown_one(self, layer: Layer) -> None:
        x = tokens(2, 60)
        cache, other = layer.new_cache(2, 10), layer.new_cache(2, 40)
        layer(x[:, :40], cache=other)
        with pytest.raises(ValueError, match="other: expected max_seq_len of at most 10, got 40"):
            cache.insert([0, 1], other)
        cache.grow(60)
        cache.insert([0, 1], other)
        assert_equal_to_whole(decode(layer, x[:, 40:], [1] * 20, cache), layer(x)[:, 40:])
