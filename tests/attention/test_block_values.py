"""Numbers that callers give: what block_indices and scale may be, and what wrong ones can do where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import native_sparse_attention, selected_attention
from flexnsa.checks import calls as arguments
from flexnsa.config import BRANCHES
from tests.attention.test_flex import SCALE
from tests.support.flex_tiles import without_compiler
from tests.support.inputs import SMALL, make_inputs

INPUTS = make_inputs(77, batch=2, key_dim=32, dtype=torch.float32)
X: dict[str, Any] = {name: x.detach() for name, x in INPUTS.named().items()}
M = 5  # blocks of 77 tokens
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 40 + [2] * 28, [0] * 50 + [1] * 27])
impls = pytest.mark.parametrize("impl", ["flex", "sdpa", "reference"])
documents = pytest.mark.parametrize("document_ids", [None, DOCUMENTS], ids=["one document", "documents"])


@pytest.fixture(autouse=True, scope="module")
def _traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_compiler(patch)
        yield


def rows(*row: int) -> Tensor:
    return torch.tensor(row, dtype=torch.int32).repeat(2, 2, 77, 1)


def attend(blocks: Tensor, document_ids: Tensor | None, impl: str) -> Tensor:
    options = {"config": SMALL, "scale": SCALE, "document_ids": document_ids, "impl": impl}
    with torch._dynamo.config.patch(assume_static_by_default=False):
        return selected_attention(X["q"], X["k"], X["v"], blocks, **options)[0]


@impls
@documents
def test_blocks_of_the_future_show_nothing(impl: str, document_ids: Tensor | None) -> None:
    """Whether behind the query or, counted from its document's start, behind the whole sequence."""
    out = attend(rows(0, 2, 3, 4), document_ids, impl)
    torch.testing.assert_close(out, attend(rows(0, 2, 3, 4), document_ids, "reference"), rtol=1e-4, atol=1e-5)
    assert torch.equal(out[:, :, :32], attend(rows(0, -1, -1, -1), document_ids, impl)[:, :, :32])


@impls
def test_no_block_gives_zero(impl: str) -> None:
    assert (attend(rows(-1, -1, -1, -1), None, impl) == 0).all()


@impls
@documents
@pytest.mark.parametrize("wrong", [M, 1000, 2**25, 2**27, 2**31 - 1])
def test_unseen_values_beyond_the_sequence_select_nothing(
    monkeypatch: pytest.MonkeyPatch, impl: str, document_ids: Tensor | None, wrong: int
) -> None:
    """As on a device whose values nobody waits for: 2**27 * 16 is -2**31 in 32 bits, which is a token of the past."""
    monkeypatch.setattr(arguments, "may_look", lambda _: False)
    out = attend(rows(0, 1, wrong, wrong), document_ids, impl)
    assert torch.equal(out, attend(rows(0, 1, -1, -1), document_ids, impl))


@impls
@documents
def test_unseen_values_in_no_order_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, impl: str, document_ids: Tensor | None
) -> None:
    monkeypatch.setattr(arguments, "may_look", lambda _: False)
    anything = torch.randint(-(2**31), 2**31 - 1, (2, 2, 77, 4)).int()
    assert attend(anything, document_ids, impl).isfinite().all()
    assert attend(torch.randint(-3, 9, (2, 2, 77, 4)).int(), document_ids, impl).isfinite().all()


SCALES = [(impl, scale, BRANCHES) for impl in ("sdpa", "reference") for scale in (0, -0.3, 1e-30, 40.0)]


@pytest.mark.parametrize(("impl", "scale", "branches"), [*SCALES, ("flex", 0, ("win",))])
def test_any_finite_scale_is_a_scale(impl: str, scale: float, branches: tuple[str, ...]) -> None:
    """Even 0, which is none to Python's ``or``."""
    options: dict[str, Any] = {"config": SMALL, "scale": scale, "branches": branches}
    out, aux = native_sparse_attention(**X, **options, impl=impl, return_aux=True)
    double = {name: x.double() for name, x in X.items()}
    # With large scores, importance below the least fp32 number is a tie, in fp64 it is not.
    double["block_indices"] = aux.block_indices
    expected = native_sparse_attention(**double, **options, impl="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)


def test_scale_0_weighs_all_keys_alike() -> None:
    first = native_sparse_attention(**X, config=SMALL, scale=0.0)
    changed: dict[str, Any] = X | {"q": torch.randn_like(X["q"])}
    other = native_sparse_attention(**changed, config=SMALL, scale=0.0)
    torch.testing.assert_close(first, other)
