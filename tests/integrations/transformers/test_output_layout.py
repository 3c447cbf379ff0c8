"""What the attention returns lies in memory as that of transformers does: some models take a view of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface

from flexnsa.transformers import dropin, softmax
from tests.integrations.transformers.families import FEW, pad_left, sparse, tokens

Outputs = list[Tensor]
BRANCHES: dict[str, dict[str, Any]] = {
    "selected branch": {},
    "all branches": {"branches": ["cmp", "slc", "win"], "gates": [0.3, 1.0, 0.2]},
}


def packed() -> dict[str, Tensor]:
    return {"input_ids": tokens(1, 50), "position_ids": torch.cat((torch.arange(30), torch.arange(20)))[None]}


def padded_right() -> dict[str, Tensor]:
    return {name: x.flip(1) for name, x in pad_left([tokens(50), tokens(31)]).items()}


BATCHES: dict[str, Any] = {
    "whole rows": lambda: {"input_ids": tokens(2, 50)},
    "padding on the left": lambda: pad_left([tokens(50), tokens(31)]),
    "padding on the right": padded_right,
    "packed": packed,
}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """What the attention returned, call by call."""
    kept: Outputs = []

    def attend(*args: Any, **kwargs: Any) -> Any:
        out, probabilities = dropin.attention_forward(*args, **kwargs)
        kept.append(out)
        return out, probabilities

    monkeypatch.setitem(AttentionInterface._global_mapping, "flexnsa", attend)
    return kept


def assert_laid_out(outputs: Outputs, *shape: int) -> None:
    assert len(outputs) == 2  # layers
    for out in outputs:
        assert tuple(out.shape) == shape
        assert out.is_contiguous()
    outputs.clear()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_are_contiguous(batch: str, branches: str, trains: bool, outputs: Outputs) -> None:
    x, model = BATCHES[batch](), sparse("llama", FEW | BRANCHES[branches])
    with torch.set_grad_enabled(trains):
        model(**x, use_cache=False)
        assert_laid_out(outputs, *x["input_ids"].shape, 6, 16)
        for count in (1, 5) if batch in ("whole rows", "padding on the left") else ():
            cache = model(**x, use_cache=True).past_key_values
            assert_laid_out(outputs, 2, 50, 6, 16)
            mask = {name: pad(x[name], (0, count), value=1) for name in x if name == "attention_mask"}
            model(tokens(2, count), past_key_values=cache, **mask)
            assert_laid_out(outputs, 2, count, 6, 16)


def test_an_output_that_lies_so_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = torch.randn(2, 40, 6, 16)
    monkeypatch.setattr(softmax, "attend", lambda *_, **__: (laid_out.transpose(1, 2), None))
    config = SimpleNamespace(flexnsa=FEW, _attn_implementation="flexnsa")
    q, k = torch.randn(2, 6, 40, 16), torch.randn(2, 2, 40, 16)
    out, _ = dropin.attention_forward(SimpleNamespace(config=config), q, k, k, None)  # pyright: ignore[reportArgumentType]
    assert out.data_ptr() == laid_out.data_ptr()
    assert torch.equal(out, laid_out)
