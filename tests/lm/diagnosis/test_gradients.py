"""A trace of one backward pass: what misses a gradient is named, with its rank, and buckets are those that travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.diagnosis import GradientTrace, run_case, trace_gradients
from flexnsa.lm.diagnosis.gradients import report_gradients
from flexnsa.lm.parallel import joined_ranks
from tests.lm.diagnosis.conftest import Diagnose
from tests.parallel.steps import CPU


class Forgetful(nn.Module):
    """A model of a user, which leaves one of its parameters out if ``forgets``."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_parameter("frozen", nn.Parameter(torch.ones(4), requires_grad=False))
        self.forgets = forgets

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x + (self.spare(x).detach() if self.forgets else self.spare(x))


def loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4)).square().sum()


def trace_on_two_ranks() -> dict[str, Any]:
    with joined_ranks("ddp", CPU) as ranks:
        torch.manual_seed(0)
        models = {"good": Forgetful(forgets=False), "forgetful": Forgetful(forgets=ranks.rank == 1)}
        traces = {name: trace_gradients(model, loss, ranks=ranks).record() for name, model in models.items()}
        static = trace_gradients(Forgetful(forgets=False), loss, ranks=ranks, static_graph=True).record()
        return traces | {"static": static}


def test_a_parameter_without_gradient_is_named_with_its_rank(tmp_path: Path) -> None:
    outcome = run_case(tmp_path, trace_on_two_ranks, ranks=2, seconds=60)
    assert outcome.passed, outcome.reason
    good, forgetful = outcome.values["good"], outcome.values["forgetful"]
    assert good["missing"] == {}
    assert good["arrived"][0] in ("spare.weight", "second.weight")
    assert good["arrived"][-2:] in (["first.weight", "first.bias"], ["first.bias", "first.weight"])
    for trace in outcome.values.values():
        travelled = [name for bucket in trace["buckets"] for name in bucket["parameters"]]
        assert sorted(travelled) == ["first.bias", "first.weight", "second.weight", "spare.weight"]
        assert sum(bucket["bytes"] for bucket in trace["buckets"]) >= 4 * (3 * 16 + 4)
    assert outcome.values["static"]["arrived"] == good["arrived"]
    assert forgetful["missing"] == {1: ["spare.weight"]}
    assert forgetful["left_out"] == []  # on rank 0, which forgets nothing


def test_a_process_on_its_own_needs_no_group() -> None:
    model = Forgetful(forgets=True)
    trace = trace_gradients(model, loss)
    assert trace.missing == {0: ["spare.weight"]}
    assert trace.left_out == ["spare"]
    assert trace.modules == ["second", "first"]
    assert trace.buckets == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_a_gradient_of_zeros_is_told_from_none() -> None:
    model = Forgetful(forgets=False)
    trace = trace_gradients(model, lambda called: loss(called) * 0)
    assert trace.missing == {}
    assert trace.zero == ["first.weight", "first.bias", "second.weight", "spare.weight"]


def test_the_sentence_names_what_is_missing_in_which_variants() -> None:
    settings = {"branches": "win", "checkpointing": "none", "static_graph": False}
    whole, partial = (
        settings | GradientTrace(missing=missing).record()
        for missing in ({}, {1: ["layers.0.attention.gate.linear.weight"]})
    )
    report = report_gradients({"ranks": 2, "traces": [whole, partial, partial]})
    assert not report.passed
    assert report.sentence == (
        "missing: layers.0.attention.gate.linear.weight, which got no gradient on rank 1 in 2 of 3 variants on 2 ranks."
    )


def test_the_command_looks_at_every_variant_of_a_model_and_finds_nothing(tmp_path: Path, diagnose: Diagnose) -> None:
    ran = diagnose("gradients", "--branches slc win --recompute slc")
    assert ran.status == 0
    assert ran.out.startswith("missing: none; every parameter got its gradient in each of 12 variants on 1 rank.\n\n")
    traces = ran.record["traces"]
    assert len({(trace["branches"], trace["checkpointing"], trace["static_graph"]) for trace in traces}) == 12
    assert len(traces[0]["arrived"]) == 19, "5 of them of an indexer"
    assert {"attention.w_q", "mlp.up"} <= {name.removeprefix("layers.0.") for name in traces[0]["modules"]}
    assert all(name in ran.out for name in traces[0]["arrived"])
    files = {LOCK_NAME, "environment.json", "log.rank-0.txt"}
    assert files == {file.name for file in (tmp_path / "out").iterdir()}
