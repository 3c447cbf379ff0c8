"""The layer: shapes, precision, initialisation, and the parts that it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.harness.memory import saved_for_backward
from flexnsa import NativeSparseAttention
from flexnsa.config import BRANCHES
from flexnsa.layers import projection
from flexnsa.layers.gating import Gate
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.projection import project_together
from flexnsa.layers.rope import apply_rope, rope_tables
from tests.support.inputs import SMALL


def layer(**options: object) -> NativeSparseAttention:
    return NativeSparseAttention(32, 4, 2, 8, **{"config": SMALL, "v_head_dim": 12, **options})  # pyright: ignore[reportArgumentType]


class TestLayer:
    @pytest.mark.parametrize("seq_len", [1, 7, 8, 25, 77])
    @pytest.mark.parametrize("impl", ["reference", "sdpa"])
    def test_shape_and_finite_gradients_at_every_length(self, impl: str, seq_len: int) -> None:
        attention = layer(impl=impl)
        out = attention(torch.randn(2, seq_len, 32))
        assert out.shape == (2, seq_len, 32)
        out.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())

    @pytest.mark.parametrize("impl", ["reference", "sdpa"])
    @pytest.mark.parametrize("compression", ["mean", "linear", "mlp"])
    def test_is_causal(self, impl: str, compression: str) -> None:
        attention = layer(impl=impl, compression=compression).double()
        x = torch.randn(1, 77, 32, dtype=torch.float64)
        before = attention(x)
        for t in (0, 8, 40, 76):
            changed = x.clone()
            changed[:, t] += 1.0
            difference = (attention(changed) - before).abs().amax((0, 2))
            assert (difference[:t] < 1e-12).all()
            assert difference[t] > 1e-6

    def test_implementations_agree(self) -> None:
        attention = layer().double()
        x = torch.randn(2, 100, 32, dtype=torch.float64)
        results = []
        for attention.impl in ("reference", "sdpa"):
            out = attention(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(attention.parameters()))])
        torch.testing.assert_close(results[0], results[1])

    def test_a_layout_of_other_tokens_or_rows_is_refused_by_name(self) -> None:
        attention, x = layer(), torch.randn(2, 20, 32)
        expected = r"layout: expected 20 tokens in 2 rows, as x has, got"
        ids = torch.zeros(3, 20, dtype=torch.int64)
        for other, got in {
            attention.layout(19): "19 tokens in 1 rows",
            attention.layout(20, ids): "20 tokens in 3 rows",
        }.items():
            with pytest.raises(ValueError, match=f"^{expected} {got}"):
                attention(x, layout=other)
        torch.testing.assert_close(attention(x, layout=attention.layout(20)), attention(x))
        torch.testing.assert_close(attention(x, layout=attention.layout(20, ids[:2])), attention(x))

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
        names = set(layer().state_dict())
        assert {f"w_{x}_{tag}.weight" for x in "kv" for tag in ("cmp", "slc", "win")} <= names
        assert {"w_q.weight", "w_o.weight"} <= names
        assert all(name.split(".")[0] in {"w_q", "w_o", "gate", "phi_k", "phi_v"} or "_" in name for name in names)

    def test_state_dict_round_trip(self) -> None:
        one, other = layer(), layer()
        x = torch.randn(1, 40, 32)
        assert not torch.equal(one(x), other(x))
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(x), other(x))

    def test_meta_device_then_reset_parameters(self) -> None:
        with torch.device("meta"):
            attention = layer()
        attention.to_empty(device="cpu")
        for parameter in attention.parameters():
            nn.init.constant_(parameter, torch.nan)
        attention.reset_parameters()
        fresh = dict(layer().named_parameters())
        for name, parameter in attention.named_parameters():
            assert parameter.std().item() == pytest.approx(fresh[name].std().item(), rel=0.5), name
        assert attention(torch.randn(1, 40, 32)).isfinite().all()

    def test_seeded_initialisation_is_repeatable(self) -> None:
        def weights() -> list[torch.Tensor]:
            torch.manual_seed(3)
            return list(layer().parameters())

        assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Turn heads at these positions, in the precision that a layer takes."""
    return apply_rope(x, rope_tables(positions, x.shape[-1], base, dtype=torch.promote_types(x.dtype, torch.float32)))


class TestRotate:
    def test_position_0_turns_nothing(self) -> None:
        x = torch.randn(1, 2, 5, 8)
        torch.testing.assert_close(rotate(x, torch.zeros(5, dtype=torch.int64)), x)

    def test_keeps_lengths_and_dtype(self) -> None:
        x = torch.randn(1, 2, 50, 8).bfloat16()
        turned = rotate(x, torch.arange(50))
        assert turned.dtype == torch.bfloat16
        torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=0.02, atol=0)

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

        def score(at: int, distance: int) -> torch.Tensor:
            return (rotate(q, torch.tensor([at + distance])) * rotate(k, torch.tensor([at]))).sum()

        torch.testing.assert_close(score(1_000_000, 3), score(0, 3), rtol=0, atol=2e-5)
        assert not torch.allclose(score(0, 3), score(0, 4), rtol=0, atol=1e-3)

    def test_heads_and_batches_are_turned_alike(self) -> None:
        x = torch.randn(1, 1, 9, 8).expand(3, 4, 9, 8)
        turned = rotate(x, torch.arange(9))
        assert torch.equal(turned, turned[:1, :1].expand_as(turned))

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

    def together(x: torch.Tensor, linears: list[nn.Linear]) -> list[torch.Tensor]:
        return project_together(x, [linear.weight for linear in linears])

    monkeypatch.setattr(projection, "ROW_MULTIPLE", 1)
    kept: list[int] = []
    for project in (projection.project, together):
        monkeypatch.setattr(projection, "project", project)
        with saved_for_backward(list(layer.parameters())) as saved:
            layer(x)
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

    def test_softmax_shares_sum_to_one(self) -> None:
        gates = Gate(16, 4, BRANCHES, kind="softmax")(torch.randn(2, 9, 16))
        torch.testing.assert_close(sum(gates.values()), torch.ones(2, 4, 9))

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
