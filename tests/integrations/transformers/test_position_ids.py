"""What positions tell of documents: as transformers has it, and where it tells of none, a lower position begins one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    Ernie4_5_VLMoeTextConfig,
    Ernie4_5_VLMoeTextModel,
    Glm4vMoeTextConfig,
    Glm4vMoeTextModel,
    StaticCache,
)

from flexnsa import NSAConfig
from flexnsa.transformers import FlexNSACache, convert
from tests.integrations.transformers.families import ALL, FEW, SIZES, converted, dense, own, sparse, tokens

ROUNDING: dict[str, Any] = {"atol": 1e-3, "rtol": 0}
"""The same distances at other positions: the model computes angles in float32."""
LENGTH = 40
STEPS = torch.arange(LENGTH)
POSITIONS = {
    "gap": torch.where(STEPS < 25, STEPS, STEPS + 9),
    "halved": STEPS // 2,
    "offset": STEPS + 7,
    "restarting": torch.cat((STEPS[:25], STEPS[:15])),
}


def called(model: Any, x: Tensor, positions: Tensor | None, beside: str) -> Tensor:
    """Predict with positions, beside a mask that hides nothing, a cache, or neither."""
    given: dict[str, Any] = {} if positions is None else {"position_ids": positions[None]}
    if beside == "mask":
        given["attention_mask"] = torch.ones_like(x)
    if "cache" not in beside:
        return model(x, use_cache=False, **given).logits
    if beside == "static cache":
        return model(x, past_key_values=StaticCache(model.config, max_cache_len=64), **given).logits
    is_converted = model.config.model_type.startswith("flexnsa")
    return model(x, past_key_values=FlexNSACache(model.config) if is_converted else DynamicCache(), **given).logits


@pytest.fixture(scope="module")
def dense_model() -> Any:
    return dense("llama")


@pytest.fixture(scope="module")
def drop_in() -> Any:
    return sparse("llama", ALL)


@pytest.fixture(scope="module")
def converted_model() -> Any:
    return convert(dense("llama"), NSAConfig(**ALL), branches=["slc"])


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("beside", ["neither", "mask", "cache", "static cache"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_the_drop_in(dense_model: Any, drop_in: Any, kind: str, beside: str, rows: int) -> None:
    """Wherever a position was not the one before plus 1 a document began, also where transformers has it go on."""
    x, positions = tokens(rows, LENGTH), POSITIONS[kind]
    if kind == "restarting" and beside == "static cache":
        with pytest.raises(ValueError, match="position_ids: expected one sequence a row with a cache, got several"):
            called(drop_in, x, positions, beside)
        return
    got = called(drop_in, x, positions, beside)
    if kind == "restarting":  # beside a mask or a cache, transformers' own attention mixes the two
        alone = [called(dense_model, document, None, "neither") for document in (x[:, :25], x[:, 25:])]
        assert_close(got, torch.cat(alone, 1))
    else:
        assert_close(got, called(dense_model, x, positions, beside))


@torch.no_grad()
@pytest.mark.parametrize("beside", ["neither", "mask", "cache"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_of_converted_models(dense_model: Any, converted_model: Any, kind: str, beside: str) -> None:
    """They count positions themselves: a gap that goes on would be lost."""
    x, positions = tokens(2, LENGTH), POSITIONS[kind]
    if beside == "cache" and kind == "restarting":
        message = "position_ids: expected one sequence a row with a cache, got several"
    elif beside != "neither" and kind in ("gap", "halved"):
        message = "position_ids: expected each to be the one before plus 1, .* got (34 after 24|0 after 0) in row 0"
    else:
        got = called(converted_model, x, positions, beside)
        cut = "neither" if kind == "restarting" else beside
        assert_close(got, called(dense_model, x, positions, cut), **ROUNDING)
        return
    with pytest.raises(ValueError, match=message):
        called(converted_model, x, positions, beside)


@torch.no_grad()
@pytest.mark.parametrize("beside", ["neither", "mask", "cache"])
@pytest.mark.parametrize("kind", ["gap", "halved", "restarting"])
def test_positions_of_the_own_decoder(kind: str, beside: str) -> None:
    model, x, positions = own(), tokens(2, LENGTH), POSITIONS[kind][None]
    given: dict[str, Any] = {
        "neither": {"use_cache": False},
        "mask": {"use_cache": False, "attention_mask": torch.ones_like(x)},
        "cache": {"past_key_values": FlexNSACache(model.config)},
    }[beside]
    if beside == "neither" or (kind == "restarting" and beside == "mask"):
        cuts = [0, *((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist(), LENGTH]
        alone = [model(x[:, a:b], use_cache=False).logits for a, b in pairwise(cuts)]
        assert_close(model(x, position_ids=positions, **given).logits, torch.cat(alone, 1))
        return
    with pytest.raises(
        ValueError, match=r"position_ids: expected (each to be the one before plus 1|one sequence a row)"
    ):
        model(x, position_ids=positions, **given)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: sparse("llama", FEW), lambda: converted("llama", FEW), own])
def test_positions_of_padding_tell_nothing(make: Any) -> None:
    """Those of the tokens before and behind it rise by 1; the padding's own stand still, or fall."""
    model, x, mask = make(), tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.int64)
    mask[1, :13], mask[2, 30:] = 0, 0
    want = model(x, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=False).logits
    odd = torch.where(mask == 1, mask.cumsum(1) - 1, 50 - STEPS)
    got = model(x, attention_mask=mask, position_ids=odd, use_cache=False).logits
    assert_close(got[mask == 1], want[mask == 1])


