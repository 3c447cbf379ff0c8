"""What a cache weighs and what a step reads: as counted by hand, as estimated, and nothing else."""

from __future__ import annotations

import gc
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from flexnsa import NSAConfig
from flexnsa.cache.steps import ReadCounter
from flexnsa.config import BRANCHES
from flexnsa.lm import DecoderConfig, DenseAttention
from flexnsa.lm.estimate import estimate_decoding
from tests.support.decoding import BRANCH_SETS, CONFIGS, decode, make_layer, tokens
from tests.support.inputs import SMALL


class TestMemory:
    @pytest.mark.parametrize("branches", BRANCH_SETS, ids="+".join)
    def test_bytes_follow_from_the_sizes(self, branches: tuple[str, ...]) -> None:
        """One slot more than tokens in each buffer, for padding."""
        cache = make_layer(branches=branches).new_cache(3, 200, max_rewind=5)
        key, value, per_row = 8 * 4, 12 * 4, 3 * 2
        compressed, tail, window = 49 + 1, 7 + 5 + 1, 23 + 5 + 1
        expected: dict[tuple[str, ...], int] = {
            ("cmp",): (compressed + tail) * (key + value),
            ("slc",): 201 * (key + value) + (compressed + tail) * key,
            ("win",): window * (key + value),
        }
        expected[BRANCHES] = (201 + compressed + tail + window) * (key + value)
        assert cache.num_bytes == expected[branches] * per_row

    def test_1000_steps_allocate_nothing(self) -> None:
        layer = make_layer()
        cache = layer.new_cache(1, 1010)
        where = {name: buffer.data_ptr() for name, buffer in cache.buffers.items()}
        decode(layer, tokens(1, 10), [1] * 10, cache)
        before = live_bytes()
        for _ in range(1000):
            layer(tokens(1, 1), cache=cache)
        assert live_bytes() == before
        assert {name: buffer.data_ptr() for name, buffer in cache.buffers.items()} == where
        assert cache.lengths.tolist() == [1010]


def live_bytes() -> int:
    """Memory of all tensors that anything still refers to; those of vmap, which compiled code keeps, have none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and not is_batchedtensor(x)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


class TestReads:
    def test_counted_keys_equal_a_count_by_hand(self) -> None:
        layer = make_layer()
        cache = layer.new_cache(1, 200)
        decode(layer, tokens(1, 150), [150], cache)
        cache.reads = ReadCounter()
        layer(tokens(1, 1), cache=cache)
        heads, pair = 2, (8 + 12) * 4
        # The query is token 150 of block 9, of which it sees 7 tokens; three blocks are full; 36 compressed tokens.
        expected = {"cmp": 36 * heads, "slc": (3 * 16 + 7) * heads, "win": 24 * heads}
        assert cache.reads.keys == expected
        assert cache.reads.bytes == {tag: keys * pair for tag, keys in expected.items()}

    def test_selection_without_the_compressed_branch_reads_keys_alone(self) -> None:
        layer = make_layer(branches=("slc",))
        cache = layer.new_cache(1, 200)
        cache.reads = ReadCounter()
        decode(layer, tokens(1, 9), [9], cache)
        assert cache.reads.keys == {"cmp": (1 + 1) * 2, "slc": 45 * 2, "win": 0}
        assert cache.reads.bytes == {"cmp": 4 * 8 * 4, "slc": 90 * 20 * 4, "win": 0}


class TestEstimator:
    """The closed form of :mod:`flexnsa.lm.estimate` against real caches and counted reads."""

    @pytest.mark.parametrize("branches", [*BRANCH_SETS, ("cmp", "win")], ids="+".join)
    @pytest.mark.parametrize("seq_len", [3, 40, 95, 150, 201])
    def test_estimate_equals_cache_bytes_and_read_bytes(self, seq_len: int, branches: tuple[str, ...]) -> None:
        self.compare(seq_len, branches, SMALL)

    @pytest.mark.parametrize("branches", [BRANCHES, ("slc",)], ids="+".join)
    @pytest.mark.parametrize("name", ["index keys", "index keys that overlap"])
    def test_estimate_equals_those_of_an_indexer(self, name: str, branches: tuple[str, ...]) -> None:
        self.compare(95, branches, CONFIGS[name])

    def compare(self, seq_len: int, branches: tuple[str, ...], nsa: NSAConfig) -> None:
        sizes = {"dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 12}
        config = DecoderConfig(**sizes, nsa=nsa, branches=branches)  # pyright: ignore[reportArgumentType]
        estimate = estimate_decoding(config, seq_len=seq_len, batch_size=3, precision="fp32")
        layer = make_layer(branches=branches, config=nsa)
        cache = layer.new_cache(3, seq_len + 1)
        decode(layer, tokens(3, seq_len), [seq_len], cache)
        cache.reads = ReadCounter()
        layer(tokens(3, 1), cache=cache)
        assert estimate.cache_bytes == cache.num_bytes
        assert estimate.bytes_read == sum(cache.reads.bytes.values())
        dense = DenseAttention(32, 4, 2, 8, v_head_dim=12).new_cache(3, seq_len + 1)
        assert estimate.dense_cache_bytes == sum(each.nbytes for each in dense.buffers.values())


class TestOneStepTouches:
    def test_the_keys_that_it_counts_and_no_others(self) -> None:
        """Everything else in the cache may be poison."""
        layer = make_layer()
        x = tokens(1, 151)
        cache = layer.new_cache(1, 400)
        decode(layer, x[:, :150], [150], cache)
        expected = decode(layer, x[:, 150:], [1], deepcopy(cache))
        for name, length in (("k_slc", 150), ("v_slc", 150), ("k_cmp", 36), ("v_cmp", 36)):
            cache.buffers[name][:, :, length:] = torch.inf
        cache.buffers["k_slc"][:, :, 16:32] = torch.inf
        cache.buffers["v_slc"][:, :, 16:32] = torch.inf
        out = layer(x[:, 150:], cache=cache)
        assert torch.equal(out, expected)
