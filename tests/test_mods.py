"""Ready-made mods, alone and chained: outputs and gradients of the oracle, which adds what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C import _functionalization  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import and_masks

from flexnsa import (
    NativeSparseAttention,
    NSAConfig,
    compressed_attention,
    mods,
    native_sparse_attention,
    selected_attention,
    sliding_window_attention,
)
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.decoding import mods_of_heads
from tests.support.inputs import SMALL, Inputs, attend, attend_with_aux, make_inputs

LENGTHS = (37, 1, 5, 70, 40, 7)
DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
SEQ_LEN = sum(LENGTHS)
HEADS = 4

Mods = dict[str, Any]
Make = Callable[[nn.Parameter], Mods]

HELPERS: dict[str, Make] = {
    "soft_cap": lambda _: {"score_mod": mods.soft_cap(2.0)},
    "alibi": lambda p: {"score_mod": mods.alibi(p[:, 0].exp())},
    "distance_bias": lambda p: {"score_mod": mods.distance_bias(p)},
    "prefix_lm": lambda _: {"mask_mod": mods.prefix_lm(5, 9)},
    "banned_span": lambda _: {"mask_mod": mods.banned_span(0, 30)},
    "all of them": lambda p: {
        "score_mod": mods.chain(mods.soft_cap(2.0), mods.distance_bias(p)),
        "mask_mod": and_masks(mods.prefix_lm(5, 30), mods.banned_span(3, 9)),
    },
}
"""Each made from a parameter ``(heads, 9)``, which some use."""


BRANCH = {"cmp": compressed_attention, "slc": selected_attention, "win": sliding_window_attention}


def parameter(dtype: torch.dtype) -> nn.Parameter:
    values = torch.randn(HEADS, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return nn.Parameter(values.to(dtype))


def run(make: Make, inputs: Inputs, dtype: torch.dtype, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs and all gradients, the mod's parameter included, and the selected blocks."""
    leaves, captured = inputs.to(dtype), parameter(dtype)
    out, aux = attend_with_aux(leaves, **make(captured), **options)
    out.square().sum().backward()
    results = {name: x.grad for name, x in leaves.named().items()} | {"out": out.detach()}
    if captured.grad is not None:
        results["captured"] = captured.grad
    assert aux.block_indices is not None
    return results, aux.block_indices


def summed_magnitudes(make: Make, inputs: Inputs, **options: Any) -> Tensor:
    """Sum the magnitudes of what queries add to a parameter's gradient: they cancel, their rounding does not."""
    captured = parameter(torch.float64)
    out, _ = attend_with_aux(inputs.to(torch.float64), **make(captured), **options)
    losses = out.square().sum((0, 1, 3))
    added = [torch.autograd.grad(loss, captured, retain_graph=True)[0].abs() for loss in losses]
    return torch.stack(added).sum(0)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("name", HELPERS)
def test_sdpa_matches_the_oracle(name: str, documents: Tensor | None) -> None:
    inputs = make_inputs(SEQ_LEN, batch=2)
    documents = documents if documents is None else documents.expand(2, -1)
    exact, blocks = run(HELPERS[name], inputs, torch.float64, impl="reference", document_ids=documents)
    again, same_blocks = run(HELPERS[name], inputs, torch.float64, impl="sdpa", document_ids=documents)
    assert torch.equal(blocks, same_blocks)
    assert again.keys() == exact.keys()
    for key, value in again.items():
        torch.testing.assert_close(value, exact[key], rtol=1e-9, atol=1e-9, msg=key)

    blocks_of = {"block_indices": blocks, "document_ids": documents}  # rounding may choose others
    got, _ = run(HELPERS[name], inputs, torch.float32, impl="sdpa", **blocks_of)
    plain, _ = run(HELPERS[name], inputs, torch.float32, impl="reference", **blocks_of)
    assert_as_exact_as_plain(got, plain, exact, factor=3)


def test_flex_in_one_graph_matches_the_oracle() -> None:
    torch._dynamo.reset()
    inputs = make_inputs(SEQ_LEN)
    options = {**HELPERS["all of them"](parameter(torch.float32)), "document_ids": DOCUMENTS}
    with torch.no_grad():
        exact = attend(inputs, impl="reference", **options)
        tensors = inputs.to(torch.float32).named()
        got = torch.compile(native_sparse_attention, fullgraph=True)(**tensors, config=SMALL, impl="flex", **options)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-6)


def test_the_oracle_adds_what_the_formula_says() -> None:
    """The window branch, wide open, is dense attention: here with each helper's matrix written out."""
    inputs, captured = make_inputs(20, group=2), parameter(torch.float64).detach()
    wide = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, window_size=20)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    scores = inputs.q @ inputs.k.repeat_interleave(2, 1).mT * 16**-0.5
    hidden = torch.zeros(20, 20, dtype=torch.bool)
    hidden[:, 5:11] = distance[:, 5:11] >= 3
    formulas = {
        "soft_cap": 2 * (scores / 2).tanh(),
        "alibi": scores - captured[:, 0].exp()[:, None, None] * distance,
        "distance_bias": scores + torch.stack([captured[h][distance.clamp(0, 8)] for h in range(HEADS)]),
        "prefix_lm": scores.masked_fill((distance >= 9) & (torch.arange(20) >= 5), -torch.inf),
    }
    for name, formula in formulas.items():
        visible = formula.masked_fill(distance < 0, -torch.inf)
        expected = visible.softmax(-1) @ inputs.v.repeat_interleave(2, 1)
        out, lse = sliding_window_attention(
            inputs.q, inputs.k, inputs.v, config=wide, impl="reference", **HELPERS[name](nn.Parameter(captured))
        )
        torch.testing.assert_close(out, expected, msg=name)
        torch.testing.assert_close(lse, visible.logsumexp(-1), msg=name)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
