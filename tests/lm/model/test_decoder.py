"""The decoder LM: sizes, first loss, gradients, causality, and both attentions with one interface."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from flexnsa import next_token_targets
from flexnsa.lm import DecoderConfig, DecoderLM, Sampling, generate
from tests.support.inputs import TINY

CONFIG = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, nsa=TINY)
KINDS = {
    "dense": {"attention": "dense"},
    "nsa": {},
    "cmp alone": {"branches": ("cmp",)},
    "slc alone": {"branches": ("slc",)},
    "win alone": {"branches": ("win",)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_finite_gradient_in_the_first_step(kind: str):
    model = DecoderLM(replace(CONFIG, **KINDS[kind]))
    _loss(model, _tokens(2, 49)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("num_layers", "dim"), [(1, 32), (12, 32), (2, 256)])
def test_first_loss_is_that_of_a_uniform_guess_at_any_size(attention: str, num_layers: int, dim: int):
    model = DecoderLM(replace(CONFIG, attention=attention, num_layers=num_layers, dim=dim))
    assert _loss(model, _tokens(2, 33)).item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_changes_its_own_prediction_and_none_before(kind: str):
    model = DecoderLM(replace(CONFIG, **KINDS[kind])).double()
    tokens = _tokens(1, 48)
    changed = tokens.clone()
    changed[0, 30] = (tokens[0, 30] + 1) % 256
    with torch.no_grad():
        moved = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert moved[:30].max() == 0
    assert moved[30] > 0
    if kind != "win alone":
        assert moved[40:].max() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_are_each_alone(kind: str, checkpointing: bool):
    model = DecoderLM(replace(CONFIG, **KINDS[kind], checkpointing=checkpointing)).double()
    rows = [(1, 40, 3, 20), (33, 31)]
    tokens = _tokens(2, 64)
    ids = torch.stack([torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in rows])

    packed = model(tokens, document_ids=ids)
    alone = torch.stack(
        [
            torch.cat([model(part[None])[0] for part in row.split(lengths)])
            for row, lengths in zip(tokens, rows, strict=True)
        ]
    )
    torch.testing.assert_close(packed, alone)

    targets = next_token_targets(tokens, ids).flatten()
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = [torch.autograd.grad(F.cross_entropy(x.flatten(0, 1), targets), parameters) for x in (packed, alone)]
    torch.testing.assert_close(*(dict(zip(names, each, strict=True)) for each in grads))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_mods_reach_every_layer(attention: str):
    """Banned keys must not be felt; a score that falls steeply with distance leaves a token to itself."""
    model = DecoderLM(replace(CONFIG, attention=attention))
    tokens = _tokens(2, 40)
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 256
    ids = torch.arange(2).repeat_interleave(20).expand(2, -1)

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return q_idx - kv_idx < 3

    def steep(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score - 1e4 * (q_idx - kv_idx)

    def moved(**options: object) -> Tensor:
        with torch.no_grad():
            return (model(tokens, **options) - model(changed, **options)).abs().amax((0, 2)) > 0

    assert moved()[10:].sum() > 5
    if attention == "dense":
        assert moved(mask_mod=near).nonzero()[:, 0].tolist() == [10, 11, 12, 13, 14]  # two tokens a layer
        assert moved(score_mod=steep).nonzero()[:, 0].tolist() == [10]
    for mod in ({"mask_mod": near}, {"score_mod": steep}):
        with torch.no_grad():
            packed = model(tokens, document_ids=ids, **mod)
            alone = torch.cat([model(part, **mod) for part in tokens.split(20, dim=1)], dim=1)
            assert not torch.allclose(packed, model(tokens, document_ids=ids))
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_wrong_documents_are_named(attention: str):
    model = DecoderLM(replace(CONFIG, attention=attention)).requires_grad_(False)
    tokens = _tokens(1, 3)
    for ids, message in (
        ([0, 0], r"expected shape \(1, 3\), got \(1, 2\)"),
        ([0, 1, 0], "expected ids that never decrease"),
    ):
        with pytest.raises(ValueError, match=f"^document_ids: {message}"):
            model(tokens, document_ids=torch.tensor([ids]))
    caches = model.new_caches(1, 8)
    with pytest.raises(ValueError, match=r"^document_ids: expected 1 documents, one for each row of the cache, got 2"):
        model(tokens, document_ids=torch.tensor([[0, 0, 1]]), caches=caches)
    model(tokens, document_ids=torch.tensor([[3, 3, 3]]), caches=caches[:1] + model.new_caches(1, 8)[1:])
    for wrong in (caches, caches[::-1]):
        before = [cache.state_dict() for cache in wrong]
        with pytest.raises(ValueError, match=r"^document_ids: expected None with a cache that is not known .* empty"):
            model(tokens, document_ids=torch.tensor([[3, 3, 3]]), caches=wrong)
        for cache, was in zip(wrong, before, strict=True):
            assert all(torch.equal(value, was[name]) for name, value in cache.state_dict().items())
    mixed = [*model.new_caches(1, 8)[:1], *model.new_caches(2, 8)[1:]]
    with pytest.raises(ValueError, match=r"^caches: expected 1 rows, got \[1, 2"):
        model(tokens, document_ids=torch.tensor([[3, 3, 3]]), caches=mixed)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(
    ("checkpointing", "again"),
    [
        (True, [0, 1, 2]),
        (False, []),
        ((1, 3), [1, 2]),
        ("all", [0, 1, 2]),
        ("none", []),
        ("1:3", [1, 2]),
        ("0:0", []),
        ("every:1", [0, 1, 2]),
        ("every:2", [0, 2]),
        ("every:9", [0]),
    ],
)
def test_checkpointing_survives_a_round_trip_changes_no_bit_and_runs_the_named_layers_again(
    attention: str, checkpointing: bool | tuple[int, int] | str, again: list[int]
):
    config = replace(CONFIG, attention=attention, num_layers=3)
    chosen = replace(config, checkpointing=checkpointing)
    plain = DecoderLM(config)
    checkpointed = DecoderLM(DecoderConfig.from_dict(json.loads(json.dumps(chosen.to_dict()))))
    assert checkpointed.config == chosen
    checkpointed.load_state_dict(plain.state_dict())
    runs: list[nn.Module] = []
    for layer in checkpointed.layers:
        layer.register_forward_pre_hook(lambda module, _input: runs.append(module))
    tokens = _tokens(2, 33)
    for model in (plain, checkpointed):
        _loss(model, tokens).backward()
    one, other = ([parameter.grad for parameter in model.parameters()] for model in (plain, checkpointed))
    assert_close(one, other, rtol=0, atol=0)
    assert [runs.count(layer) for layer in checkpointed.layers] == [2 if index in again else 1 for index in range(3)]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_model_built_on_the_meta_device_is_the_model_built_at_once(attention: str):
    config = replace(CONFIG, attention=attention)
    with torch.device("meta"):
        model = DecoderLM(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(7)
    model.reset_parameters()
    at_once = DecoderLM(config)
    torch.manual_seed(7)
    at_once.reset_parameters()
    tokens = _tokens(1, 20)
    assert torch.equal(model(tokens), at_once(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, r"^dim: expected at least 1, got 0"),
        ({"num_layers": 2.0}, r"^num_layers: expected an int, got 2.0"),
        ({"num_kv_heads": 3}, r"^num_kv_heads: expected a divisor of num_heads=4, got 3"),
        ({"head_dim": 7}, r"^head_dim: expected an even number, .* got 7"),
        ({"attention": "linear"}, r"^attention: expected one of 'nsa', 'dense', got 'linear'"),
        ({"branches": ("cmp", "slc"), "recompute": ("win",)}, r"^recompute: expected some of \('cmp', 'slc'\), .*win"),
        *(
            ({"checkpointing": value}, rf"^checkpointing: expected .* 0\.\.2, got {re.escape(repr(value))}")
            for value in ((1, 5), (0, 1, 2), ("0", "1"), 1, None, "1:5", "2:1", "0-1", "every:0", "every", "some", "")
        ),
    ],
)
def test_errors_name_the_field(change: dict[str, object], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(CONFIG, **change)


def test_hidden_states_are_what_goes_into_each_layer_and_what_the_head_is_given():
    model, x = DecoderLM(CONFIG).eval(), torch.randint(256, (2, 40))
    states: list[Tensor] = []
    logits = model(x, states=states)
    expected = [model.embedding(x)]
    for layer in model.layers:
        expected.append(layer(expected[-1]))
    assert_close(states, [*expected[:2], model.norm(expected[2])])
    assert_close(model.head(states[2]), logits)
    with pytest.raises(TypeError, match=r"^states: expected list, got 3 \(int\)"):
        model(x, states=3)


def test_generated_bytes_are_the_generated_tokens():
    model = DecoderLM(CONFIG).eval()
    (expected,) = model.generate(torch.tensor([list(b"ab")]), 8, sampling=Sampling(temperature=0.5), seed=1)
    assert list(generate(model, b"ab", 8, temperature=0.5, seed=1)) == expected
    with pytest.raises(ValueError, match="prompt: expected at least one byte"):
        generate(model, b"", 1)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0))


def _loss(model: DecoderLM, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    "wrong", [{"reduction": "none"}, {"targets": torch.zeros(1, 3).long()}, {"targets": torch.zeros(1, 8)}]
)
def test_what_no_loss_can_take_is_refused_before_any_layer_runs(wrong: dict[str, Any]) -> None:
    model = DecoderLM(CONFIG)
    ran: list[object] = []
    model.embedding.register_forward_hook(lambda *_: ran.append(None))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        model(tokens, **({"targets": tokens} | wrong))
    assert not ran
