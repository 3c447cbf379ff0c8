"""Other implementations are called in their own layouts, and compared in ours; each fails alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.recording import Recording
from benchmarks.harness.session import Session
from benchmarks.harness.setting import Setting
from benchmarks.peers import ours, table, trial
from benchmarks.peers.problem import Adapter, Problem
from flexnsa import NSAConfig, selected_attention

SETTING = Setting(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    config=NSAConfig(num_selected_blocks=4),
    dtype=torch.float32,
    device="cpu",
    impl="reference",
    backend=None,
)
LENGTH = 400


def by_formula(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    """The selected branch, its tensors ``(S, H, D)`` and its blocks ``(Hkv, S, n)``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return selected_attention(q, k, v, blocks[None], config=SETTING.config, impl="reference")[0][0].transpose(0, 1)


def fla(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, count: int, size: int, scale: float, ends: None) -> Tensor:
    assert (count, size, scale, ends) == (4, 64, 8**-0.5, None)
    return by_formula(q[0], k[0], v[0], blocks[0].transpose(0, 1))[None]


def sparse(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int, ends: Tensor, scale: None) -> Tensor:
    assert (size, ends.tolist(), ends.dtype, scale) == (64, [0, LENGTH], torch.int32, None)
    return by_formula(q, k, v, blocks)


def select_attn(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    assert (blocks >= 0).all()
    assert blocks.max() == -(-LENGTH // 64)  # padding: behind the last block
    return by_formula(q, k, v, blocks.masked_fill(blocks == blocks.max(), -1))


HELPER = SimpleNamespace(set_hyperparameters=lambda *sizes: None, init_cu_seqlens=lambda ends: None)  # noqa: ARG005
PACKAGES: dict[str, dict[str, dict[str, Any]]] = {
    "fla": {"fla.ops.nsa.parallel": {"ParallelNSAFunction": SimpleNamespace(apply=fla)}},
    "native-sparse-attention-triton": {"native_sparse_attention.ops": {"topk_sparse_attention": sparse}},
    "Scalable-Flash-NSA": {
        "flash_nsa.utils": {"NSAHelper": HELPER},
        "flash_nsa.ops.select_attn": {"select_attn": select_attn},
    },
}


@pytest.mark.parametrize("name", table.PEERS)
def test_a_peer_that_follows_the_formula_in_its_own_layout_differs_in_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, contents in PACKAGES[name].items():
        stub = ModuleType(module)
        vars(stub).update(contents)
        monkeypatch.setitem(sys.modules, module, stub)
    errors = trial.difference(table.PEERS[name].selected, Problem.draw(SETTING, LENGTH))
    assert set(errors) == {"out", "dq", "dk", "dv"}
    assert max(errors.values()) < 1e-5


def test_what_is_wrong_shows_in_its_own_tensor() -> None:
    def tenth_more(problem: Problem) -> Any:
        workload = ours.selected(problem)
        backward = workload.backward
        changed = SimpleNamespace(forward=workload.forward)
        changed.backward = lambda out, upstream: tuple(
            1.1 * g if i == 1 else g for i, g in enumerate(backward(out, upstream))
        )
        return changed

    errors = trial.difference(tenth_more, Problem.draw(SETTING, LENGTH))
    assert errors.pop("dk") == pytest.approx(0.1, rel=1e-4)
    assert max(errors.values()) == 0


def test_a_trial_tells_how_far_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_only(problem: Problem) -> Any:
        if problem.length > 100:
            raise ValueError("too long")
        return ours.selected(problem)

    monkeypatch.setitem(table.TABLE["whole"], "short", short_only)
    result = trial.attempt(print, SETTING, "whole", "short", [200, 64, 100], 60.0)
    assert result["passed"] == [64, 100]
    assert result["label"] == "ValueError: too long"


@pytest.mark.parametrize("make", [ours.three_branches, ours.without_window(), ours.without_window(table.SAME_SIZES)])
def test_ours_gives_every_input_a_gradient(make: Adapter) -> None:
    setting = replace(SETTING, impl="sdpa")
    workload = make(Problem.draw(setting, LENGTH))
    gradients = workload.backward(workload.forward())
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)


def test_every_implementation_says_what_sets_it_apart() -> None:
    names: set[str] = set().union(*map(set, table.TABLE.values()))
    assert names == set(table.DIFFERENCES)


def test_a_point_tells_what_an_error_was_raised_from() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("deadlock detected\nby a lock")
        except RuntimeError as error:
            raise ValueError("a fake call failed") from error

    point: dict[str, Any] = {}
    assert Session(SETTING, Recording(None, ""), 60).attempt(point, fail) is None
    assert point["label"] == "ValueError: a fake call failed from RuntimeError: deadlock detected"