def test_lse_and_its_gradient_know_the_mod(documents: Tensor | None) -> None:
    """-inf for a row whose keys are all banned, and a gradient from lse alone."""
    inputs, blocks = make_inputs(SEQ_LEN), torch.zeros(1, 2, SEQ_LEN, 4, dtype=torch.int32)
    blocks[..., 1:] = -1
    options: Mods = {"config": SMALL, "document_ids": documents, "mask_mod": mods.banned_span(0, 12)}
    for branch in ("cmp", "slc", "win"):
        results = {}
        for impl in ("reference", "sdpa"):
            x, captured = inputs.to(torch.float64), parameter(torch.float64)
            tensors = {"cmp": (x.q, x.k_cmp, x.v_cmp), "slc": (x.q, x.k, x.v, blocks), "win": (x.q, x.k_win, x.v_win)}
            _, lse = BRANCH[branch](*tensors[branch], **options, score_mod=mods.distance_bias(captured), impl=impl)
            assert lse is not None
            assert (lse == -torch.inf).any()
            seen = lse.masked_fill(lse == -torch.inf, 0.0)
            gradients = torch.autograd.grad(seen.square().sum(), (*tensors[branch][:2], captured))
            results[impl] = (lse, *gradients)
        for got, exact in zip(results["sdpa"], results["reference"], strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9, msg=branch)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    torch.testing.assert_close(mods.alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_decoding_with_mods_equals_the_whole_sequence(impl: str) -> None:
    """Steps of FlexAttention have mods in tests/cache/test_compiled_steps.py."""
    layer = NativeSparseAttention(32, HEADS, 2, 16, config=SMALL, impl=impl).requires_grad_(False)
    x, options = torch.randn(2, 90, 32), mods_of_heads(HEADS)
    cache = layer.new_cache(2, 90)
    parts = [layer(part, cache=cache, **options) for part in x.split([50, *[1] * 38, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, **options), rtol=1e-5, atol=1e-5)


def test_a_new_closure_or_other_documents_do_not_recompile() -> None:
    torch._dynamo.reset()
    inputs = make_inputs(SEQ_LEN).to(torch.float32)
    tensors = {name: x.detach() for name, x in inputs.named().items()}
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(tensors: dict[str, Tensor], ids: Tensor, score_mod: Any, mask_mod: Any) -> Any:
        options: Mods = {"document_ids": ids, "score_mod": score_mod, "mask_mod": mask_mod}
        return native_sparse_attention(**tensors, config=SMALL, impl="flex", **options)

    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            bias = torch.randn(HEADS, 9, generator=torch.Generator().manual_seed(seed))
            ids = torch.randint(0, 2, (1, SEQ_LEN)).cumsum(1)
            score_mod = mods.chain(mods.soft_cap(torch.tensor(2.0 + seed)), mods.distance_bias(bias))
            step(tensors, ids, score_mod, mods.banned_span(0, 4))
    assert counter.frame_count == 1
    for cap in (2.0, 3.0, 4.0, 3.0):  # a number is a constant
        step(tensors, DOCUMENTS, mods.soft_cap(cap), None)
    assert counter.frame_count == 4


def test_graphs_that_end_at_a_mod_return_no_views_that_a_cache_on_disk_damages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are two views of a product: ``tests/compatibility/inductor_faults.py``."""
    seen, views_of = list[Any](), _functionalization.get_view_meta_sequence
    monkeypatch.setattr(_functionalization, views_of.__name__, lambda x: seen.extend(views := views_of(x)) or views)
    layer, cap = NativeSparseAttention(32, HEADS, 2, 16, impl="sdpa"), mods.soft_cap(2.0)
    twice, modded = lambda x: ((y := layer.w_q(x)).mT, y[0]), lambda x: layer(x, score_mod=cap)
    for function, is_damaged in ((twice, True), (modded, False)):
        seen.clear()
        torch.compile(function, backend="aot_eager")(torch.randn(1, 100, 32))
        assert is_damaged == any(type(view).__name__ == "_unsafe_view_ViewMeta" for view in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", HELPERS)
def test_on_a_gpu_output_and_every_gradient_match_the_oracle(name: str, packed: bool) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(SEQ_LEN, group=2)
    inputs = Inputs(**{key: x.cuda() for key, x in inputs.named().items()})
    documents = DOCUMENTS.cuda() if packed else None

    def make(p: nn.Parameter) -> Mods:
        return HELPERS[name](cast("nn.Parameter", p.cuda()))

    def on_gpu(dtype: torch.dtype, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
        return run(make, inputs, dtype, document_ids=documents, **options)

    exact, blocks = on_gpu(torch.float64, impl="reference")
    plain, _ = on_gpu(torch.float32, impl="reference", block_indices=blocks)
    got, _ = on_gpu(torch.float32, impl="flex", block_indices=blocks)
    _, chosen = on_gpu(torch.float32, impl="flex")
    assert (chosen == blocks).all(-1).float().mean() > 0.99
    assert got.keys() == exact.keys()
    scales = {key: x.abs().max() for key, x in exact.items()}
    if "captured" in exact:  # FlexAttention sums it by atomics, in an order that changes from run to run
        options: Mods = {"impl": "reference", "document_ids": documents, "block_indices": blocks}
        scales["captured"] = summed_magnitudes(make, inputs, **options).max()
    for key, value in got.items():
        scale = scales[key]
        limit = 3 * (plain[key] - exact[key]).abs().max() + 12 * torch.finfo(torch.float32).eps * scale
        error = (value - exact[key]).abs().max()
        assert error <= limit, f"{key}: error {error:.2e}, limit {limit:.2e}"
