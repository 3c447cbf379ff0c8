"""Every implementation against the fp64 oracle, forward and every gradient, with tolerances taken from the data.

The oracle is ``impl="reference"`` in fp64. The same formula in the precision of the test says how much error is owed
to the precision alone; twice that is allowed, three times for gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexnsa
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL, Inputs, attend, make_inputs, sizes

IMPLS = ["sdpa"]
PAPER = flexnsa.NSAConfig(num_selected_blocks=6, window_size=200)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Case(NamedTuple):
    """One point of the grid; the lengths stand where something begins: l-1, l, l', w, w+1."""

    seq_len: int
    group: int
    key_dim: int
    value_dim: int
    batch: int = 1
    dtype: torch.dtype = FP32
    kv_heads: int = 2
    config: flexnsa.NSAConfig = SMALL

    def inputs(self) -> Inputs:
        return make_inputs(
            self.seq_len,
            self.config,
            batch=self.batch,
            kv_heads=self.kv_heads,
            group=self.group,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
        )


ALL_BLOCKS = replace(SMALL, num_selected_blocks=64)
GRID = [
    Case(1, 1, 16, 16, batch=2),
    Case(1, 6, 16, 24, dtype=BF16),
    Case(7, 4, 24, 16, batch=3),
    Case(7, 32, 16, 16, dtype=BF16, kv_heads=1),
    Case(8, 2, 32, 16, dtype=BF16),
    Case(8, 6, 16, 32, batch=2),
    Case(16, 1, 16, 16, dtype=BF16, batch=2),
    Case(16, 8, 16, 40),
    Case(24, 6, 16, 16, dtype=BF16),
    Case(24, 16, 24, 24, kv_heads=1),
    Case(25, 32, 16, 8, kv_heads=1),
    Case(25, 2, 8, 16, batch=2, dtype=BF16, config=ALL_BLOCKS),
    Case(77, 4, 16, 24, batch=2),
    Case(77, 1, 32, 16, dtype=BF16),
    Case(77, 16, 16, 16, batch=2, kv_heads=1, dtype=BF16),
    Case(77, 8, 24, 16, config=ALL_BLOCKS),
    Case(77, 6, 16, 16, config=replace(SMALL, compress_block_size=16, select_block_size=8)),
    Case(77, 2, 16, 16, config=replace(SMALL, num_init_blocks=0, num_local_blocks=0, num_selected_blocks=1)),
    Case(77, 4, 16, 16, dtype=FP16),
    Case(603, 4, 64, 32, config=PAPER),
    Case(603, 6, 64, 64, dtype=BF16, config=PAPER),
    Case(521, 6, 16, 24, batch=2, dtype=BF16, kv_heads=1),
    Case(1000, 2, 64, 64, kv_heads=1),
    Case(1000, 1, 16, 16, config=ALL_BLOCKS),
    Case(521, 8, 16, 16, kv_heads=1),
    Case(300, 32, 32, 32, kv_heads=1),
]


def describe(case: Case) -> str:
    config = {SMALL: "small", ALL_BLOCKS: "all-blocks", PAPER: "paper"}.get(case.config, "odd")
    dtype = str(case.dtype).removeprefix("torch.")
    return f"S{case.seq_len}-G{case.group}-D{case.key_dim}x{case.value_dim}-B{case.batch}-{dtype}-{config}"


grid = pytest.mark.parametrize("case", GRID, ids=describe)
impls = pytest.mark.parametrize("impl", IMPLS)


def direction(like: Tensor) -> Tensor:
    """A fixed cotangent, the same in every precision."""
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).bfloat16().to(like.dtype)


