"""Mistakes made in the layers of earlier implementations, each with the test that would have caught it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from flexnsa.attention.interface import Implementation, Keys
from flexnsa.layers import forward
from tests.support.inputs import SMALL


@pytest.mark.parametrize("num_heads", [4, 2])
@pytest.mark.parametrize("branches", [("win",), ("slc",), ("slc", "win")])
def test_rope_turns_each_head_alone(num_heads: int, branches: tuple[str, ...]) -> None:
    """RoPE over the flattened heads of q, but per head of k: scores then depended on more than the distance.

    Tokens further from the start than the window, or in a document that selects everything, must not notice a shift.
    """
    layer = NativeSparseAttention(32, num_heads, 2, 8, config=SMALL, branches=branches, impl="reference").double()
    x = torch.randn(1, 100, 32, dtype=torch.float64)
    if branches == ("win",):
        shifted = layer(torch.cat([torch.randn(1, 19, 32, dtype=torch.float64), x], dim=1))[:, 19:]
        torch.testing.assert_close(shifted[:, 23:], layer(x)[:, 23:])
        assert not torch.allclose(shifted[:, :23], layer(x)[:, :23])
    captured = captured_scores(layer, torch.ones(1, 100, 1, dtype=torch.float64) * x[:, :1])
    for scores in captured.values():
        torch.testing.assert_close(
            scores[..., 1:, 1:], scores[..., :-1, :-1]
        )  # equal tokens: the distance alone counts
        assert not torch.allclose(scores[..., 1:, :], scores[..., :-1, :])  # and it does count


def test_compressed_keys_are_turned_at_their_first_token() -> None:
    """Equal tokens: the score of query ``t`` and compressed key ``i`` depends on ``t - i * d``, nothing else."""
    layer = NativeSparseAttention(32, 4, 2, 8, config=SMALL, branches=("cmp",), impl="reference").double()
    x = torch.randn(1, 1, 32, dtype=torch.float64).expand(1, 100, 32)
    scores = captured_scores(layer, x)["cmp"]
    stride = SMALL.compress_stride
    torch.testing.assert_close(scores[..., stride:, 1:], scores[..., :-stride, :-1])
    assert not torch.allclose(scores[..., 1:, 1:], scores[..., :-1, :-1])
    project, compress = layer.get_submodule("w_k_cmp"), layer.get_submodule("phi_k")
    unturned = compress(project(x).unflatten(-1, (2, 8)).transpose(1, 2))
    torch.testing.assert_close(captured_inputs(layer, x)["k_cmp"][:, :, 0], unturned[:, :, 0])


def captured_inputs(layer: NativeSparseAttention, x: Tensor) -> dict[str, Tensor]:
    """What the layer attends with."""
    captured: dict[str, Tensor] = {}
    attend = forward.attend

    def spy(implementation: Implementation, q: Tensor, keys: Keys, *rest: Any, **options: Any) -> Any:
        captured.update(q=q, **{field.name: getattr(keys, field.name) for field in fields(keys)})
        return attend(implementation, q, keys, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "attend", spy)
        layer(x)
    return captured


def captured_scores(layer: NativeSparseAttention, x: Tensor) -> dict[str, Tensor]:
    """``q.k`` of the layer's branches, ``(B, Hq, S, keys)``."""
    given = captured_inputs(layer, x)
    keys = {"cmp": given["k_cmp"], "slc": given["k_slc"], "win": given["k_win"]}
    return {
        tag: given["q"] @ keys[tag].repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1).mT
        for tag in layer.branches
    }


def test_branches_of_a_layer_have_only_their_own_parameters() -> None:
    names = {n for n, _ in NativeSparseAttention(16, 2, 1, 8, config=SMALL, branches=("win",)).named_parameters()}
    assert not [name for name in names if "cmp" in name or "slc" in name or "phi" in name]


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
@pytest.mark.parametrize(
    ("branches", "gate"),
    [
        (("cmp", "slc", "win"), "sigmoid"),
        (("cmp", "slc", "win"), "softmax"),
        (("cmp", "slc", "win"), "residual"),
        (("slc", "win"), "residual"),
        (("cmp", "slc"), "sigmoid"),
        (("cmp", "win"), "softmax"),
        (("slc", "win"), "sigmoid"),
        (("cmp",), "sigmoid"),
        (("slc",), "sigmoid"),
        (("win",), "sigmoid"),
    ],
)
def test_every_parameter_has_a_gradient_at_the_first_step(
    branches: tuple[str, ...], gate: str, compression: str, impl: str
) -> None:
    """Gates initialised to 0 stopped a layer's gradient, and two key projections had none for months."""
    layer = NativeSparseAttention(
        32, 4, 2, 8, v_head_dim=12, config=SMALL, branches=branches, gate=gate, compression=compression, impl=impl
    )
    layer(torch.randn(2, 77, 32)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
        assert (rows.abs().amax(-1) > 0).all(), f"{name}: rows without a gradient"


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_no_branch_starts_shut(gate: str) -> None:
    layer = NativeSparseAttention(64, 4, 2, 16, config=SMALL, gate=gate)
    gates = torch.stack(list(layer.project(torch.randn(2, 77, 64)).gates.values()), -1)
    assert gates.shape == (2, 4, 77, 3)
    assert gates.min() > 0.1
    assert gates.max() < 0.9
    assert gates.std() > 0  # they read their input
