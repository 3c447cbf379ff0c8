"""A value that is not finite is named by where it appeared first, and nothing is written after it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flexnsa import NativeSparseAttention
from flexnsa.attention.dispatch import IMPLEMENTATIONS
from flexnsa.lm import Trainer, run
from flexnsa.lm.diagnosis import strict
from flexnsa.lm.diagnosis.non_finite import failing_branch
from flexnsa.lm.model.decoder import DecoderLayer
from flexnsa.lm.parallel import Ranks, joined_ranks
from tests.lm.cli.tiny_run import train, write_text
from tests.parallel.processes import run_together
from tests.parallel.steps import CPU, make_trainer, parameters
from tests.support.inputs import SMALL

NAN_AT = (2, 17)
"""Row of the step and token."""


def spoil(module: nn.Module, is_due: Callable[[], bool], row: int = NAN_AT[0]) -> None:
    """Put a NaN into the output of a module."""

    def add_nan(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if not is_due():
            return output
        at = torch.zeros_like(output)
        at[row, NAN_AT[1] if output.dim() == 3 else 0] = torch.nan
        return output + at

    module.register_forward_hook(add_nan)


def spoil_gradient(module: nn.Module) -> None:
    """Make the first gradient of a module's output infinite in one sequence."""

    def overflow(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        def spoilt(gradient: Tensor) -> Tensor:
            at = torch.zeros_like(gradient)
            at[NAN_AT] = torch.inf
            return gradient + at

        if output.requires_grad:
            output.register_hook(spoilt)

    module.register_forward_hook(overflow)


def test_a_branch_that_shares_its_keys_is_looked_at_with_them() -> None:
    """Compressed keys overflow, of keys that are as large as they may be; with others they would not."""
    layer = NativeSparseAttention(32, 4, 2, 8, config=SMALL, compression="linear", shared_keys=True)
    with torch.no_grad():
        layer.get_parameter("w_k_slc.weight").mul_(1e20)
        layer.get_parameter("phi_k.project.weight").mul_(1e20)
        layer.w_q.weight.mul_(1e-10)
    assert failing_branch(layer, torch.randn(1, 77, 32), {}) == "cmp"


def layer(trainer: Trainer, index: int = 1) -> Any:
    return trainer.model.layers[index]


def run_to_a_stop(trainer: Trainer, folder: Path, words: str) -> None:
    with pytest.raises(FloatingPointError, match=re.escape(words)):
        run(trainer, folder, watchers=[strict])


PLACES: dict[str, tuple[Callable[[Trainer], nn.Module], str]] = {
    "selected keys": (lambda t: layer(t).attention.w_k_slc, "layer 1, branch slc (attention.w_k_slc)"),
    "window": (lambda t: layer(t, 0).attention.w_v_win, "layer 0, branch win (attention.w_v_win)"),
    "compressor": (lambda t: layer(t).attention.phi_v.out, "layer 1, branch cmp (attention.phi_v.out)"),
    "gate": (lambda t: layer(t).attention.gate.linear, "layer 1, gate (attention.gate.linear)"),
    "queries": (lambda t: layer(t).attention.w_q, "layer 1, projection of the queries (attention.w_q)"),
    "output": (lambda t: layer(t).attention.w_o, "layer 1, projection of the output (attention.w_o)"),
    "MLP": (lambda t: layer(t, 0).mlp.up, "layer 0, MLP (mlp.up)"),
    "norm": (lambda t: layer(t, 0).mlp_norm, "layer 0, norm (mlp_norm)"),
    "embedding": (lambda t: t.model.embedding, "embedding"),
}


@pytest.mark.parametrize("options", [{}, {"checkpointing": True, "precision": "bf16"}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_forward_is_named_by_step_layer_part_and_row(place: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(Ranks(), **options)
    module, words = PLACES[place]
    spoil(module(trainer), lambda: trainer.step == 1)  # before other hooks, as what the module computes
    run_to_a_stop(trainer, tmp_path, f"step 1: the first non-finite value is in forward, {words}, row 2")
    assert trainer.step == 1


@pytest.mark.parametrize("kind", ["sigmoid", "residual"])
def test_gates_of_single_branches_are_looked_at(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(Ranks(), gate=kind)

    def shut_window(_module: nn.Module, _inputs: object, gates: dict[str, Tensor]) -> dict[str, Tensor]:
        return gates | {"win": gates["win"] * torch.nan}

    layer(trainer).attention.gate.register_forward_hook(shut_window)
    run_to_a_stop(trainer, tmp_path, "is in forward, layer 1, gate (attention.gate), row 0")


@pytest.mark.parametrize("place", ["selected keys", "window", "output", "MLP"])
def test_backward_is_named_too(place: str, tmp_path: Path) -> None:
    trainer = make_trainer(Ranks())
    module, words = PLACES[place]
    before = parameters(trainer)
    spoil_gradient(module(trainer))
    run_to_a_stop(trainer, tmp_path, f"step 0: the first non-finite value is in backward, {words}, row 2, token 17")
    assert all(torch.equal(before[name], after) for name, after in parameters(trainer).items())


@pytest.mark.parametrize("tag", ["cmp", "slc", "win"])
def test_a_branch_whose_own_kernel_fails_is_told_from_the_others(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"cmp": "compressed", "slc": "selected", "win": "window"}[tag]
    kernel = getattr(IMPLEMENTATIONS["sdpa"], name)

    def failing(*arguments: Any) -> Any:
        result = kernel(*arguments)
        out = result.out if hasattr(result, "out") else result[0]
        spoilt = out + torch.where(torch.arange(len(out)) == 3, torch.nan, 0.0)[:, None, None, None]
        return result._replace(out=spoilt) if hasattr(result, "_replace") else replace(result, out=spoilt)

    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa", replace(IMPLEMENTATIONS["sdpa"], **{name: failing}))
    trainer = make_trainer(Ranks())
    run_to_a_stop(trainer, tmp_path, f"forward, layer 0, branch {tag} (what it gives), row 3")


def test_a_parameter_whose_gradient_alone_overflows_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(Ranks())
    layer(trainer).attention.phi_k.project.position.register_hook(lambda gradient: gradient * torch.inf)
    place = "layer 1, branch cmp (attention.phi_k.project.position), gradient of the parameter"
    run_to_a_stop(trainer, tmp_path, f"step 0: the first non-finite value is in backward, {place}")


def test_an_evaluation_is_looked_at_before_its_result_is_written(tmp_path: Path) -> None:
    trainer = make_trainer(Ranks(), eval_every=2)
    spoil(layer(trainer).mlp.down, lambda: not trainer.model.training)
    with pytest.raises(FloatingPointError, match=r"evaluation after 2 steps: .* layer 1, MLP .*, row 2, token 17$"):
        run(trainer, tmp_path, watchers=[strict])
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("stages", "row"), [((), 5), (((24, 0.5), (48, 0.5)), 9)])
def test_rows_are_those_of_the_step_however_many_passes_it_takes(tmp_path: Path, stages: Any, row: int) -> None:
    trainer = make_trainer(Ranks(), batch_size=2, grad_accumulation=3, stages=stages)
    calls = itertools.count()
    spoil(layer(trainer).mlp.up, lambda: next(calls) == 2, row=1)
    with pytest.raises(FloatingPointError, match=rf"step 0: .*layer 1, MLP.*, row {row}, token 17$"):
        run(trainer, tmp_path, watchers=[strict])


def test_what_is_finite_takes_the_same_steps_and_leaves_no_hook(tmp_path: Path) -> None:
    plain, watched = (make_trainer(Ranks()) for _ in range(2))
    run(plain, tmp_path / "plain")
    run(watched, tmp_path / "watched", watchers=[strict])
    assert_close(parameters(plain), parameters(watched), rtol=0, atol=0)
    for module in watched.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not watched.checks


def test_nothing_is_written_after_it(tmp_path: Path) -> None:
    trainer = make_trainer(Ranks(), checkpoint_every=1)
    spoil(layer(trainer).attention.w_v_slc, lambda: trainer.step == 1)
    run_to_a_stop(trainer, tmp_path, "in forward, layer 1, branch slc")
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0]
    resumed = make_trainer(Ranks(), checkpoint_every=1)
    assert run(resumed, tmp_path, watchers=[strict]) is None
    assert resumed.step == resumed.config.steps
    assert all(value.isfinite().all() for value in parameters(resumed).values())


def test_the_command_names_it_in_one_line_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DecoderLayer, "forward", lambda _self, x, **_options: x / 0)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", write_text(tmp_path / "text"), "--strict")
    assert left.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("in forward, layer 0, row 0, token 0")


@pytest.mark.parametrize(("parallel", "step", "passes"), [("ddp", 0, 0), ("ddp", 0, 1), ("fsdp2", 1, 1)])
def test_all_ranks_say_what_the_first_of_them_found(parallel: str, step: int, passes: int, tmp_path: Path) -> None:
    run_together(2, tmp_path, _meet_a_nan, parallel, step, passes, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint*"))


def _meet_a_nan(parallel: str, step: int, passes: int, folder: Path) -> None:
    with joined_ranks(parallel, CPU) as ranks:
        trainer, calls = make_trainer(ranks), itertools.count()
        if ranks.rank == 1:  # whose share are the last two rows; DDP's first step has a pass more
            spoil(layer(trainer).attention.w_v_slc, lambda: next(calls) >= passes, row=1)
        place = "layer 1, branch slc (attention.w_v_slc), row 3, token 17, rank 1"
        run_to_a_stop(trainer, folder, f"step {step}: the first non-finite value is in forward, {place}")
