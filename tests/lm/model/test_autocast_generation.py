"""Generation under autocast: caches have the dtype in which autocast computes keys, wherever they are made."""

from __future__ import annotations

import pytest
import torch

from flexnsa.lm import DecodingSession
from tests.lm.model.sessions import GREEDY, make_model, prompts

KINDS = ["nsa", "dense"]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", KINDS)
def test_steps_under_autocast_are_as_near_as_whole_rows(attention: str, dtype: torch.dtype) -> None:
    model, x = make_model(attention), prompts(2, 20)
    exact = model.double()(x)
    model.float()
    with torch.autocast("cpu", dtype):
        caches = model.new_caches(2, 20)
        assert {cache.dtype for cache in caches} == {dtype}
        steps = torch.cat([model(part, caches=caches) for part in x.split([12] + [1] * 8, dim=1)], dim=1)
        whole = model(x)
    error, plain = ((out.double() - exact).norm() for out in (steps, whole))
    assert error <= 1.5 * plain


@pytest.mark.parametrize("attention", KINDS)
def test_generate_and_a_session_run_under_autocast(attention: str) -> None:
    model = make_model(attention)
    with torch.autocast("cpu", torch.bfloat16):
        session = DecodingSession(model, 2, 30, sampling=GREEDY)
        drawn = session.generate(prompts(2, 20), 5)
        assert model.generate(prompts(2, 20), 5, sampling=GREEDY) == drawn
    assert [len(row) for row in drawn] == [5, 5]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("attention", KINDS)
def test_without_autocast_a_cache_is_of_the_dtype_of_the_weights(attention: str, dtype: torch.dtype) -> None:
    model = make_model(attention).to(dtype)
    assert {cache.dtype for cache in model.new_caches(2, 20)} == {dtype}
    if dtype == torch.float64:  # which autocast leaves alone
        with torch.autocast("cpu", torch.bfloat16):
            assert {cache.dtype for cache in model.new_caches(2, 20)} == {dtype}


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("length", [3, 12])
def test_a_cache_made_without_autocast_is_named_under_it(attention: str, length: int) -> None:
    model = make_model(attention)
    caches = model.new_caches(2, 20)
    expected = r"^cache: expected dtype=torch.bfloat16, as the layer has it, got torch.float32"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=expected):
        model(prompts(2, 20)[:, :length], caches=caches)
    assert all(cache.is_empty for cache in caches)
