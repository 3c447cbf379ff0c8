"""Models that transformers spreads over two processes: logits, gradients and tokens of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flexnsa.transformers.parallel import keep_local_heads
from tests.integrations.transformers.families import FEW, converted
from tests.integrations.transformers.spread_models import spread_models
from tests.parallel.processes import run_together


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spread")
    run_together(2, folder, spread_models, folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", ["drop-in", "converted", "gated", "own", "own, shared keys"])
@pytest.mark.parametrize("way", ["tensor parallel", "sharded"])
def test_two_processes_compute_what_one_does(name: str, way: str, results: dict[str, Any]) -> None:
    assert_close(results[name][way], results[name]["whole"])


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    layer = converted("llama", FEW).model.layers[0].self_attn
    with pytest.raises(ValueError, match="tp_size: expected a divisor of num_key_value_heads=2, got 4"):
        keep_local_heads(layer, 4)
