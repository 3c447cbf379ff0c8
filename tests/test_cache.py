"""Decoding: a step with a cache gives what the whole sequence gives, selects the same blocks and reads no more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import SMALL
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache, NSAConfig
from flexnsa.attention.implementations import CACHED_IMPLEMENTATIONS, IMPLEMENTATIONS
from flexnsa.attention.seam import Implementation
from flexnsa.decoding.read_counter import ReadCounter
from flexnsa.geometry import BRANCHES, num_compressed
from flexnsa.memory import estimate_decoding
from flexnsa.models import DecoderConfig, DenseAttention

WINDOW = SMALL.window_size
BRANCH_SETS = [BRANCHES, ("cmp",), ("slc",), ("win",)]
CONFIGS = {
    "paper's proportions": SMALL,
    "no overlap": NSAConfig(
        compress_block_size=4, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=5
    ),
    "all sizes 1": NSAConfig(
        compress_block_size=1,
        compress_stride=1,
        select_block_size=1,
        num_selected_blocks=3,
        num_init_blocks=1,
        num_local_blocks=1,
        window_size=1,
    ),
    "compressed longer than selected": NSAConfig(
        compress_block_size=12, compress_stride=2, select_block_size=4, num_selected_blocks=5, window_size=7
    ),
}


def make_layer(impl: str = "sdpa", **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    options = {"config": SMALL, "v_head_dim": 12, "impl": impl} | options
    return NativeSparseAttention(32, 4, 2, 8, **options).requires_grad_(False)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))


def decode(layer: NativeSparseAttention, x: Tensor, chunks: list[int], cache: NSACache | None = None) -> Tensor:
    cache = layer.new_cache(len(x), x.shape[1]) if cache is None else cache
    return torch.cat([layer(part, cache=cache) for part in x.split(chunks, dim=1)], dim=1)


def chunks_of(size: int, length: int) -> list[int]:
    return [size] * (length // size) + [length % size] * (length % size > 0)


def assert_equal_to_whole(out: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-5)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The blocks that each call selects from now on."""
    recorded: list[Tensor] = []

    def recording(implementation: Implementation) -> Implementation:
        def select(*args: Any) -> Tensor:
            recorded.append(implementation.select(*args))
            return recorded[-1]

        return replace(implementation, select=select)

    for table in (IMPLEMENTATIONS, CACHED_IMPLEMENTATIONS):
        monkeypatch.setitem(table, "sdpa", recording(table["sdpa"]))
    return recorded


def refuse_window(patch: pytest.MonkeyPatch) -> None:
    """Let the last branch of a step with a cache fail."""

    def fail(*_: object) -> Any:
        raise RuntimeError("the window failed")

    patch.setitem(CACHED_IMPLEMENTATIONS, "sdpa", replace(CACHED_IMPLEMENTATIONS["sdpa"], window=fail))


