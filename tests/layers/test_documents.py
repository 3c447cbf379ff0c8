"""Packed documents are as if each stood alone: whatever their lengths, forward and every gradient."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSAConfig, compressed_attention, sliding_window_attention
from flexnsa.attention import reference
from flexnsa.attention.dispatch import IMPLEMENTATIONS
from flexnsa.attention.interface import Call
from tests.support.comparison import assert_as_exact_as_plain, largest
from tests.support.inputs import SMALL

PACKS = 32
SHARES = 8
"""Parts that the packs are tested in, so that several processes can share them."""


def random_pack(seed: int, longest: int = 900, most: int = 1000) -> tuple[int, ...]:
    """Lengths from 1 to ``longest``, short ones as likely as long ones, at most ``most`` tokens together."""
    draws = random.Random(seed)
    lengths = [round(longest ** draws.random())]
    while draws.random() < 0.8 and sum(lengths) + (following := round(longest ** draws.random())) <= most:
        lengths.append(following)
    return tuple(lengths)


def ids_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


class Choices:
    """The blocks that documents chose alone, handed to the pack as well.

    Two blocks may be worth the same but for rounding, which differs between a pack and a document; then the choice is
    free. What the pack chose itself must be worth the same.
    """

    def __init__(self, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._select = IMPLEMENTATIONS[impl].select
        self._alone: list[Tensor] = []
        self.packed = False
        monkeypatch.setitem(IMPLEMENTATIONS, impl, replace(IMPLEMENTATIONS[impl], select=self.select))

    def alone(self, layer: NativeSparseAttention, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Let the documents choose, one by one; give what the layer makes of them."""
        out = torch.cat([layer(document) for document in x.split(lengths, dim=1)], dim=1)
        self.packed = True
        return out

    def select(self, q: Tensor, k_cmp: Tensor, call: Call, lse: Tensor | None, importance: Tensor | None) -> Tensor:
        own = self._select(q, k_cmp, call, lse, importance)
        if not self.packed:
            self._alone.append(own)
            return own
        alone = torch.cat(self._alone, dim=2)
        if not torch.equal(own, alone):
            num_blocks = int(torch.maximum(own, alone).max()) + 1
            scores = reference.block_importance(q.double(), k_cmp.double(), call, num_blocks=num_blocks)
            worth = [scores.gather(-1, x.clamp_min(0).long()).masked_fill(x < 0, 0.0).sum(-1) for x in (own, alone)]
            torch.testing.assert_close(*worth, rtol=1e-6, atol=0)
        return alone


def make_layer(impl: str, config: NSAConfig = SMALL, **options: Any) -> NativeSparseAttention:
    return NativeSparseAttention(16, 2, 1, 8, config=config, impl=impl, **options)


