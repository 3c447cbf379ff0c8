"""Compressors and indexers learn at rates of their own, as in the library's own parameter groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torchtitan.components.optimizer import OptimizersContainer

from flexnsa.optim import COMPRESSOR_LR, INDEXER_LR, parameter_groups
from tests.integrations.torchtitan.models import adapted
from tests.integrations.torchtitan.runs import FEW, INDEXER

LR = 3e-3


def rates(*arguments: str, **options: Any) -> tuple[dict[str, float], Any]:
    """Give the learning rate of each parameter of a model by its name, and the model."""
    config = adapted("llama", *arguments, **options)
    spec: Any = config.model_spec
    model = spec.model.build()
    optimizers = config.optimizer.build(model_parts=[model])
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {name: group["lr"] for group in groups for name in group["param_names"]}, model


@pytest.mark.parametrize("options", [FEW, INDEXER, INDEXER | {"compression": "mlp", "index_rank": 4}])
@pytest.mark.parametrize("own", [{}, {"compressor_lr": 0.5, "indexer_lr": 0.2}])
def test_rates_are_those_of_the_library(options: dict[str, Any], own: dict[str, float]) -> None:
    found, model = rates(**options, **own)
    relative = {"compressor_lr": COMPRESSOR_LR, "indexer_lr": INDEXER_LR, **own}
    expected = {
        parameter: group["lr"] for group in parameter_groups(model, lr=LR, **relative) for parameter in group["params"]
    }
    assert found == pytest.approx({name: expected[parameter] for name, parameter in model.named_parameters()})
    assert len({*found.values()}) > 1


def test_there_is_no_group_without_a_rate_of_its_own() -> None:
    config = adapted("llama", **INDEXER, compressor_lr=1.0)
    assert type(config.optimizer) is OptimizersContainer.Config
    assert len(config.optimizer.param_groups) == 1


def test_a_group_is_like_the_one_that_its_parameters_were_in() -> None:
    config = adapted("llama", **INDEXER, indexer_lr=0.5)
    compressors, indexers, every = config.optimizer.param_groups
    assert compressors == replace(every, pattern=compressors.pattern, optimizer_kwargs=compressors.optimizer_kwargs)
    kept = {**every.optimizer_kwargs, "lr": 0}
    assert {**compressors.optimizer_kwargs, "lr": 0} == kept == {**indexers.optimizer_kwargs, "lr": 0}