def gradients(outputs: list[Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the finite part of the outputs; rows without a key have lse ``-inf`` and no say."""
    loss = torch.stack([(x.where(x.isfinite(), 0.0) * direction(x)).double().sum() for x in outputs]).sum()
    return dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


def exact_blocks(inputs: Inputs, config: flexnsa.NSAConfig) -> Tensor:
    """Blocks selected in fp64, for all precisions: near ties would otherwise compare different attentions."""
    exact = inputs.to(torch.float64)
    return flexnsa.select_blocks(exact.q, exact.k_cmp, config=config, impl="reference")


def outputs_and_gradients(
    branch: str, x: Inputs, blocks: Tensor, config: flexnsa.NSAConfig, impl: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what one branch gives, with its lse, or all of them together, and the gradients that flow through it."""
    options: dict[str, Any] = {"config": config, "impl": impl}
    if branch == "all":
        used, given = x.named(), (attend(x, block_indices=blocks, **options),)
    elif branch == "cmp":
        used = {"q": x.q, "k_cmp": x.k_cmp, "v_cmp": x.v_cmp}
        given = flexnsa.compressed_attention(x.q, x.k_cmp, x.v_cmp, **options)
    elif branch == "slc":
        used = {"q": x.q, "k": x.k, "v": x.v}
        given = flexnsa.selected_attention(x.q, x.k, x.v, blocks, **options)
    else:
        used = {"q": x.q, "k_win": x.k_win, "v_win": x.v_win}
        given = flexnsa.sliding_window_attention(x.q, x.k_win, x.v_win, **options)
    outputs = {name: each for name, each in zip(("out", "lse"), given, strict=False) if each is not None}
    assert len(outputs) == len(given)
    dtypes = {"out": x.q.dtype, "lse": torch.promote_types(x.q.dtype, FP32)}
    assert all(each.dtype == dtypes[name] for name, each in outputs.items())
    return {name: each.detach() for name, each in outputs.items()}, gradients([*outputs.values()], used)


def check(inputs: Inputs, config: flexnsa.NSAConfig, dtype: torch.dtype, impl: str, branch: str = "all") -> None:
    blocks = exact_blocks(inputs, config)
    runs = ((impl, dtype), ("reference", dtype), ("reference", torch.float64))
    results = [outputs_and_gradients(branch, inputs.to(each), blocks, config, name) for name, each in runs]
    outputs, grads = zip(*results, strict=True)
    for name in outputs[0]:
        assert_as_exact_as_plain(*({name: each[name]} for each in outputs), factor=2)
    assert_as_exact_as_plain(*grads, factor=3)


@impls
@grid
@pytest.mark.parametrize("branch", ["all", "cmp", "slc", "win"])
def test_outputs_and_every_gradient(impl: str, case: Case, branch: str) -> None:
    check(case.inputs(), case.config, case.dtype, impl, branch)


@impls
@grid
def test_selection_is_a_best_one(impl: str, case: Case) -> None:
    """What is selected scores as high as the best of the oracle, but for the rounding of fp32 scores.

    Every row is forced and padded like the oracle's; only blocks whose exact scores agree to 1e-5 may be exchanged.
    """
    x = case.inputs().to(torch.float64)
    scores = flexnsa.block_importance(x.q, x.k_cmp, config=case.config).double()
    expected = flexnsa.select_blocks(x.q, x.k_cmp, config=case.config, impl="reference")
    low = case.inputs().to(case.dtype)
    got = flexnsa.select_blocks(low.q, low.k_cmp, config=case.config, impl=impl)

    assert got.dtype == torch.int32
    assert got.shape == expected.shape
    assert torch.equal(got < 0, expected < 0)
    real = got[..., 1:] >= 0
    assert (got[..., 1:] > got[..., :-1])[real].all()
    current = torch.arange(case.seq_len)[:, None] // case.config.select_block_size
    assert (got <= current).all()

    def sorted_scores(blocks: Tensor) -> Tensor:
        return scores.gather(-1, blocks.long().clamp_min(0)).masked_fill(blocks < 0, 0.0).sort(-1).values

    torch.testing.assert_close(sorted_scores(got), sorted_scores(expected), rtol=0, atol=1e-5)
    assert (got == expected).all(-1).float().mean() > 0.99


@impls
def test_gradcheck(impl: str) -> None:
    config = sizes(4, 2, 4, 2, 1, 1, 5)
    x = make_inputs(13, config, kv_heads=1, key_dim=3, value_dim=2).to(torch.float64)
    blocks = exact_blocks(x, config)

    def attention(*tensors: Tensor) -> Tensor:
        return attend(Inputs(*tensors), config=config, block_indices=blocks, impl=impl)

    assert torch.autograd.gradcheck(attention, tuple(x.named().values()))


@impls
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_memory_layout_does_not_matter(impl: str, layout: str) -> None:
    """Modules hand over views: heads split from the last dimension, a key shared by the batch, every other token."""
    x = make_inputs(50, batch=2).to(torch.float64)

    def view(tensor: Tensor) -> Tensor:
        if layout == "transposed":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "expanded":
            return tensor[:1].expand_as(tensor)
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]

    viewed = {name: view(tensor) for name, tensor in x.named().items()}
    dense = {name: tensor.contiguous() for name, tensor in viewed.items()}

    def run(t: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in t.items()}
        out = attend(Inputs(**leaves), impl=impl)
        return out, gradients([out], leaves)

    (out, grads), (expected, expected_grads) = run(viewed), run(dense)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, expected_grads)
