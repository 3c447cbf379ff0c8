"""In bfloat16, by the weights' dtype or by autocast: as near to float64 as the dense model is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from tests.integrations.transformers.families import ALL, dense, sparse, tokens
from tests.support.comparison import assert_as_exact_as_plain


@pytest.mark.parametrize("by", ["dtype", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ["drop-in", "converted"])
def test_it_errs_as_little_as_the_dense_model(way: str, family: str, by: str) -> None:
    plain, x = dense(family), tokens(2, 60)
    model = sparse(family, ALL) if way == "drop-in" else convert(plain, NSAConfig(**ALL), branches=["slc"])
    exact = _run(plain, x)
    plain, model = (one.to(torch.bfloat16 if by == "dtype" else torch.float32) for one in (plain, model))
    with torch.autocast("cpu", torch.bfloat16) if by == "autocast" else contextlib.nullcontext():
        assert_as_exact_as_plain(_run(model, x), _run(plain, x), exact, factor=2)
        generated = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 64)


def _run(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach(), "embedding": model.get_input_embeddings().weight.grad.clone()}