class TestStepsEqualTheWholeSequence:
    @pytest.mark.parametrize("branches", BRANCH_SETS, ids="+".join)
    @pytest.mark.parametrize("size", [1, 7, 16, 64, 100])
    @pytest.mark.parametrize("impl", ["reference", "sdpa"])
    def test_in_chunks_from_an_empty_cache(self, impl: str, size: int, branches: tuple[str, ...]) -> None:
        layer = make_layer(impl, branches=branches)
        x = tokens(2, 107)
        assert_equal_to_whole(decode(layer, x, chunks_of(size, 107)), layer(x))

    @pytest.mark.parametrize("impl", ["reference", "sdpa"])
    def test_after_a_prefill_of_any_length(self, impl: str) -> None:
        """All lengths up to ``3 w`` and so all residues of the strides and block sizes, then five steps."""
        layer = make_layer(impl)
        x = tokens(1, 3 * WINDOW + 5)
        whole = layer(x)
        for length in range(1, 3 * WINDOW + 1):
            out = decode(layer, x[:, : length + 5], [length, *[1] * 5])
            assert_equal_to_whole(out, whole[:, : length + 5])

    @pytest.mark.parametrize("name", CONFIGS)
    @pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
    def test_in_every_geometry(self, name: str, compression: str) -> None:
        layer = make_layer(config=CONFIGS[name], compression=compression)
        x = tokens(1, 61)
        assert_equal_to_whole(decode(layer, x, [13, *[1] * 30, 9, 9]), layer(x))

    @pytest.mark.parametrize("branches", BRANCH_SETS, ids="+".join)
    @pytest.mark.parametrize("impl", ["reference", "sdpa"])
    def test_in_a_batch_of_different_lengths(self, impl: str, branches: tuple[str, ...]) -> None:
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

    def test_selected_blocks_are_identical(self, chosen: list[Tensor]) -> None:
        layer = make_layer()
        x = tokens(2, 107)
        layer(x)
        (whole,) = chosen
        for chunks in ([1] * 107, [37, *[1] * 70], chunks_of(16, 107)):
            chosen.clear()
            decode(layer, x, chunks)
            assert torch.equal(torch.cat(chosen, dim=2), whole)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_in_other_precisions(self, dtype: torch.dtype) -> None:
        layer = make_layer(config=replace(SMALL, num_selected_blocks=8)).to(dtype)  # every block: no choice to flip
        x = tokens(2, 107).to(dtype)
        out = decode(layer, x, [50, *[1] * 57])
        torch.testing.assert_close(out, layer(x), rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-14)

    def test_under_autocast(self) -> None:
        layer = make_layer()
        x = tokens(1, 40)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = layer(x)
            out = decode(layer, x, [30, *[1] * 10], layer.new_cache(1, 40, dtype=torch.bfloat16))
        torch.testing.assert_close(out, whole, rtol=0, atol=0.02)


def test_compressed_tokens_appear_when_their_last_token_does() -> None:
    layer = make_layer()
    x = tokens(1, 60)
    cache = layer.new_cache(1, 60)
    for length in range(1, 61):
        layer(x[:, length - 1 : length], cache=cache)
        written = cache.all("k_cmp")[:, :, :-1].abs().sum((0, 1, 3)) > 0
        assert int(written.sum()) == num_compressed(length, SMALL)
        assert written[: num_compressed(length, SMALL)].all()


class TestCacheOperations:
    def test_crop_takes_back_and_goes_on_differently(self) -> None:
        layer = make_layer()
        x, other = tokens(2, 107), -tokens(2, 107)
        cache = layer.new_cache(2, 120, max_rewind=9)
        decode(layer, x, [80, *[1] * 20, 7], cache)
        cache.crop(100)
        cache.crop(98)
        out = decode(layer, other[:, 98:], [3, *[1] * 6], cache)
        assert_equal_to_whole(out, layer(torch.cat([x[:, :98], other[:, 98:]], dim=1))[:, 98:])

    def test_crop_goes_back_anywhere_while_nothing_was_overwritten(self) -> None:
        layer = make_layer(branches=("slc", "cmp"))
        x = tokens(2, 8)
        cache = layer.new_cache(2, 40)
        decode(layer, x, [8], cache)
        cache.crop(torch.tensor([2, 5]))
        out = layer(x[:, :1], cache=cache)
        for row, length in enumerate((2, 5)):
            alone = torch.cat([x[row : row + 1, :length], x[row : row + 1, :1]], dim=1)
            assert_equal_to_whole(out[row, 0], layer(alone)[0, -1])

    def test_crop_refuses_what_the_rings_have_forgotten(self) -> None:
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

    def test_reset_is_a_fresh_cache(self) -> None:
        layer = make_layer()
        x = tokens(2, 60)
        cache = layer.new_cache(2, 60)
        decode(layer, -x, [60], cache)
        cache.reset()
        assert_equal_to_whole(decode(layer, x, [25, *[1] * 35], cache), layer(x))

    def test_reorder_moves_rows_with_all_they_hold(self) -> None:
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

    def test_state_saved_and_restored_here_and_elsewhere(self) -> None:
        layer = make_layer()
        x = tokens(1, 60)
        cache, elsewhere = layer.new_cache(1, 60), layer.new_cache(1, 60)
        decode(layer, x[:, :40], [40], cache)
        state = cache.state_dict()
        expected = decode(layer, x[:, 40:], [1] * 20, cache)
        for restored in (cache, elsewhere):
            restored.load_state_dict(state)
            assert torch.equal(decode(layer, x[:, 40:], [1] * 20, restored), expected)

    def test_state_of_other_sizes_is_refused(self) -> None:
        cache = make_layer().new_cache(1, 60)
        before = cache.state_dict()
        with pytest.raises(ValueError, match=r"state\['k_slc'\]: expected shape \(1, 2, 61, 8\), got"):
            cache.load_state_dict(before | {"k_slc": before["k_slc"][:, :, :-1]})
        with pytest.raises(ValueError, match=r"state: expected k_cmp, .*, got k_win, "):
            cache.load_state_dict(make_layer(branches=("win",)).new_cache(1, 60).state_dict())
        assert_same_state(cache, before)