def packed_and_alone(
    layer: NativeSparseAttention, x: Tensor, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Outputs of the pack, and of its documents one by one."""
    with monkeypatch.context() as patch:
        choices = Choices(layer.impl, patch)
        alone = choices.alone(layer, x, lengths)
        return layer(x, document_ids=ids_of(lengths)), alone


def gradients(out: Tensor, x: Tensor, layer: NativeSparseAttention, seed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    of_x, *of_parameters = torch.autograd.grad(out, (x, *parameters), seed, materialize_grads=True)
    return of_x, dict(zip(names, of_parameters, strict=True))


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_packed_equals_separate(impl: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of parameters are sums over tokens, some of which cancel: their errors compare with the largest.

    In which order a product adds up a thousand tokens is up to the CPU. Where that differs by more than 1e-6, the pack
    must be as exact as its documents are.
    """
    layer = make_layer(impl)
    for seed in range(share, PACKS, SHARES):
        lengths = random_pack(seed)
        x = torch.randn(1, sum(lengths), 16, requires_grad=True)
        packed, alone = packed_and_alone(layer, x, lengths, monkeypatch)
        assert largest(packed - alone) <= 1e-6 * largest(alone), lengths
        weight = torch.randn_like(packed)
        (x_packed, packed_grads), (x_alone, alone_grads) = (gradients(y, x, layer, weight) for y in (packed, alone))
        assert largest(x_packed - x_alone) <= 1e-6 * largest(x_alone), lengths
        most = max(map(largest, alone_grads.values()))
        if max(largest(grad - alone_grads[name]) for name, grad in packed_grads.items()) > 1e-6 * most:
            exact_layer, x_exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
            exact, _ = packed_and_alone(exact_layer, x_exact, lengths, monkeypatch)
            _, exact_grads = gradients(exact, x_exact, exact_layer, weight.double())
            assert_as_exact_as_plain(packed_grads, alone_grads, exact_grads, factor=3)


@pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_packed_equals_separate_in_float64(impl: str, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(impl, compression=compression).double()
    for seed in range(5):
        lengths = random_pack(seed, longest=200, most=400)
        x = torch.randn(1, sum(lengths), 16, dtype=torch.float64, requires_grad=True)
        packed, alone = packed_and_alone(layer, x, lengths, monkeypatch)
        weight = torch.randn_like(packed)
        (x_packed, packed_grads), (x_alone, alone_grads) = (gradients(y, x, layer, weight) for y in (packed, alone))
        got = {"out": packed, "x": x_packed, **packed_grads}
        for name, want in {"out": alone, "x": x_alone, **alone_grads}.items():
            assert largest(got[name] - want) <= 1e-11 * largest(want), (name, lengths)


def test_documents_change_from_step_to_step_without_a_recompile() -> None:
    layer = make_layer("sdpa")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(5):
        lengths = random_pack(seed, longest=100, most=149)
        ids = ids_of((*lengths, 150 - sum(lengths)))
        x = torch.randn(1, 150, 16)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            grads = torch.autograd.grad(compiled(x, document_ids=ids).square().sum(), list(layer.parameters()))
        eager = torch.autograd.grad(layer(x, document_ids=ids).square().sum(), list(layer.parameters()))
        torch.testing.assert_close(grads, eager)


TINY = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=3, window_size=5)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_documents_shorter_than_any_block_give_nothing_but_numbers(impl: str) -> None:
    """Hundreds of rows of documents shorter than ``d``, ``l`` and ``l'``, the shortest ones first."""
    layer = make_layer(impl, config=TINY)
    for seed in range(TINY.compress_block_size):
        draws = random.Random(seed)
        longest = 1 + seed % TINY.compress_block_size
        rows = [[draws.randint(1, longest) for _ in range(24)] for _ in range(50)]
        ids = torch.cat([ids_of(tuple(row))[:, :24] for row in rows])
        x = torch.randn(50, 24, 16, requires_grad=True)
        out = layer(x, document_ids=ids)
        grads = torch.autograd.grad(out.sum(), (x, *layer.parameters()), materialize_grads=True)
        assert all(y.isfinite().all() for y in (out, *grads))
        if longest < TINY.compress_block_size:  # no compressed token anywhere
            named = zip((name for name, _ in layer.named_parameters()), grads[1:], strict=True)
            assert all((grad == 0).all() for name, grad in named if "cmp" in name or "phi" in name)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_where_no_compressed_token_is_complete_output_and_gradients_are_zero(impl: str) -> None:
    lengths = (1, 7, 8, 3, 20)
    q, k_cmp, v_cmp = (torch.randn(1, 2, length, 8, requires_grad=True) for length in (39, 8, 8))
    out, lse = compressed_attention(q, k_cmp, v_cmp, config=SMALL, document_ids=ids_of(lengths), impl=impl)
    own = torch.cat([torch.arange(length) for length in lengths])
    empty = own < SMALL.compress_block_size - 1
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -torch.inf).all()
    assert lse[:, :, ~empty].isfinite().all()
    grad_q, grad_k, grad_v = torch.autograd.grad(out.sum(), (q, k_cmp, v_cmp))
    assert (grad_q[:, :, empty] == 0).all()
    used = 1 + 4  # of the document of 8 tokens, and of that of 20
    assert all((grad[:, :, used:] == 0).all() for grad in (grad_k, grad_v))
    assert all(grad.isfinite().all() for grad in (grad_q, grad_k, grad_v))


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_no_gradient_crosses_a_boundary(impl: str) -> None:
    lengths = (40, 1, 70, 9)
    layer = make_layer(impl)
    x = torch.randn(1, sum(lengths), 16, requires_grad=True)
    for number, out in enumerate(layer(x, document_ids=ids_of(lengths)).split(lengths, dim=1)):
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        felt = [bool((part != 0).any()) for part in grad.split(lengths, dim=1)]
        assert felt == [other == number for other in range(len(lengths))]


def test_only_changes_of_the_id_matter() -> None:
    layer, x, ids = make_layer("sdpa"), torch.randn(2, 60, 16), ids_of((9, 31, 20)).expand(2, -1)
    out = layer(x, document_ids=ids)
    assert torch.equal(layer(x, document_ids=(7 * ids - 3).int()), out)
    torch.testing.assert_close(layer(x[:1], document_ids=ids[:1]), out[:1])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 0, 1, 2]], r"expected shape \(1, 5\), got \(1, 4\)"),
        ([0, 0, 1, 1, 2], r"expected shape \(1, 5\), got \(5,\)"),
        ([[0.0, 0.0, 1.0, 1.0, 2.0]], r"expected dtype torch.int32 or torch.int64, got torch.float32"),
        ([[0, 0, 2, 1, 2]], r"expected ids that never decrease, got 2 before 1 at \[0, 2\]"),
    ],
)
def test_wrong_document_ids_are_named(ids: list[Any], message: str) -> None:
    x = torch.randn(1, 5, 16)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match="^document_ids: " + message):
        make_layer("sdpa")(x, document_ids=torch.tensor(ids))
    with pytest.raises(ValueError, match="^document_ids: " + message):
        sliding_window_attention(q, k, k, config=SMALL, document_ids=torch.tensor(ids))
