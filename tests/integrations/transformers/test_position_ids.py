"""Padding and documents in each caller of ``Rows.of``: the drop-in, converted models, the library's own decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, Ernie4_5_VLMoeTextConfig, Ernie4_5_VLMoeTextModel, StaticCache

from flexnsa.transformers import FlexNSACache
from tests.integrations.transformers.families import ALL, FEW, SIZES, converted, dense, own, sparse, tokens

LENGTH = 40
STEPS = torch.arange(LENGTH)
POSITIONS = {
    "gap": torch.where(STEPS < 25, STEPS, STEPS + 9),
    "offset": STEPS + 7,
    "restarting": torch.cat((STEPS[:25], STEPS[:15])),
}


CALLERS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW | {"branches": ["cmp", "slc", "win"]}),
    "converted": lambda: converted("llama", FEW),
    "own decoder": own,
}


@torch.no_grad()
@pytest.mark.parametrize("real", [slice(23, None), slice(37)], ids=["left", "right"])
@pytest.mark.parametrize("caller", CALLERS)
def test_padding_changes_no_logit(caller: str, real: slice) -> None:
    model, x, mask = CALLERS[caller](), tokens(2, 60), torch.ones(2, 60, dtype=torch.int64)
    mask[1] = 0
    mask[1, real] = 1
    # Without positions, the drop-in's tokens behind padding are turned by other angles, computed in float32.
    rounding: dict[str, Any] = {"atol": 1e-4, "rtol": 0} if caller == "drop-in" else {}
    for use_cache in (False, True):
        got = model(x * mask, attention_mask=mask, use_cache=use_cache).logits
        assert_close(got[:1], model(x[:1]).logits)
        assert_close(got[1:, real], model(x[1:, real]).logits, **rounding)


@pytest.mark.parametrize("told_by", ["position_ids", "position_ids beside a mask", "cu_seq_lens_q"])
@pytest.mark.parametrize("caller", CALLERS)
def test_packed_documents_stand_alone(caller: str, told_by: str) -> None:
    """Beside a mask, transformers tells of none, and its own attention mixes them."""
    model, documents = CALLERS[caller](), [tokens(n) for n in (40, 3, 61)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch: dict[str, Any] = dict(collate([{"input_ids": document.tolist()} for document in documents]))
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])} if told_by.endswith("mask") else {}
    batch = {name: batch[name] for name in ("input_ids", "labels", told_by.split()[0])} | mask
    packed = model(**batch)
    alone = [model(document[None], labels=document[None]) for document in documents]
    counts = [len(document) - 1 for document in documents]
    loss = torch.stack([n * out.loss for n, out in zip(counts, alone, strict=True)]).sum() / sum(counts)
    # Without positions, a document's tokens are turned by other angles, which the model computes in float32.
    rounding: dict[str, Any] = {"atol": 1e-3, "rtol": 0} if (caller, told_by) == ("drop-in", "cu_seq_lens_q") else {}
    assert_close(packed.logits, torch.cat([out.logits for out in alone], 1), **rounding)
    assert_close(packed.loss, loss, **rounding)
    weights = list(model.parameters())
    got, want = (torch.autograd.grad(x, weights, allow_unused=True) for x in (packed.loss, loss))
    assert_close(got, want, **rounding)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gap", "offset"])
def test_the_drop_in_goes_on_behind_a_gap(kind: str) -> None:
    """Wherever a position was not the one before plus 1 a document began, also where transformers has it go on."""
    models, x, positions = (dense("llama"), sparse("llama", ALL)), tokens(2, LENGTH), POSITIONS[kind][None]
    for mask in (None, torch.ones_like(x)):
        want, got = (m(x, position_ids=positions, attention_mask=mask, use_cache=False).logits for m in models)
        assert_close(got, want)
    turns = []
    for model in models:
        cache = StaticCache(model.config, max_cache_len=64)
        first, second = ({"position_ids": part, "past_key_values": cache} for part in positions.split([30, 10], 1))
        turns.append(torch.cat((model(x[:, :30], **first).logits, model(x[:, 30:], **second).logits), 1))
    assert_close(turns[1], turns[0])


@torch.no_grad()
@pytest.mark.parametrize("caller", ["converted", "own decoder"])
def test_layers_that_count_positions_refuse_a_gap_that_goes_on(caller: str) -> None:
    """It would be lost. Without a mask and a cache, a document begins there, as in transformers."""
    model, x, positions = CALLERS[caller](), tokens(2, LENGTH), POSITIONS["gap"][None]
    want = torch.cat([model(document, use_cache=False).logits for document in (x[:, :25], x[:, 25:])], 1)
    assert_close(model(x, position_ids=positions, use_cache=False).logits, want, atol=1e-3, rtol=0)
    for options in ({"attention_mask": torch.ones_like(x)}, {"past_key_values": FlexNSACache(model.config)}):
        with pytest.raises(ValueError, match="position_ids: expected each to be the one before plus 1"):
            model(x, position_ids=positions, **options)


@torch.no_grad()
@pytest.mark.parametrize(("caller", "beside_mask"), [("drop-in", True), ("converted", False)])
def test_documents_are_found_inside_of_a_compiler(caller: str, beside_mask: bool) -> None:
    model, x = CALLERS[caller](), tokens(2, LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for kind in ("restarting", "offset"):
        options: dict[str, Any] = {"position_ids": POSITIONS[kind][None], "use_cache": False}
        options |= {"attention_mask": torch.ones_like(x)} if beside_mask else {}
        assert_close(compiled(x, **options).logits, model(x, **options).logits)


ERNIE: dict[str, Any] = {
    "head_dim": 24,
    "moe_intermediate_size": [32, 32],
    "moe_num_experts": 4,
    "moe_k": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 4, 4]},
}
"""A text model that hands positions on three axes to its attention."""
IMAGE = torch.stack((torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4)).long()
"""Positions on the axes of time, height and width."""


def ernie(implementation: str) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"flexnsa": ALL, "attn_implementation": implementation}
    config = Ernie4_5_VLMoeTextConfig(**SIZES | ERNIE | options)
    model = Ernie4_5_VLMoeTextModel(config).eval()
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def states(model: Any, x: Tensor, positions: Tensor | None, **options: Any) -> Any:
    inputs = torch.nn.functional.embedding(x, model.get_input_embeddings().weight)
    return model(inputs_embeds=inputs, position_ids=positions, **options)


@torch.no_grad()
def test_positions_on_three_axes() -> None:
    """They were refused as not of two dimensions. An image lies between texts of 10 and 18 tokens."""
    x, axes = tokens(2, LENGTH), (torch.arange(10).expand(3, -1), 10 + IMAGE, 14 + torch.arange(18).expand(3, -1))
    positions, mask = torch.cat(axes, 1)[:, None].expand(-1, 2, -1), torch.ones_like(x)
    mask[0, :6] = 0
    outputs: list[Tensor] = []
    for model in (ernie("sdpa"), ernie("flexnsa")):
        first = states(model, x[:, :35], positions[:, :, :35], use_cache=True)
        second = states(model, x[:, 35:], positions[:, :, 35:], past_key_values=first.past_key_values)
        padded = states(model, x, positions, use_cache=False, attention_mask=mask).last_hidden_state[:, 6:]
        outputs.append(torch.cat((first.last_hidden_state, second.last_hidden_state, padded), 1))
    assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("axes", [1, 3, 4])
def test_documents_on_several_axes(axes: int) -> None:
    """With a fourth axis, that of the text, transformers tells of documents; else a fall on all axes does."""
    x, positions = tokens(1, LENGTH), POSITIONS["restarting"][None]
    want = [states(ernie("sdpa"), part, None, use_cache=False).last_hidden_state for part in (x[:, :25], x[:, 25:])]
    positions = positions if axes == 1 else positions.expand(axes, -1, -1)
    got = states(ernie("flexnsa"), x, positions, use_cache=False).last_hidden_state
    assert_close(got, torch.cat(want, 1), atol=1e-4, rtol=1e-4)
