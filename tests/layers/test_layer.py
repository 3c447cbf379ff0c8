"""The layer: who sees whom, precision, the parts that it is made of, and mistakes of earlier layers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.memory import saved_for_backward
from flexnsa import NativeSparseAttention
from flexnsa.attention.interface import Implementation, Keys
from flexnsa.config import BRANCHES
from flexnsa.layers import forward, projection
from flexnsa.layers.gating import Gate
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.projection import project_together
from flexnsa.layers.rope import apply_rope, rope_tables
from tests.support.inputs import SMALL


def layer(**options: object) -> NativeSparseAttention:
    return NativeSparseAttention(32, 4, 2, 8, **{"config": SMALL, "v_head_dim": 12, **options})  # pyright: ignore[reportArgumentType]


class TestLayer:
    def test_bf16(self) -> None:
        attention = layer().double()
        x = torch.randn(2, 77, 32).bfloat16()
        exact = attention(x.double())
        low = attention.bfloat16()(x)
        assert low.dtype == torch.bfloat16
        assert (low.double() - exact).square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()

    def test_autocast(self) -> None:
        attention = layer()
        x = torch.randn(2, 77, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in attention.parameters())
        exact = attention(x)
        assert (out.float() - exact).square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()

    def test_state_dict_names_follow_the_paper(self) -> None:
        assert not [x for x in layer(branches=("win",)).state_dict() if "cmp" in x or "slc" in x or "phi" in x]
        names = set(layer().state_dict())
        assert {f"w_{x}_{tag}.weight" for x in "kv" for tag in ("cmp", "slc", "win")} <= names
        assert {"w_q.weight", "w_o.weight"} <= names
        assert all(name.split(".")[0] in {"w_q", "w_o", "gate", "phi_k", "phi_v"} or "_" in name for name in names)


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn heads at these positions, in the precision that a layer takes."""
    return apply_rope(x, rope_tables(positions, x.shape[-1], base, dtype=torch.promote_types(x.dtype, torch.float32)))


class TestRotate:
    def test_pairs_turn_by_their_own_frequency(self) -> None:
        """As complex numbers: pair ``i`` times ``exp(1j * position * base ** (-2i / D))``."""
        x = torch.randn(1, 1, 20, 6, dtype=torch.float64)
        position = torch.arange(20) * 7
        frequency = torch.tensor([100.0 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
        turned = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * position[:, None] * frequency)
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        torch.testing.assert_close(rotate(x, position, base=100.0), expected)

    def test_scores_depend_on_the_distance_alone_even_far_out(self) -> None:
        q, k = torch.randn(2, 1, 1, 1, 64).unbind(0)

        def score(at: int, distance: int) -> Tensor:
            return (rotate(q, torch.tensor([at + distance])) * rotate(k, torch.tensor([at]))).sum()

        torch.testing.assert_close(score(1_000_000, 3), score(0, 3), rtol=0, atol=2e-5)
        assert not torch.allclose(score(0, 3), score(0, 4), rtol=0, atol=1e-3)

    def test_positions_may_differ_in_the_batch(self) -> None:
        x, positions = torch.randn(2, 3, 5, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])
        turned = rotate(x, positions)
        for b in range(2):
            torch.testing.assert_close(turned[b : b + 1], rotate(x[b : b + 1], positions[b]))


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc",), ("cmp",)])
def test_projections_as_one_product_keep_no_more_for_backward(
    branches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = NativeSparseAttention(32, 6, 2, 8, config=SMALL, branches=branches), torch.randn(2, 200, 32)

    def together(x: Tensor, linears: list[nn.Linear]) -> list[Tensor]:
        return project_together(x, [linear.weight for linear in linears])

    monkeypatch.setattr(projection, "ROW_MULTIPLE", 1)
    kept: list[int] = []
    for project in (projection.project, together):
        monkeypatch.setattr(projection, "project", project)
        with saved_for_backward(list(layer.parameters())) as saved:
            _out = layer(x)
        kept.append(saved.total)
    rows = 6 * 8 + len(branches) * (2 * 2 * 8 + 6)  # of the weights, which stand below each other for it
    assert kept[1] <= kept[0] + 4 * rows * 32


class TestGate:
    @pytest.mark.parametrize(
        ("kind", "gated"), [("sigmoid", BRANCHES), ("softmax", BRANCHES), ("residual", ("cmp", "win"))]
    )
    def test_reads_each_token_alone(self, kind: str, gated: tuple[str, ...]) -> None:
        gate = Gate(16, 4, BRANCHES, kind=kind)
        x = torch.randn(2, 9, 16)
        gates, alone = gate(x), gate(x[:, 4:5])
        assert tuple(gates) == gated
        for tag, each in gates.items():
            assert each.shape == (2, 4, 9)
            torch.testing.assert_close(alone[tag], each[:, :, 4:5])
            assert ((each > 0) & (each < 1)).all()
        assert torch.allclose(torch.stack([*gates.values()]).sum(0), torch.ones(2, 4, 9)) == (kind == "softmax")

    def test_residual_gives_the_selected_branch_weight_1(self) -> None:
        attention, x = layer(gate="residual"), torch.randn(1, 60, 32)
        heads = attention.project(x)
        assert heads.gates.keys() == {"cmp", "win"}
        weighted = replace(heads, gates={**heads.gates, "slc": torch.ones(1, 4, 60)})
        want, _ = attention.attend(x, weighted, attention.layout(60), RowKeys(), (None, None), cached=False)
        torch.testing.assert_close(attention(x), attention.w_o(want.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("shape", [(12,), (2, 12)])
def test_a_compiler_foresees_the_rotary_tables(shape: tuple[int, ...]) -> None:
    arguments = (torch.arange(12).expand(shape), 8, 10_000.0, torch.float32)
    torch.library.opcheck(torch.ops.flexnsa.rope_tables.default, arguments, test_utils="test_faketensor")


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