def assert_same_state(cache: NSACache, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in cache.state_dict().items())


def trained(layer: NativeSparseAttention) -> NativeSparseAttention:
    return deepcopy(layer).requires_grad_(True)


LAYER = make_layer()
STEP = tokens(2, 3)
DOCUMENTS = torch.zeros(2, 3, dtype=torch.int64)
WRONG_USE: list[tuple[Callable[[NSACache], object], str]] = [
    (lambda cache: LAYER(tokens(2, 8), cache=cache), "x: expected at most 7 tokens, .* of 40 has room in row 1, got 8"),
    (lambda cache: LAYER(STEP, cache=cache, lengths=torch.tensor([4, 1])), "lengths: expected 0 .. 3"),
    (lambda cache: LAYER(STEP, cache=cache, lengths=torch.tensor([1, -1])), "lengths: expected 0 .. 3"),
    (lambda cache: LAYER(STEP, cache=cache, lengths=torch.tensor([1])), r"lengths: expected shape \(2\), got \(1,\)"),
    (lambda _: LAYER(STEP, lengths=torch.tensor([1, 1])), "lengths: expected None without a cache"),
    (lambda cache: LAYER(STEP, cache=cache, document_ids=DOCUMENTS), "document_ids: expected None with a cache"),
    (lambda cache: LAYER(tokens(1, 3), cache=cache), "cache: expected batch_size=1, as the layer has it, got 2"),
    (lambda cache: LAYER.double()(STEP.double(), cache=cache), "cache: expected dtype=torch.float64"),
    (lambda cache: make_layer(config=CONFIGS["no overlap"])(STEP, cache=cache), "cache: expected config=NSAConfig"),
    (lambda cache: make_layer(branches=("cmp",))(STEP, cache=cache), "cache: expected branches="),
    (lambda cache: make_layer(v_head_dim=8)(STEP, cache=cache), "cache: expected v_head_dim=8, .* got 12"),
    (lambda cache: trained(LAYER)(STEP, cache=cache), "cache: expected torch.no_grad"),
    (lambda cache: LAYER(STEP.clone().requires_grad_(), cache=cache), "cache: expected torch.no_grad"),
    (lambda cache: LAYER(STEP[:, :0], cache=cache), r"x: expected no empty dimension, got \(2, 0, 32\)"),
    (lambda cache: LAYER(STEP, cache=cache, lengths=torch.tensor([1.5, 1])), "lengths: expected dtype torch.int32"),
    (lambda cache: cache.begin(0), "num_tokens: expected at least 1, got 0"),
    (lambda cache: cache.crop(19.5), "lengths: expected an int, got 19.5"),
    (lambda cache: cache.crop(True), "lengths: expected an int, got True"),
    (lambda cache: cache.crop(10**30), "lengths: expected at most 40"),
    (lambda cache: cache.crop(torch.tensor([19.5, 33.0])), "lengths: expected dtype torch.int32"),
    (lambda cache: cache.crop(torch.tensor([2**32 + 20, 33])), r"lengths: expected 0, or up to .*, got 4294967316"),
    (lambda cache: cache.reorder(torch.tensor([1.0, 0.0])), "rows: expected dtype torch.int32"),
    (lambda cache: cache.reorder(torch.tensor([0, 2])), r"rows: expected 0 .. 1, got \[0, 2\]"),
    (lambda cache: cache.reorder(torch.tensor([-1, 0])), r"rows: expected 0 .. 1, got \[-1, 0\]"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_USE, ids=[message for _, message in WRONG_USE])
def test_wrong_use_is_named_and_leaves_the_cache_as_it_was(call: Callable[[NSACache], object], message: str) -> None:
    LAYER.float()
    cache = LAYER.new_cache(2, 40)
    LAYER(tokens(2, 33), cache=cache, lengths=torch.tensor([20, 33]))
    before = cache.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(cache)
    assert_same_state(cache, before)


def test_a_step_that_fails_half_way_was_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    x = tokens(2, 90)
    cache = layer.new_cache(2, 90)
    layer(x[:, :50], cache=cache)
    with monkeypatch.context() as patch:
        refuse_window(patch)
        with pytest.raises(RuntimeError, match="the window failed"):
            layer(-x[:, 50:80], cache=cache)
    assert_equal_to_whole(decode(layer, x[:, 50:], [1] * 40, cache), layer(x)[:, 50:])


def test_a_token_that_fails_half_way_has_left_the_window_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are in the ring already, in the place of the oldest, so no step can go back that far."""
    layer = make_layer()
    x = tokens(2, 90)
    cache = layer.new_cache(2, 90)
    decode(layer, x[:, :50], [50], cache)
    with monkeypatch.context() as patch:
        refuse_window(patch)
        with pytest.raises(RuntimeError, match="the window failed"):
            layer(-x[:, 50:51], cache=cache)
    with pytest.raises(ValueError, match="lengths: expected 0, or up to max_rewind=1 less than the 50"):
        cache.crop(49)
    assert_equal_to_whole(decode(layer, x[:, 50:], [1] * 40, cache), layer(x)[:, 50:])


def test_a_full_row_is_noticed_after_steps_that_nobody_counted() -> None:
    layer = make_layer()
    cache = layer.new_cache(2, 30)
    layer(tokens(2, 20), cache=cache, lengths=torch.tensor([20, 3]))
    torch.compiler.reset()
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(9):
        step(tokens(2, 1), cache=cache)
    layer(tokens(2, 1), cache=cache)
    with pytest.raises(ValueError, match=r"x: expected at most 0 tokens, .* of 30 has room in row 0, got 1"):
        layer(tokens(2, 1), cache=cache)
    cache.crop(torch.tensor([29, 12]))
    assert layer(tokens(2, 1), cache=cache).isfinite().all()
    cache.reset()
    assert layer(tokens(2, 30), cache=cache).isfinite().all()


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


def test_a_cache_is_no_cache_of_another_class() -> None:
    with pytest.raises(TypeError, match="cache: expected NSACache, got"):
        LAYER.float()(STEP, cache={})  # pyright: ignore[reportArgumentType]


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

    def test_1000_steps_keep_nothing_that_was_not_there_before(self) -> None:
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
    """Memory of all tensors that anything still refers to."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is Tensor
    }
    return sum(storages.values())


