"""What a step needs to fail or hang is found by trying less and less of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa.lm import DecoderLM
from flexnsa.lm.diagnosis import Outcome, Trial, bisect, run_case
from tests.lm.diagnosis.conftest import Diagnose
from tests.parallel.steps import MODEL

BRANCHES = ("cmp", "slc", "win")
WHOLE = Trial(num_layers=4, checkpointed=(0, 4), branches=BRANCHES)
CULPRIT = 2


def take_step(trial: Trial) -> dict[str, Any]:
    """A step of a model whose third layer never comes back from the backward of its selected branch."""
    sizes = {"num_layers": trial.num_layers, "checkpointing": trial.checkpointed}
    model = DecoderLM(replace(MODEL, **sizes, branches=trial.branches)).train()
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        if index == CULPRIT and "slc" in trial.branches:
            layer.attention.w_v_slc.register_forward_hook(block_in_backward)
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    model(tokens, targets=tokens).backward()
    return {}


def block_in_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    def never_return(_gradient: Tensor) -> None:
        threading.Event().wait()

    output.register_hook(never_return)


def test_a_layer_that_deadlocks_in_backward_is_named_with_its_branch(tmp_path: Path) -> None:
    def run(trial: Trial) -> Outcome:
        return run_case(tmp_path / trial.name(), take_step, trial, seconds=3)

    bisection = bisect(run, replace(WHOLE, num_layers=CULPRIT + 1, checkpointed=(0, 0)))
    assert not bisection.passed
    assert bisection.sentence.startswith("layer 2 hangs (after 3 s rank 0 in threading.py:")
    assert bisection.sentence.endswith("checkpointed or not; of the branches slc alone (6 trials).")
    stacks = (tmp_path / bisection.trials[0][0].name() / "stacks.rank-0.txt").read_text()
    assert "never_return" in stacks


def trials_of(fails: Callable[[Trial], bool], whole: Trial = WHOLE, status: Any = "failed") -> tuple[str, list[Trial]]:
    bisection = bisect(lambda trial: Outcome(status if fails(trial) else "passed", "why", 0.0, {}), whole)
    return bisection.culprit, [trial for trial, _ in bisection.trials]


@pytest.mark.parametrize("culprit", range(12))
def test_a_layer_is_found_in_a_logarithm_of_trials(culprit: int) -> None:
    whole = Trial(12, (0, 12), BRANCHES)
    words, trials = trials_of(lambda trial: trial.checkpointed[0] <= culprit < trial.checkpointed[1], whole)
    assert words == f"checkpointing of layer {culprit} fails (why); each branch alone does"
    assert len(trials) <= 2 + 2 * 4 + 3
    words, trials = trials_of(lambda trial: culprit < trial.num_layers, whole, "over time")
    around = ", or what lies around the layers" * (culprit == 0)
    assert words == f"layer {culprit} hangs (why), checkpointed or not{around}; each branch alone does"
    assert len(trials) <= 2 + 4 + 3


@pytest.mark.parametrize(
    ("fails", "branches", "words"),
    [
        (
            lambda trial: trial.checkpointed == (0, 4) and trial.branches == BRANCHES,
            BRANCHES,
            "checkpointing of layers 0 to 3, no half of which alone fails (why); no branch does alone",
        ),
        (lambda trial: trial.num_layers > 1, (), "layer 1 fails (why), checkpointed or not"),
        (lambda _: False, BRANCHES, "the step passes: there is nothing to find"),
    ],
)
def test_the_culprit_is_named_in_words(fails: Callable[[Trial], bool], branches: tuple[str, ...], words: str) -> None:
    culprit, trials = trials_of(fails, replace(WHOLE, branches=branches))
    assert culprit == words
    assert (len(trials) == 1) == (words == "the step passes: there is nothing to find")


def test_the_command_finds_the_step_that_diverges(diagnose: Diagnose) -> None:
    ran = diagnose("bisect", "--branches win")
    assert (ran.status, ran.record["found"]) == (0, False)
    assert ran.out.startswith("the step passes: there is nothing to find (1 trial).")
    ran = diagnose("bisect", "--branches win --lr 1e30 --steps 3")
    assert ran.status == 1
    assert ran.out.startswith("layer 0 fails (rank 0: FloatingPointError: step ")
    assert "or what lies around the layers; branch win, the only one (1 trial)." in ran.out
    assert ran.record["trials"][0]["status"] == "failed"
