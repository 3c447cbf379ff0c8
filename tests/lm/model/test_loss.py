"""The loss of a head in chunks: that of all logits at once, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from flexnsa.lm import linear_cross_entropy
from flexnsa.lm.model import loss

Loss = Callable[..., Tensor]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a chunk hold 7 rows of 50 fp32 numbers."""
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", 7 * 4 * 50)


def make(dtype: torch.dtype = torch.float32, *, vocab_size: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 24).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab_size, 24)).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (3, 11))
    return hidden, weight, targets.masked_fill(torch.rand(3, 11) < 0.3, -100)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def results(function: Loss, inputs: tuple[Tensor, Tensor, Tensor], scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Return the loss and the gradients of ``scale`` times it, unscaled."""
    value = function(*inputs, **options)
    return [value, *(grad.double() / scale for grad in torch.autograd.grad(value * scale, inputs[:2]))]


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def assert_as_close(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> None:
    for found, other, want, times in zip(ours, theirs, exact, (2, 3, 3), strict=True):
        rounding = torch.finfo(ours[0].dtype).eps * want.abs().max().item()
        assert error(found, want) <= times * error(other, want) + 4 * rounding


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_is_as_close_to_fp64_as_the_loss_of_all_logits(
    dtype: torch.dtype, reduction: str, autocast: torch.dtype | None
) -> None:
    inputs = make(dtype)
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    exact = results(plain, tuple(x.detach().double().requires_grad_() for x in inputs[:2]) + inputs[2:])  # pyright: ignore
    exact = exact if reduction == "mean" else [x * (inputs[2] >= 0).sum() for x in exact]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        ours, theirs = (results(f, inputs, scale, reduction=reduction) for f in (linear_cross_entropy, plain))
        assert [g.dtype for g in torch.autograd.grad(linear_cross_entropy(*inputs), inputs[:2])] == [dtype, dtype]
    assert ours[0].dtype == torch.promote_types(dtype, torch.float32)
    assert_as_close(ours, theirs, exact)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_the_dtypes_that_linear_takes(
    dtype: torch.dtype, weight_dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    hidden, weight, targets = make()
    inputs = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_(), targets
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        try:
            expected = results(plain, inputs)
        except RuntimeError:  # of another dtype
            with pytest.raises(ValueError, match=f"^weight: expected dtype {dtype}, as hidden has, got {weight_dtype}"):
                linear_cross_entropy(*inputs)
            return
        value = linear_cross_entropy(*inputs)
        grads = torch.autograd.grad(value, inputs[:2])
    coarsest = max(torch.finfo(x).eps for x in (dtype, weight_dtype, autocast or dtype))
    assert value.dtype == expected[0].dtype
    assert [grad.dtype for grad in grads] == [dtype, weight_dtype]
    for got, want in zip((value, *grads), expected, strict=True):
        assert error(got, want.double()) <= 8 * coarsest * want.abs().max().item()


@pytest.mark.parametrize("function", [linear_cross_entropy, lambda h, w, t, **o: loss.cross_entropy(h @ w.mT, t, **o)])
@pytest.mark.parametrize("vocab_size", [0, 50])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4)])
def test_rows_of_any_shape_and_a_vocabulary_of_any_size(
    shape: tuple[int, ...], vocab_size: int, function: Loss
) -> None:
    hidden = torch.randn(*shape, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, 24, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(vocab_size, shape) if vocab_size else torch.full(shape, -100)
    inputs = hidden, weight, targets

    def rows(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return plain(hidden.reshape(1, targets.numel(), 24), weight, targets, **options)

    expected = results(rows, inputs, reduction="sum")
    assert_close(results(function, inputs, reduction="sum"), expected)
    mean, *gradients = results(function, inputs)
    assert mean.isnan() == (vocab_size == 0 or targets.numel() == 0)
    assert_close(gradients, [x / max(1, targets.numel()) for x in expected[1:]])
    with pytest.raises(ValueError, match=r"^targets: expected .*ignore_index.*, got 50"):
        function(hidden.detach().new_zeros(2, 24), weight, torch.tensor([50, -100]))


@pytest.mark.usefixtures("small_chunks")
def test_ignored_rows_count_nowhere() -> None:
    hidden, weight, targets = make()
    kept = targets >= 0
    alone = results(linear_cross_entropy, (hidden, weight, targets))
    compact = results(linear_cross_entropy, (hidden[kept].detach().requires_grad_(), weight, targets[kept]))
    torch.testing.assert_close(alone[0], compact[0])
    torch.testing.assert_close(alone[2], compact[2])
    torch.testing.assert_close(alone[1][kept], compact[1])
    assert alone[1][~kept].abs().max() == 0
    assert linear_cross_entropy(hidden, weight, targets.masked_fill(~kept, 99), ignore_index=99) == alone[0]
    nothing = torch.full_like(targets, -100)
    value, *gradients = results(linear_cross_entropy, (hidden, weight, nothing))
    assert value.isnan()
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)
    assert linear_cross_entropy(hidden, weight, nothing, reduction="sum") == 0


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    inputs = make()
    want = results(plain, inputs)[2 - frozen]
    inputs[frozen].requires_grad_(False)
    linear_cross_entropy(*inputs).backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(inputs[1 - frozen].grad, want.float())


def test_gradient_of_a_multiple_and_a_second_backward_of_the_same_graph() -> None:
    inputs = make()
    value = linear_cross_entropy(*inputs)
    once, thrice = (torch.autograd.grad(c * value, inputs[:2], retain_graph=True) for c in (1, 3))
    torch.testing.assert_close([3 * g for g in once], list(thrice))


def test_double_backward_is_refused_by_name() -> None:
    hidden, weight, targets = make()
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy"):
        torch.autograd.grad(grad.sum(), weight)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole_for_any_number_of_rows(autocast: bool) -> None:
    torch._dynamo.reset()

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear_cross_entropy(hidden, weight, targets)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    hidden, weight, targets = make()
    for rows in (11, 9, 3):
        cut, cut_targets = (
            x.detach()[:, :rows].clone(memory_format=torch.contiguous_format) for x in (hidden, targets)
        )
        inputs = (cut.requires_grad_(), weight, cut_targets)
        with torch._dynamo.config.patch(error_on_recompile=rows < 11):
            torch.testing.assert_close(results(compiled, inputs), results(step, inputs))


def test_operator_is_registered_as_the_compiler_expects() -> None:
    hidden, weight, targets = make()
    rows = (hidden.detach().flatten(0, 1).requires_grad_(), weight, targets.flatten())
    torch.library.opcheck(torch.ops.flexnsa.linear_cross_entropy.default, (*rows, -100, torch.float32, True, True))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_on_a_gpu_it_is_as_close_to_fp64(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """The weight's gradient is summed in fp32 by the product itself there."""
    hidden, weight = (torch.randn(*size, 256, device="cuda").to(dtype).requires_grad_() for size in ((2, 300), (512,)))
    targets = torch.randint(512, (2, 300), device="cuda")
    inputs = (hidden, weight, targets)
    exact = results(
        plain, (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets)
    )
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        ours, theirs = (results(f, inputs) for f in (linear_cross_entropy, plain))
    assert_as_close(ours, theirs, exact)


def test_chunks_fit_the_workspace_and_are_whole_tiles() -> None:
    for vocab_size in (256, 50_257, 131_072, 1 << 20):
        for itemsize, entry in ((2, 2 + 4), (4, 4), (8, 8)):
            rows = loss.rows_at_once(vocab_size, itemsize)
            assert rows % 128 == 0
            assert rows * vocab_size * entry <= loss.WORKSPACE_BYTES < (rows + 128) * vocab_size * entry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, r"^reduction: expected one of 'mean', 'sum', got 'none'"),
        ({"hidden": torch.zeros(3, 11, 23)}, r"^hidden: expected shape \(0, 1, 24\), got \(3, 11, 23\)"),
        ({"weight": torch.zeros(50, 24, 1)}, r"^weight: expected shape \(V, D\)"),
        ({"weight": torch.zeros(50, 24).double()}, r"^weight: expected dtype torch.float32, as hidden has"),
        ({"weight": torch.zeros(50, 24, device="meta")}, r"^weight: expected device cpu, as hidden has, got meta"),
        ({"targets": torch.zeros(3, 10, dtype=torch.int64)}, r"^targets: expected shape \(3, 11\), got \(3, 10\)"),
        ({"targets": torch.zeros(3, 11)}, r"^targets: expected dtype torch.int32 or torch.int64"),
        ({"targets": torch.full((3, 11), 50)}, r"^targets: expected 0 to 49 or ignore_index, got 50"),
        ({"targets": torch.full((3, 11), -1)}, r"^targets: expected 0 to 49 or ignore_index, got -1"),
        ({"ignore_index": "none"}, r"^ignore_index: expected an int, got 'none'"),
        *(
            ({name: value}, rf"^{name}: expected a tensor .*, got ")
            for name in ("hidden", "weight", "targets")
            for value in (None, 3, [1, 2])
        ),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(zip(("hidden", "weight", "targets"), make(), strict=True))
    with pytest.raises(TypeError if "a tensor" in message or "an int" in message else ValueError, match=message):
        linear_cross_entropy(**arguments | change)