class TestReads:
    def test_keys_are_counted_as_they_would_be_by_hand(self) -> None:
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

    def test_a_long_context_adds_compressed_keys_only(self) -> None:
        layer = make_layer()
        counts = []
        for length in (160, 320, 640):
            cache = layer.new_cache(1, length + 1)
            decode(layer, tokens(1, length), [length], cache)
            cache.reads = ReadCounter()
            layer(tokens(1, 1), cache=cache)
            counts.append(cache.reads.keys)
        assert [count["cmp"] // 2 for count in counts] == [num_compressed(n + 1, SMALL) for n in (160, 320, 640)]
        assert len({count["slc"] for count in counts}) == len({count["win"] for count in counts}) == 1


class TestEstimator:
    """The closed form of :mod:`flexnsa.memory` against real caches and counted reads."""

    @pytest.mark.parametrize("branches", [*BRANCH_SETS, ("cmp", "win")], ids="+".join)
    @pytest.mark.parametrize("seq_len", [3, 40, 95, 150, 201])
    def test_bytes_of_the_cache_and_of_what_a_step_reads(self, seq_len: int, branches: tuple[str, ...]) -> None:
        sizes = {"dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 12}
        config = DecoderConfig(**sizes, nsa=SMALL, branches=branches)  # pyright: ignore[reportArgumentType]
        estimate = estimate_decoding(config, seq_len=seq_len, batch_size=3, precision="fp32")
        layer = make_layer(branches=branches)
        cache = layer.new_cache(3, seq_len + 1)
        decode(layer, tokens(3, seq_len), [seq_len], cache)
        cache.reads = ReadCounter()
        layer(tokens(3, 1), cache=cache)
        assert estimate.cache_bytes == cache.num_bytes
        assert estimate.bytes_read == sum(cache.reads.bytes.values())
        dense = DenseAttention(32, 4, 2, 8, v_head_dim=12).new_cache(3, seq_len + 1)
        assert estimate.dense_cache_bytes == dense.k.nbytes + dense.v.nbytes


class TestOneStepTouches:
    def test_the_keys_that_it_counts_and_no_others(self) -> None:
        """Everything else in the cache may be poison."""
        layer = make_layer()
        x = tokens(1, 151)
        cache = layer.new_cache(1, 400)
        decode(layer, x[:, :150], [150], cache)
        expected = decode(layer, x[:, 150:], [1], deepcopy(cache))
        for name, length in (("k_slc", 150), ("v_slc", 150), ("k_cmp", 36), ("v_cmp", 36)):
            cache.all(name)[:, :, length:] = torch.inf
        cache.all("k_slc")[:, :, 16:32] = torch.inf
        cache.all("v_slc")[:, :, 16:32] = torch.inf
        out = layer(x[:, 150:], cache=cache)
        assert torch.equal(out, expected)


def test_needles_in_65536_tokens_are_selected_and_read(chosen: list[Tensor]) -> None:
    """Sixteen tokens stand out, each in a direction of its own; at the end, sixteen ask for one direction each."""
    dim, length, count = 32, 65_536, 16
    layer = NativeSparseAttention(
        dim, 1, 1, dim, branches=("slc",), compression="mean", impl="sdpa", rope_base=1e300
    ).requires_grad_(False)
    for name, size in (("w_q", 16.0), ("w_k_slc", 1.0), ("w_v_slc", 1.0), ("w_o", 2.0)):
        layer.get_submodule(f"{name}").weight = torch.nn.Parameter(torch.eye(dim) * size, requires_grad=False)
    layer.gate.linear.weight.zero_()  # sigmoid(0) = 1/2, made up for by w_o

    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0)) / dim**0.5
    x[..., [0, dim // 2]] = 0  # the one pair that RoPE turns at this base
    direction = torch.eye(dim)[[*range(1, dim // 2), dim // 2 + 1]]
    depth = [(2 * i + 1) * (length - count) // (2 * count) for i in range(count)]
    x[0, depth], x[0, -count:] = 8 * direction, direction

    cache = layer.new_cache(1, length, max_rewind=count)
    prefill = layer(x, cache=cache)[:, -count:]
    cache.crop(length - count)
    steps = decode(layer, x[:, -count:], [1] * count, cache)
    for out, blocks in ((prefill, chosen[0][0, 0, -count:]), (steps, torch.cat(chosen[1:], dim=2)[0, 0])):
        torch.testing.assert_close(out[0], x[0, depth], rtol=0, atol=1e-3)
        assert [position // 64 in row for position, row in zip(depth, blocks.tolist(), strict=True)] == [True] * count


class TestCompiled:
    def test_256_steps_of_one_graph(self) -> None:
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

    def test_flex_steps_never_recompile_even_after_a_prefill_by_another_implementation(self) -> None:
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

    def test_a_step_beyond_the_end_cannot_raise_and_is_not_a_number(self) -> None:
        layer = make_layer()
        cache = layer.new_cache(2, 30)
        layer(tokens(2, 29), cache=cache, lengths=torch.tensor([29, 12]))
        torch.compiler.reset()
        step = torch.compile(layer, fullgraph=True, backend="aot_eager")
        out = step(tokens(2, 2), cache=cache)
        assert out.isnan().all(-1).tolist() == [[False, True], [False, False]]
        assert cache.lengths.tolist() == [30, 14]
