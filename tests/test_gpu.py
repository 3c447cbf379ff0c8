"""What only a GPU can show: the compiled kernels, forward and backward, on the device that runs them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log2
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss, native_sparse_attention
from flexnsa.config import num_compressed
from flexnsa.lm import Corpus, DecoderConfig, DecoderLM, TrainConfig, Trainer
from flexnsa.lm.model.decoder import quick_options
from flexnsa.mods import soft_cap
from flexnsa.operators.replay import Plan
from tests.support.inputs import SMALL

pytestmark = pytest.mark.gpu


def inputs(
    groups: int, seq_len: int, dims: tuple[int, int], dtype: torch.dtype, config: NSAConfig, batch: int = 2
) -> list[Tensor]:
    """Draw q, k, v, gates, k_cmp, v_cmp, k_win, v_win for two key heads."""
    dk, dv = dims
    lengths = {"q": seq_len, "k": seq_len, "c": num_compressed(seq_len, config)}
    shapes = [(2 * groups, "q", dk), (2, "k", dk), (2, "k", dv), (2 * groups, "q", 3)]
    shapes += [(2, "c", dk), (2, "c", dv), (2, "k", dk), (2, "k", dv)]
    return [
        torch.randn(batch, heads, lengths[kind], dim, device="cuda", dtype=dtype, requires_grad=True)
        for heads, kind, dim in shapes
    ]


def attend(tensors: Sequence[Tensor], config: NSAConfig, impl: str = "auto", **options: Any) -> Tensor:
    q, k, v, gates, k_cmp, v_cmp, k_win, v_win = tensors
    others = {"k_cmp": k_cmp, "v_cmp": v_cmp, "k_win": k_win, "v_win": v_win}
    return native_sparse_attention(q, k, v, gates, **others, config=config, impl=impl, **options)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp_min(1e-30))


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 96])
def test_replayed_launches_return_the_bits_of_the_first_ones(
    dim: int, nonnegative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, replay = list[Plan](), Plan.replay
    monkeypatch.setattr(Plan, "replay", lambda plan, args: (replayed.append(plan), replay(plan, args))[1])

    def results(of: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            of[3].abs_()
        out = attend(of, NSAConfig(), "triton", nonnegative_gates=nonnegative)
        return [out, *torch.autograd.grad(out, of, torch.ones_like(out))]

    one, other = (inputs(4, 1500 + dim + nonnegative, (dim, dim), torch.bfloat16, NSAConfig()) for _ in range(2))
    first, recorded = results(one), results(other)
    assert not replayed
    for of, expected in ((one, first), (other, recorded), (one, first)):
        assert all(map(torch.equal, results(of), expected))
    assert len(replayed) >= 3 * 4


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_a_layer_on_another_gpu_than_the_current_one_runs_there(impl: str) -> None:
    layer = NativeSparseAttention(256, 16, 4, 64, config=SMALL, impl=impl)
    x = torch.randn(1, 500, 256)
    results = []
    for device in ("cuda:0", "cuda:1"):
        own = x.to(device).requires_grad_()
        out = layer.to(device)(own)
        assert torch.cuda.current_device() == 0
        results.append([out.cpu(), *(y.cpu() for y in torch.autograd.grad(out.sum(), [own, *layer.parameters()]))])
    for one, other in zip(*results, strict=True):
        assert error(other, one) < 1e-5


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_queries_anywhere_have_their_rows_and_gradients_of_the_whole_call(impl: str) -> None:
    length, config = 3000, NSAConfig()
    x = [y.detach().requires_grad_() for y in inputs(16, length, (64, 64), torch.bfloat16, config, batch=1)]
    tokens = torch.cat([torch.arange(100, 350), torch.tensor([400, 777]), torch.arange(2600, 2900)]).cuda()
    options: dict[str, Any] = {"config": config, "impl": impl, "return_aux": True}
    names = ("q", "k", "v", "gates", "k_cmp", "v_cmp", "k_win", "v_win")
    whole, aux = native_sparse_attention(**dict(zip(names, x, strict=True)), **options)
    upstream = torch.randn_like(whole[:, :, tokens])
    want = torch.autograd.grad(whole[:, :, tokens], x, upstream)
    some = [y[:, :, tokens] if name in ("q", "gates") else y for name, y in zip(names, x, strict=True)]
    out, own = native_sparse_attention(**dict(zip(names, some, strict=True)), positions=tokens, **options)
    got = torch.autograd.grad(out, x, upstream)
    assert torch.equal(own.block_indices, aux.block_indices[:, :, tokens])
    assert error(out, whole[:, :, tokens]) < 2**-8
    for name, a, b in zip(names, got, want, strict=True):
        assert error(a, b) < 2**-7, name


@pytest.mark.parametrize(
    ("groups", "seq_len", "dims", "dtype", "config"),
    [
        (16, 700, (64, 64), torch.float32, NSAConfig()),
        (4, 1000, (64, 32), torch.float32, NSAConfig()),
        (1, 500, (32, 32), torch.float32, SMALL),
        (6, 777, (64, 64), torch.bfloat16, NSAConfig()),
        (16, 2048, (128, 128), torch.bfloat16, NSAConfig()),
        (2, 7, (16, 16), torch.float16, SMALL),
    ],
)
def test_output_and_every_gradient_match_float64(
    groups: int, seq_len: int, dims: tuple[int, int], dtype: torch.dtype, config: NSAConfig
) -> None:
    tensors = inputs(groups, seq_len, dims, dtype, config)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    upstream = torch.randn(*tensors[0].shape[:3], dims[1], device="cuda", dtype=dtype)
    results = {}
    runs: dict[str, list[Tensor]] = {"exact": exact, "plain": tensors, "flex": tensors}
    for name, run in runs.items():
        out = attend(run, config, impl="flex" if name == "flex" else "reference")
        results[name] = [out, *torch.autograd.grad(out, run, upstream.to(out.dtype))]
    eps = torch.finfo(dtype).eps
    for index, (flex, plain, truth) in enumerate(zip(results["flex"], results["plain"], results["exact"], strict=True)):
        if truth.numel() == 0 or truth.norm() == 0:
            assert flex.isfinite().all()
            continue
        # Twice (thrice) the plain formula at the same precision. The kernels add up a key's gradient in another order:
        # in fp32 that costs a few roundings more, about 5 on an H200.
        factor = 3 if index else 2
        assert error(flex, truth) <= factor * error(plain, truth) + 6 * eps * (dtype == torch.float32)


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("cmp", "slc")])
@pytest.mark.parametrize(("dim", "length"), [(64, 1000), (64, 9000), (128, 33_000)])
def test_knowing_that_no_gate_is_negative_changes_gradients_by_roundings(
    dim: int, length: int, branches: tuple[str, ...]
) -> None:
    tensors = inputs(4, length, (dim, dim), torch.bfloat16, NSAConfig(), batch=1)
    tensors[3] = tensors[3].detach().sigmoid().requires_grad_()
    results: dict[bool, list[Tensor]] = {}
    for known in (False, True):
        out = attend(tensors, NSAConfig(), impl="triton", nonnegative_gates=known, branches=branches)
        results[known] = [out, *torch.autograd.grad(out.float().square().sum(), tensors, materialize_grads=True)]
    for a, b in zip(results[True], results[False], strict=True):
        assert error(a, b) < 2**-7


@pytest.mark.parametrize("impl", ["auto", "flex", "sdpa", "auto, packed", "auto, capped", "auto, combined"])
@pytest.mark.parametrize("preset", ["text", "paper"])
def test_what_inductor_compiles_by_default_has_the_gradients_of_eager_layers(preset: str, impl: str) -> None:
    torch._dynamo.reset()
    impl, _, kind = impl.partition(", ")
    layer = NativeSparseAttention(256, 4, 2, 64, preset=preset, impl=impl).cuda()
    compiled = torch.compile(layer, **(quick_options({}) if kind == "combined" else {}))
    for length in (1000, 1500):  # the second one with symbolic sizes
        x = torch.randn(2, length, 256, device="cuda")
        ids = (torch.arange(length, device="cuda") // 300).expand(2, -1) if kind == "packed" else None
        mod = soft_cap(0.3) if kind == "capped" else None
        results: list[dict[str, Tensor]] = []
        for run in (layer, compiled):
            layer.zero_grad()
            selection = None if layer.indexer is None else SelectionLoss()
            with torch.autocast("cuda", torch.bfloat16):
                out = run(x, document_ids=ids, score_mod=mod, selection=selection).float()
            (out.square().mean() + (0 if selection is None else selection.total)).backward()
            results.append({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None})
        for name, eager in results[0].items():
            assert error(results[1][name], eager) <= 2**-5, (length, name)


def test_one_graph_serves_every_length_and_documents_stand_alone() -> None:
    layer = NativeSparseAttention(64, 8, 2, 16, config=SMALL).cuda()
    oracle = NativeSparseAttention(64, 8, 2, 16, config=SMALL, impl="reference").cuda()
    oracle.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for number, seq_len in enumerate((150, 200, 333, 512)):
        x = torch.randn(2, seq_len, 64, device="cuda")
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            ours = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
        theirs = torch.autograd.grad(oracle(x).square().sum(), list(oracle.parameters()))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    lengths = (5, 33, 1, 80)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].cuda()
    x = torch.randn(1, sum(lengths), 64, device="cuda")
    alone = torch.cat([oracle(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(layer(x, document_ids=ids), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["flex", "triton"])
@pytest.mark.parametrize("compiled", [False, True])
def test_branches_that_run_again_give_the_same_gradients_and_save_less(impl: str, compiled: bool) -> None:
    config, dims = NSAConfig(), (64, 64)
    tensors = inputs(6, 2048, dims, torch.bfloat16, config)
    upstream = torch.randn(*tensors[0].shape[:3], dims[1], device="cuda", dtype=torch.bfloat16)
    gradients, saved = {}, {}
    for tags in ((), ("cmp", "slc", "win")):

        def run(*tensors: Tensor, tags: tuple[str, ...] = tags) -> Tensor:
            return attend(tensors, config, impl, recompute=tags)

        call = torch.compile(run, fullgraph=True, dynamic=False) if compiled else run
        call(*tensors)  # masks that stay are not saved by the call
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = call(*tensors)
        saved[tags] = torch.cuda.memory_allocated() - before
        gradients[tags] = torch.autograd.grad(out, tensors, upstream)
        del out
    outputs = 3 * upstream.numel() * upstream.element_size()
    assert saved[()] - saved["cmp", "slc", "win"] >= outputs
    for plain, again in zip(gradients[()], gradients["cmp", "slc", "win"], strict=True):
        assert error(again, plain) <= 2e-2


def test_memory_of_a_training_step_is_linear() -> None:
    def run(*tensors: Tensor) -> Tensor:
        return attend(tensors, NSAConfig())

    peaks = []
    for seq_len in (8192, 16384, 32768):
        tensors = inputs(16, seq_len, (64, 64), torch.bfloat16, NSAConfig(), batch=1)
        compiled = torch.compile(run, fullgraph=True, dynamic=False)
        torch.autograd.grad(compiled(*tensors).sum(), tensors)  # compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(compiled(*tensors).sum(), tensors)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert all(log2(after / before) <= 1.05 for before, after in pairwise(peaks))


def test_a_training_step_waits_for_the_device_once() -> None:
    text = torch.randint(256, (4000,), dtype=torch.uint8)
    nsa = replace(SMALL, index_heads=2, index_block_size=8, index_stride=8)
    model = DecoderLM(DecoderConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, nsa=nsa))
    trainer = Trainer(model.cuda(), Corpus(text, text), TrainConfig(batch_size=2, seq_len=500, grad_accumulation=2))
    trainer.train_step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in told if "synchronizing" in str(each.message)]) == 1