@torch.no_grad()
def test_a_gap_goes_on_in_the_next_turn(dense_model: Any, drop_in: Any) -> None:
    for kind in ("gap", "offset"):
        x, positions, logits = tokens(1, LENGTH), POSITIONS[kind][None], []
        for model in (dense_model, drop_in):
            cache = model(x[:, :30], position_ids=positions[:, :30], use_cache=True).past_key_values
            logits.append(model(x[:, 30:], position_ids=positions[:, 30:], past_key_values=cache).logits)
        assert_close(logits[1], logits[0])


@torch.no_grad()
@pytest.mark.parametrize("beside", ["neither", "mask"])
@pytest.mark.parametrize("make", [lambda: sparse("llama", FEW), lambda: converted("llama", FEW)])
def test_documents_are_found_inside_of_a_compiler(make: Any, beside: str) -> None:
    model, x = make(), tokens(2, LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("restarting", "offset"):
        want = called(model, x, POSITIONS[kind], beside)
        assert_close(called(compiled, x, POSITIONS[kind], beside), want)


ROPE = {"rope_type": "default", "rope_theta": 100.0}
AXES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ernie4_5_vl_moe": (
        Ernie4_5_VLMoeTextConfig,
        Ernie4_5_VLMoeTextModel,
        {
            "moe_intermediate_size": [32, 32],
            "moe_num_experts": 4,
            "moe_k": 2,
            "rope_parameters": ROPE | {"mrope_section": [4, 4, 4]},
        },
    ),
    "glm4v_moe": (
        Glm4vMoeTextConfig,
        Glm4vMoeTextModel,
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": ROPE | {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5},
        },
    ),
}
IMAGE = torch.stack((torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4)).long()
FILM = torch.stack((torch.arange(12) // 2, torch.zeros(12), torch.arange(12) % 2)).long()
"""Positions on the axes of time, height and width. Behind a film, the axis of time falls."""


def with_image(image: Tensor) -> Tensor:
    """Set an image between texts of 10 and 18 tokens, ``(3, 1, 40)``."""
    behind = 10 + 1 + int(image[1:].max())
    return torch.cat((torch.arange(10).expand(3, -1), 10 + image, behind + torch.arange(18).expand(3, -1)), 1)[:, None]


@pytest.fixture(scope="module", params=AXES)
def three_axes(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The text model of a type that hands positions on three axes to its attention: dense, and with flexnsa."""
    config_class, model_class, changes = AXES[request.param]
    models = []
    for implementation in ("sdpa", "flexnsa"):
        torch.manual_seed(0)
        config = config_class(**SIZES | {"head_dim": 24, **changes}, flexnsa=ALL, attn_implementation=implementation)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn_like(parameter))
        models.append(model)
    return models[0], models[1]


def states(model: Any, x: Tensor, positions: Tensor | None, **given: Any) -> Any:
    inputs = torch.nn.functional.embedding(x, model.get_input_embeddings().weight)
    return model(inputs_embeds=inputs, position_ids=positions, **given)


@torch.no_grad()
@pytest.mark.parametrize("image", [IMAGE, FILM], ids=["image", "film"])
def test_positions_on_three_axes(three_axes: Any, image: Tensor) -> None:
    """They were refused as not of two dimensions."""
    x, positions = tokens(2, LENGTH), with_image(image).expand(-1, 2, -1)
    mask = torch.ones_like(x)
    mask[0, :6] = 0
    model, few = three_axes
    for given in ({}, {"attention_mask": mask}):
        want, got = (states(m, x, positions, use_cache=False, **given).last_hidden_state for m in (model, few))
        assert_close(got[:, 6:], want[:, 6:], atol=1e-4, rtol=1e-4)
    turns = []
    for one in (model, few):
        cache = states(one, x[:, :35], positions[:, :, :35], use_cache=True).past_key_values
        turns.append(states(one, x[:, 35:], positions[:, :, 35:], past_key_values=cache).last_hidden_state)
    assert_close(turns[1], turns[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("axes", [1, 3, 4])
def test_documents_on_several_axes(three_axes: Any, axes: int) -> None:
    """With a fourth axis, that of the text, transformers tells of documents; else a fall on all axes does."""
    model, few = three_axes
    x, positions = tokens(1, LENGTH), POSITIONS["restarting"][None]
    alone = [states(model, document, None, use_cache=False).last_hidden_state for document in (x[:, :25], x[:, 25:])]
    positions = positions if axes == 1 else positions.expand(axes, -1, -1)
    got = states(few, x, positions, use_cache=False).last_hidden_state
    assert_close(got, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: sparse("llama", FEW), lambda: converted("llama", FEW), own])
def test_starts_of_documents_count_padding(make: Any) -> None:
    """Tokens were moved in front of their padding, and the starts were not."""
    model, x = make(), tokens(1, 67)
    mask = torch.ones_like(x)
    mask[:, :7] = 0
    given = {"attention_mask": mask, "cu_seq_lens_q": torch.tensor([0, 7, 30, 67]), "use_cache": False}
    want = [model(document, use_cache=False).logits for document in (x[:, 7:30], x[:, 30:])]
    # Without positions, tokens are rotated by other angles, which the model computes in float32.
    assert_close(model(x, **given).logits[:, 7:], torch.cat(want, 1), atol=1e-3, rtol=0)
