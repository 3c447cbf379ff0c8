"""Wrong calls and wrong mods, each answered with an error that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexnsa
from flexnsa import (
    LinearCompressor,
    MeanCompressor,
    MLPCompressor,
    NativeSparseAttention,
    NSAConfig,
    block_importance,
    compressed_attention,
    mods,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from flexnsa.attention.dispatch import IMPLEMENTATIONS
from tests.support.inputs import SMALL, attend_with_aux, make_inputs

X = make_inputs(40, batch=2, dtype=torch.float32)  # Hq 4, Hkv 2, D 16, N 9, M 3
DOUBLE = {name: tensor.double() for name, tensor in X.named().items()}
HALF = {name: tensor[:, :, :20] for name, tensor in X.named().items()}


def nsa(**changes: Any) -> Tensor:
    return native_sparse_attention(**{**X.named(), "config": SMALL, **changes})


def blocks(*row: int) -> Tensor:
    return torch.tensor(row, dtype=torch.int32).repeat(2, 2, 40, 1)


def layer(*sizes: Any, **changes: Any) -> NativeSparseAttention:
    return NativeSparseAttention(*(sizes or (32, 4, 2, 8)), **{"config": SMALL, **changes})


BLOCKS = blocks(0, -1, -1, -1)

# (call, error, argument, expected, got): the last three must stand in the message, the argument first.
WRONG_CALLS: list[tuple[Callable[[], object], type[Exception], str, str, str]] = [
    # NSAConfig
    (lambda: NSAConfig(window_size=0), ValueError, "window_size", "at least 1", "0"),
    (lambda: NSAConfig(num_init_blocks=-1), ValueError, "num_init_blocks", "at least 0", "-1"),
    (lambda: NSAConfig(compress_block_size=32.0), TypeError, "compress_block_size", "int", "32.0 (float)"),  # pyright: ignore[reportArgumentType]
    (lambda: NSAConfig(num_local_blocks=True), TypeError, "num_local_blocks", "int", "True (bool)"),
    (lambda: NSAConfig(compress_stride=12), ValueError, "compress_block_size", "multiple of compress_stride=12", "32"),
    (lambda: NSAConfig(select_block_size=40), ValueError, "select_block_size", "multiple of compress_stride=16", "40"),
    (lambda: NSAConfig(num_selected_blocks=2), ValueError, "num_selected_blocks", "1 + 2 = 3", "2"),
    # native_sparse_attention: q, k, v
    (lambda: nsa(q=X.q[0]), ValueError, "q", "(B, Hq, S, Dk)", "(4, 40, 16)"),
    (lambda: nsa(q=X.q.long()), ValueError, "q", "floating", "torch.int64"),
    (lambda: nsa(q=X.q.tolist()), TypeError, "q", "tensor", "list"),
    (lambda: nsa(q=X.q[:, :3], gates=X.gates[:, :3]), ValueError, "k", "divides the 3 of q", "2"),
    (lambda: nsa(k=X.k[:, :0], v=X.v[:, :0]), ValueError, "k", "divides the 4 of q", "0"),
    (lambda: nsa(k=X.k[:1]), ValueError, "k", "(2, Hkv, 40, 16)", "(1, 2, 40, 16)"),
    (lambda: nsa(k=X.k[:, :, :39]), ValueError, "k", "40", "(2, 2, 39, 16)"),
    (lambda: nsa(k=X.k[..., :8]), ValueError, "k", "16", "(2, 2, 40, 8)"),
    (lambda: nsa(k=X.k.double()), ValueError, "k", "torch.float32", "torch.float64"),
    (lambda: nsa(k=X.k.to("meta")), ValueError, "k", "cpu", "meta"),
    (lambda: nsa(v=X.v[:, :1]), ValueError, "v", "(2, 2, 40, Dv)", "(2, 1, 40, 16)"),
    (lambda: nsa(v=X.v.bfloat16()), ValueError, "v", "torch.float32", "torch.bfloat16"),
    (lambda: nsa(v=None), TypeError, "v", "tensor", "None"),
    # gates
    (lambda: nsa(gates=X.gates[..., :2]), ValueError, "gates", "(2, 4, 40, 3)", "(2, 4, 40, 2)"),
    (lambda: nsa(gates=X.gates.transpose(1, 2)), ValueError, "gates", "(2, 4, 40, 3)", "(2, 40, 4, 3)"),
    (lambda: nsa(gates=X.gates > 0.5), ValueError, "gates", "floating", "torch.bool"),
    (lambda: nsa(gates=0.5), TypeError, "gates", "tensor", "0.5 (float)"),
    # the keys of the other branches
    (lambda: nsa(k_cmp=X.k_cmp[:, :, :8]), ValueError, "k_cmp", "(2, 2, 9, 16)", "(2, 2, 8, 16)"),
    (lambda: nsa(k_cmp=None), TypeError, "k_cmp", "tensor", "None"),
    (lambda: nsa(v_cmp=X.v_cmp[:, :, 1:]), ValueError, "v_cmp", "(2, 2, 9, 16)", "(2, 2, 8, 16)"),
    (lambda: nsa(v_cmp=X.v_cmp[..., :4]), ValueError, "v_cmp", "16", "(2, 2, 9, 4)"),
    (lambda: nsa(k_cmp=X.k_cmp[:, :1], v_cmp=X.v_cmp[:, :1]), ValueError, "k_cmp", "2", "(2, 1, 9, 16)"),
    (lambda: nsa(k_win=X.k_win[:, :1]), ValueError, "k_win", "(2, 2, 40, 16)", "(2, 1, 40, 16)"),
    (lambda: nsa(v_win=X.v_win[..., :8]), ValueError, "v_win", "(2, 2, 40, 16)", "(2, 2, 40, 8)"),
    # options
    (lambda: nsa(config={"window_size": 24}), TypeError, "config", "NSAConfig", "dict"),
    (lambda: nsa(scale="1"), TypeError, "scale", "number", "'1' (str)"),
    (lambda: nsa(scale=torch.ones(())), TypeError, "scale", "number", "a tensor ()"),
    (lambda: nsa(scale=float("nan")), ValueError, "scale", "finite", "nan"),
    (lambda: nsa(scale=float("inf")), ValueError, "scale", "finite", "inf"),
    (lambda: nsa(scale=-float("inf")), ValueError, "scale", "finite", "-inf"),
    (lambda: nsa(scale=10**400), ValueError, "scale", "finite", "an int of 1329 bits"),
    (lambda: nsa(return_aux="no"), TypeError, "return_aux", "bool", "'no' (str)"),
    (lambda: nsa(impl="cuda"), ValueError, "impl", "'sdpa'", "'cuda'"),
    (lambda: nsa(branches=()), ValueError, "branches", "win", "()"),
    (lambda: nsa(branches=("win", "sel")), ValueError, "branches", "slc", "('win', 'sel')"),
    (lambda: nsa(branches=("win", "win")), ValueError, "branches", "once", "('win', 'win')"),
    (lambda: nsa(branches="win"), ValueError, "branches", "win", "'win'"),
    (lambda: nsa(branches=None), (TypeError, ValueError), "branches", "win", "None"),
    (lambda: nsa(branches=3), (TypeError, ValueError), "branches", "win", "3"),
    # block_indices
    (lambda: nsa(block_indices=BLOCKS.long()), ValueError, "block_indices", "torch.int32", "torch.int64"),
    (lambda: nsa(block_indices=BLOCKS[..., :3]), ValueError, "block_indices", "(2, 2, 40, 4)", "(2, 2, 40, 3)"),
    (lambda: nsa(block_indices=BLOCKS[:, :1]), ValueError, "block_indices", "(2, 2, 40, 4)", "(2, 1, 40, 4)"),
    (lambda: nsa(block_indices=[0, 1]), TypeError, "block_indices", "tensor", "[0, 1] (list)"),
    (lambda: nsa(block_indices=blocks(0, 3, -1, -1)), ValueError, "block_indices", "below 3", "[0, 3, -1, -1]"),
    (lambda: nsa(block_indices=blocks(0, 1, 2, 1000)), ValueError, "block_indices", "below 3", "[0, 1, 2, 1000]"),
    (lambda: nsa(block_indices=blocks(0, 1, -2, -2)), ValueError, "block_indices", "then -1", "[0, 1, -2, -2]"),
    (lambda: nsa(block_indices=blocks(1, 0, -1, -1)), ValueError, "block_indices", "ascending", "[1, 0, -1, -1]"),
    (lambda: nsa(block_indices=blocks(0, 1, 1, -1)), ValueError, "block_indices", "once", "[0, 1, 1, -1]"),
    (lambda: nsa(block_indices=blocks(0, -1, 1, -1)), ValueError, "block_indices", "then -1", "[0, -1, 1, -1]"),
    (
        lambda: selected_attention(X.q, X.k, X.v, blocks(0, 1, 2, 3), config=SMALL),
        ValueError, "block_indices", "below 3", "[0, 1, 2, 3] at [0, 0, 0]",
    ),
    # the window's keys by the name that they were given by, and what flex cannot take
    (lambda: nsa(k_win=None, v_win=None, k=X.k[:1], branches=["win"]), ValueError, "k", "(2, Hkv, 40, 16)", "(1, 2"),
    (lambda: nsa(**DOUBLE, impl="flex"), ValueError, "q", "float32", "torch.float64"),
    # the branches alone
    (
        lambda: compressed_attention(X.q, X.k_cmp, X.v_cmp[:, :1], config=SMALL),
        ValueError, "v_cmp", "(2, 2, 9, Dv)", "(2, 1, 9, 16)",
    ),
    (
        lambda: compressed_attention(X.q, HALF["k_cmp"][:, :, :4], X.v_cmp, config=SMALL),
        ValueError, "k_cmp", "(2, Hkv, 9, 16)", "(2, 2, 4, 16)",
    ),
    (lambda: select_blocks(X.q, X.k_cmp[:, :, :5], config=SMALL), ValueError, "k_cmp", "9", "(2, 2, 5, 16)"),
    (
        lambda: select_blocks(X.q, X.k_cmp, lse=torch.zeros(2, 2, 40), config=SMALL),
        ValueError, "lse", "(2, 4, 40)", "(2, 2, 40)",
    ),
    (
        lambda: select_blocks(X.q, X.k_cmp, lse=torch.zeros(2, 4, 40).bfloat16(), config=SMALL),
        ValueError, "lse", "torch.float32", "torch.bfloat16",
    ),
    (lambda: block_importance(X.q, X.k_cmp, config=SMALL, seq_len=39), ValueError, "seq_len", "40", "39"),
    (lambda: block_importance(X.q, X.k_cmp, config=SMALL, seq_len=80), ValueError, "k_cmp", "19", "(2, 2, 9, 16)"),
    (lambda: block_importance(X.q, X.k_cmp, config=SMALL, seq_len=40.0), TypeError, "seq_len", "int", "40.0 (float)"),  # pyright: ignore[reportArgumentType]
    (
        lambda: selected_attention(X.q, X.k, X.v, BLOCKS[:, :, :20], config=SMALL),
        ValueError, "block_indices", "(2, 2, 40, 4)", "(2, 2, 20, 4)",
    ),
    (
        lambda: selected_attention(X.q, HALF["k"], HALF["v"], BLOCKS, config=SMALL),
        ValueError, "k", "(2, Hkv, 40, 16)", "(2, 2, 20, 16)",
    ),
    (
        lambda: sliding_window_attention(X.q, X.k, X.v[0], config=SMALL),
        ValueError, "v", "(2, 2, 40, Dv)", "(2, 40, 16)",
    ),
    (lambda: sliding_window_attention(X.q, X.k, X.v, config=24), TypeError, "config", "NSAConfig", "24 (int)"),  # pyright: ignore[reportArgumentType]
    (lambda: sliding_window_attention(X.q, X.k, X.v, config=SMALL, impl="SDPA"), ValueError, "impl", "sdpa", "'SDPA'"),
    # compressors
    (lambda: MeanCompressor(2, 16, config=SMALL)(X.k[:, :1]), ValueError, "x", "(B, 2, S, 16)", "(2, 1, 40, 16)"),
    (lambda: LinearCompressor(2, 16, config=SMALL)(X.k[..., :8]), ValueError, "x", "(B, 2, S, 16)", "(2, 2, 40, 8)"),
    (lambda: MLPCompressor(0, 16, config=SMALL), ValueError, "num_kv_heads", "at least 1", "0"),
    (lambda: MLPCompressor(2, 16.0, config=SMALL), TypeError, "head_dim", "int", "16.0 (float)"),  # pyright: ignore[reportArgumentType]
    (lambda: MLPCompressor(2, 16, config=SMALL, hidden_dim=0), ValueError, "hidden_dim", "at least 1", "0"),
    (lambda: MeanCompressor(2, 16, config=None), TypeError, "config", "NSAConfig", "None"),  # pyright: ignore[reportArgumentType]
    # NativeSparseAttention
    (lambda: layer(32, 4, 3, 8), ValueError, "num_kv_heads", "divisor of num_heads=4", "3"),
    (lambda: layer(0, 4, 2, 8), ValueError, "dim", "at least 1", "0"),
    (lambda: layer(32, 4, 2, 7), ValueError, "head_dim", "even", "7"),
    (lambda: layer(32, 4.0, 2, 8), TypeError, "num_heads", "int", "4.0 (float)"),
    (lambda: layer(v_head_dim=-8), ValueError, "v_head_dim", "at least 1", "-8"),
    (lambda: layer(compression="max"), ValueError, "compression", "'mlp'", "'max'"),
    (lambda: layer(gate="relu"), ValueError, "gate", "sigmoid", "'relu'"),
    (lambda: layer(gate="softmax", branches=("win",)), ValueError, "gate", "sigmoid", "softmax"),
    (lambda: layer(gate="residual", branches=("slc",)), ValueError, "gate", "sigmoid", "residual"),
    (lambda: layer(gate="residual", branches=("cmp", "win")), ValueError, "gate", "without the branch slc", "residual"),
    (lambda: layer(impl="cuda"), ValueError, "impl", "'reference'", "'cuda'"),
    (lambda: layer(branches=("win", "global")), ValueError, "branches", "cmp", "global"),
    (lambda: layer(config=24), TypeError, "config", "NSAConfig", "24 (int)"),
    (lambda: layer(preset="best"), ValueError, "preset", "one of 'text', 'paper'", "'best'"),
    (lambda: layer(rope_base=0), ValueError, "rope_base", "positive", "0"),
    (lambda: layer()(torch.randn(40, 32)), ValueError, "x", "(B, S, 32)", "(40, 32)"),
    (lambda: layer()(torch.randn(1, 40, 31)), ValueError, "x", "(B, S, 32)", "(1, 40, 31)"),
    (lambda: layer()(torch.zeros(1, 40, dtype=torch.int64)), ValueError, "x", "(B, S, 32)", "(1, 40)"),
]  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun before the arguments were checked")

    branches = dict.fromkeys(("compressed", "select", "selected", "window"), fail)
    for impl, implementation in IMPLEMENTATIONS.items():
        monkeypatch.setitem(IMPLEMENTATIONS, impl, replace(implementation, **branches))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("call", "error", "argument", "expected", "got"),
    WRONG_CALLS,
    ids=[f"{number}-{row[2]}" for number, row in enumerate(WRONG_CALLS)],
)
def test_wrong_call(call: Callable[[], object], error: type[Exception], argument: str, expected: str, got: str) -> None:
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected "), message
    asked, _, came = message.partition(", got ")
    assert expected in asked, message
    assert got in came, message


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_right_calls_that_look_unusual_are_answered(impl: str) -> None:
    assert nsa(**DOUBLE, impl=impl).dtype == torch.float64
    assert nsa(gates=X.gates.double(), impl=impl).dtype == torch.float32
    assert nsa(scale=1, impl=impl).shape == (2, 4, 40, 16)
    assert nsa(branches=["win"], k_cmp=None, v_cmp=None, impl=impl).shape == (2, 4, 40, 16)
    assert nsa(branches=["slc"], block_indices=BLOCKS, k_cmp=None, v_cmp=None, impl=impl).shape == (2, 4, 40, 16)


def test_every_public_name_is_described() -> None:
    types = {"MaskMod", "ScoreMod"}  # aliases, which have no docstring
    assert all(getattr(flexnsa, name).__doc__ for name in {*flexnsa.__all__} - types)


def test_wrong_mods_are_named() -> None:
    inputs = make_inputs(40).to(torch.float32)
    captured = torch.randn(3, requires_grad=True)

    def number(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return q_idx - kv_idx

    def score_of(make: Callable[[Tensor], Any]) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q_idx, kv_idx: make(score)}  # noqa: ARG005

    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"score_mod": 3}, TypeError, "score_mod: expected a function, got 3"),
        ({"mask_mod": "causal"}, TypeError, "mask_mod: expected a function"),
        ({"mask_mod": number}, ValueError, "mask_mod: expected it to return torch.bool, got torch.int32"),
        ({"mask_mod": lambda *_: True}, TypeError, "mask_mod: expected it to return a tensor, got True"),
        (score_of(lambda score: score > 0), ValueError, "score_mod: expected it to return a floating dtype"),
        (score_of(lambda score: score + torch.zeros(3)), ValueError, r"score_mod: .* shape \(\), got \(3,\)"),
        ({"mask_mod": lambda score: score > 0}, ValueError, r"mask_mod: .* \(b, h, q_idx, kv_idx\), got TypeError"),
        (
            score_of(lambda score: score if score > 0 else -score),
            ValueError,
            "score_mod: expected .*, got RuntimeError",
        ),
        ({"score_mod": mods.alibi(torch.ones(3))}, ValueError, "score_mod: expected .*, got IndexError"),
        (
            score_of(lambda score: score + captured[0]) | {"impl": "flex"},
            ValueError,
            "score_mod: captures a tensor that requires a gradient",
        ),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            attend_with_aux(inputs, **options)
    with pytest.raises(ValueError, match="stop: expected at least 5, got 4"):
        mods.banned_span(4, 4)
    with pytest.raises(ValueError, match=r"slopes: expected shape \(Hq,\)"):
        mods.alibi(torch.zeros(2, 2))
