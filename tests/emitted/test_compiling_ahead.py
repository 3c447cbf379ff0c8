"""Our own kernels begin to compile while PyTorch traces: those that launches will need, each variant once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import language as tl
from triton.compiler import CompiledKernel

from flexnsa import NativeSparseAttention, SelectionLoss
from flexnsa.attention.triton.kernels.kernel import Kernel, jit
from tests.emitted.emit import emit

OF_A_LAYER = {
    *("log_sum_exp_kernel", "block_log_sums", "hopper_importance", "top_blocks_kernel"),
    *("mark", "count_queries", "cut", "scatter", "hopper_forward_parts", "hopper_combine"),
    *("gated_stats", "hopper_backward_parts", "sum_shared", "hopper_sum_slots"),
    *("hopper_forward", "hopper_backward_queries", "hopper_backward_keys", "sum_parts"),
    *("compare_blocks", "query_gradients", "key_gradients"),
}
WITHOUT_POSITIONS = {
    *("block_log_sums", "hopper_importance", "count_queries", "cut", "gated_stats", "sum_parts"),
    *("compare_blocks", "query_gradients", "key_gradients"),
}
SEVERAL = {"block_log_sums": 2, "hopper_backward_keys": 2, "sum_parts": 2}
"""For two sizes of keys: those of the layer and of its indexer; those of the window and of the compressed branch."""


@jit(do_not_specialize=["n"])
def double(x_ptr, stride, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + at * stride, mask=at < n, other=0)
    tl.store(x_ptr + at * stride, 2 * values, mask=at < n)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    double.function.device_caches.clear()  # pyright: ignore[reportAttributeAccessIssue]
    double._compiling.clear()


def test_a_launch_on_fake_tensors_compiles_what_one_on_real_tensors_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[str]()  # nothing can be loaded on a GPU that does not exist
    monkeypatch.setattr(CompiledKernel, "run", property(lambda kernel: loaded.append(kernel.name)))
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(4096)
        for stride, n in ((1, 7), (1, 16), (16, 7), (32, 1)):  # two variants: n is not specialized, nor is 16 beside 32
            double[(1,)](x, stride, n, BLOCK=16)
        double[(1,)](x[1:], 1, 7, BLOCK=16)  # a third: not aligned
    compiling = list(double._compiling)
    assert len(compiling) == 3
    with mock.patch.object(double, "function", mock.MagicMock()) as launched:
        double[(1,)](torch.empty(16), 1, 16, BLOCK=16)
        assert launched.__getitem__.return_value.call_count == 1
    assert all(future.done() and future.exception() is None for future in compiling), "the launch did not wait"
    assert loaded == ["double"] * 3
    variants: dict[str, Any] = double.function.device_caches[0][0]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(variants) == 3
    for at, stride in ((0, 1), (0, 48), (1, 1)):
        double.function.warmup(torch.empty(4096)[at:], stride, 11, grid=(1,), BLOCK=16)
    assert len(variants) == 3, "a real tensor needs another variant than the fake one"


def test_a_launch_like_an_earlier_one_finds_what_triton_would(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[tuple[Any, ...]]()

    def launch(compiled: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: launched.append((compiled, grid, args[1:]))

    monkeypatch.setattr(CompiledKernel, "__getitem__", launch)
    triton = double.function
    search = mock.MagicMock(side_effect=lambda *args, **options: triton.warmup(*args, grid=(1,), **options))
    function = mock.MagicMock(fn=getattr(triton, "fn"), __getitem__=lambda *_: search)  # noqa: B009
    kernel, x = Kernel(function), torch.empty(4096)
    calls = [(x, 1, 7), (x, 16, 7), (x, 32, 7), (x[1:], 1, 7), (x.half(), 1, 7), (x, 2**40, 7), (x, 1, 8)]
    for args in calls:
        kernel[(5,)](*args, BLOCK=16)
    assert search.call_count == len(calls)
    assert not launched
    for args in calls:
        kernel[(5,)](*args, BLOCK=16)
        expected = triton.warmup(*args, grid=(1,), BLOCK=16)
        assert launched.pop() == (expected, (5, 1, 1), (*args[1:], 16))
    assert search.call_count == len(calls)
    kernel[(5,)](x, 1, 7, BLOCK=32)
    kernel[(5,)](x, 1, 7, BLOCK=16, num_warps=8)
    kernel[(5,)](x, True, 7, BLOCK=16)  # equals 1, but another variant multiplies by it
    assert search.call_count == len(calls) + 3
    assert not launched


def test_what_fails_ahead_fails_at_the_launch() -> None:
    function = mock.MagicMock()
    function.warmup.side_effect = function.__getitem__.return_value.side_effect = RuntimeError("no such register")
    kernel = Kernel(function)
    with FakeTensorMode():
        kernel[(1,)](torch.empty(16, device="cuda"))
    with pytest.raises(RuntimeError, match="no such register"):
        kernel[(1,)](torch.empty(16))
    assert function.warmup.call_count == 1


def test_a_traced_layer_begins_to_compile_all_of_its_kernels() -> None:
    """For packed documents only those that read positions begin anew; blocks are scored in Triton then."""
    layer = NativeSparseAttention(64, 4, 2, 64, impl="triton").to("meta")
    names = [name for name, _ in layer.named_parameters()]
    begun = list[str]()

    def attend(x: Tensor, sampled: Tensor, ids: Tensor | None, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        selection = SelectionLoss.at(sampled, "mass")
        weights = dict(zip(names, parameters, strict=True))
        options = {"selection": selection, "document_ids": ids}
        return torch.func.functional_call(layer, weights, (x,), options), selection.sums[0]

    def make(packed: bool) -> tuple[Tensor | None, ...]:
        new = partial(torch.empty, dtype=torch.bfloat16)  # in which Hopper has kernels of its own
        parameters = [new(x.shape, requires_grad=True) for x in layer.parameters()]
        sampled, ids = (torch.zeros(2, n, dtype=torch.int64) for n in (256, 1024))
        return new(2, 1024, 64), sampled, ids if packed else None, *parameters

    def submit(_pool: object, _compile: object, function: Any, *_: object) -> Future[None]:
        begun.append(function.__name__)
        return Future()

    with mock.patch.object(ThreadPoolExecutor, "submit", submit):
        emit(attend, partial(make, False), ahead=True)
        assert Counter(begun) == dict.fromkeys(OF_A_LAYER, 1) | SEVERAL
        begun.clear()
        emit(attend, partial(make, True), ahead=True)
    assert Counter(begun) == dict.fromkeys(OF_A_LAYER - WITHOUT_POSITIONS | {"importance_kernel"}, 1) | {
        "hopper_backward_keys": 2
    }
