"""``generate`` with captured steps, which a CPU runs instead: the tokens of a model that is called each time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import CompileConfig

from flexnsa.transformers import FlexNSACache, cuda_graphs
from tests.integrations.transformers import families
from tests.integrations.transformers.families import FEW, INDEX, ROPES, own, pad_left, tokens

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the replays of each captured step; a step on a CPU can stand for its graph."""
    counts: list[int] = []

    def capture(step: Callable[[], None], *_: object, **__: object) -> Callable[[], None]:
        step()  # warms up
        step()  # is captured
        counts.append(0)
        number = len(counts) - 1

        def replay() -> None:
            counts[number] += 1
            step()

        return replay

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "DEVICES", ["cpu"])
    return counts


MODELS: dict[str, Any] = {
    "three branches": lambda: families.converted("qwen3", FEW),
    "selected branch": lambda: families.converted("qwen3", FEW | {"branches": ["slc"]}),
    "indexer": lambda: families.converted("qwen3", FEW | INDEX | {"branches": ["slc"]}),
    "own decoder": own,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}, {"eos_token_id": [*range(3, 20)]}])
def test_tokens_are_those_of_a_model_that_is_called(model: Any, replays: list[int], options: dict[str, Any]) -> None:
    rows = pad_left([tokens(50), tokens(31), tokens(9)])  # and some end before others

    def generate(**how: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(**rows, **GREEDY | options, **how)

    want = generate(disable_compile=True)
    assert not replays
    assert torch.equal(generate(), want)
    assert replays == [want.shape[1] - 50 - 1]  # the first token comes from the prompt


def test_a_second_turn_goes_on_with_the_step_of_the_first(model: Any, replays: list[int]) -> None:
    x, cache = tokens(2, 40), FlexNSACache(model.config, 100)
    first = model.generate(x, **GREEDY, past_key_values=cache, attention_mask=torch.ones_like(x))
    more = torch.cat((first, tokens(2, 7)), dim=1)
    mask = torch.ones_like(more)
    kept, called = deepcopy(cache), deepcopy(cache)
    assert cache.captured is not None
    assert kept.captured is None  # there is no copy of a graph
    second = model.generate(more, **GREEDY, past_key_values=cache, attention_mask=mask)
    assert replays == [22]
    assert torch.equal(model.generate(more, **GREEDY, past_key_values=kept, attention_mask=mask), second)
    assert replays == [22, 11]  # a copy lies elsewhere
    for given in ({}, {"past_key_values": called}):
        assert torch.equal(model.generate(more, **GREEDY, attention_mask=mask, disable_compile=True, **given), second)


def test_a_cache_that_grows_is_captured_anew(model: Any, replays: list[int]) -> None:
    x = tokens(2, 20)
    cache = FlexNSACache(model.config, 24)
    got = model.generate(x, **GREEDY, past_key_values=cache, attention_mask=torch.ones_like(x))
    assert torch.equal(got, model.generate(x, **GREEDY, attention_mask=torch.ones_like(x), disable_compile=True))
    assert replays == [4, 6]  # a call between the two made room


def test_weights_that_lie_elsewhere_are_captured_anew(model: Any, replays: list[int]) -> None:
    x, cache = tokens(2, 20), FlexNSACache(model.config, 64)
    mask = torch.ones_like(x)
    first = model.generate(x, **GREEDY, past_key_values=cache, attention_mask=mask)
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    cache.reset()
    second = other.generate(x, **GREEDY, past_key_values=cache, attention_mask=mask)
    assert not torch.equal(first, second)
    assert torch.equal(second, other.generate(x, **GREEDY, attention_mask=mask, disable_compile=True))
    assert len(replays) == 2


def test_settings_that_have_changed_are_captured_anew(model: Any, replays: list[int]) -> None:
    """Only weights were compared: tokens went on by the branches that were open when the step was captured."""
    x, cache, model = tokens(2, 20), FlexNSACache(model.config, 64), deepcopy(model)
    mask = torch.ones_like(x)
    model.generate(x, **GREEDY, past_key_values=cache, attention_mask=mask)
    for layer in model.model.layers:
        if "flexnsa" in vars(model.config):
            model.config.flexnsa["impl"] = "reference"
        else:
            layer.attention.impl = "reference"
    for _ in range(2):
        cache.reset()
        model.generate(x, **GREEDY, past_key_values=cache, attention_mask=mask)
    assert replays == [11, 22]


def test_what_a_graph_would_leave_out_is_called(model: Any, replays: list[int]) -> None:
    x, cache, asked = tokens(1, 20), FlexNSACache(model.config, 64), deepcopy(model)
    mask = torch.ones_like(x)
    model.generate(x, **GREEDY, attention_mask=mask, use_cache=False)
    model.generate(x, **GREEDY, attention_mask=mask, compile_config=CompileConfig())
    with torch.autocast("cpu", torch.bfloat16):
        deepcopy(model).float().generate(x, **GREEDY, attention_mask=mask)
    seen: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    model.generate(x, **GREEDY, attention_mask=mask)
    hook.remove()
    assert len(seen) == 12
    with torch.no_grad():
        asked(input_ids=x, past_key_values=cache)
        out = asked.get_compiled_call()(input_ids=x[:, :1], past_key_values=cache, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert not replays


def test_a_mask_of_ones_own_is_refused_by_the_model(model: Any, replays: list[int]) -> None:
    x, cache = tokens(2, 20), FlexNSACache(model.config, 64)
    model.generate(x, **GREEDY, past_key_values=cache, attention_mask=torch.ones_like(x))
    mask = torch.ones(2, 1, 1, cache.seen + 1)
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask: expected "):
        model.get_compiled_call()(input_ids=x[:, :1], past_key_values=cache, attention_mask=mask)
    assert replays == [11]


def test_a_row_that_has_ended_keeps_no_token(model: Any, replays: list[int]) -> None:
    x, more = tokens(2, 20), tokens(2, 3)
    logits, lengths = [], []
    for forward in (model, model.get_compiled_call()):
        cache, mask = FlexNSACache(model.config, 64), torch.ones(2, 20)
        with torch.no_grad():
            model(input_ids=x, past_key_values=cache)
            for t in range(3):
                mask = torch.cat((mask, torch.tensor([[1.0], [t == 0]])), dim=1)
                out = forward(input_ids=more[:, t, None], past_key_values=cache, attention_mask=mask)
                logits.append(out.logits[: 2 if t == 0 else 1])
        lengths.append([kept.lengths.tolist() for kept in cache.kept])
    torch.testing.assert_close(logits[3:], logits[:3])
    assert lengths == [[[23, 21]] * 2] * 2
    assert replays == [3]


@pytest.mark.usefixtures("replays")
def test_logits_of_a_step_outlast_the_next(model: Any) -> None:
    """A graph writes them to the same memory each time."""
    cache, memory = FlexNSACache(model.config, 64), torch.zeros(1, 1, 64)
    with torch.no_grad():
        model(input_ids=tokens(1, 20), past_key_values=cache)
    step = cuda_graphs.CapturedStep(lambda *_: memory.add_(1), cache, None)
    logits = [step(tokens(1, 1), None) for _ in range(2)]
    assert [float(x.max()) for x in logits] == [3, 4]  # after two calls to be captured


@pytest.mark.usefixtures("replays")
def test_a_step_that_cannot_be_captured_leaves_the_cache_as_it_was(model: Any) -> None:
    x, cache = tokens(2, 20), FlexNSACache(model.config, 64)
    with torch.no_grad():
        model(input_ids=x, past_key_values=cache)

    def fail(*_: object) -> torch.Tensor:
        cache.layers[0].seen += 1  # as a layer does that gets as far
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        cuda_graphs.CapturedStep(fail, cache, None)
    assert [layer.seen for layer in cache.layers] == [20, 20]


def test_angles_that_depend_on_how_far_a_row_has_come_are_not_captured(replays: list[int]) -> None:
    x = tokens(1, 20)
    for kind, count in (("linear", 1), ("dynamic", 1)):
        model = families.converted("llama", FEW, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
        model.generate(x, **GREEDY, attention_mask=torch.ones_like(x))
        assert len(replays) == count


def test_on_a_cpu_nothing_is_captured(model: Any) -> None:
    assert not cuda_graphs.can_capture(model)


LONG = GREEDY | {"max_new_tokens": 40, "eos_token_id": [*range(3, 8)]}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["three branches", "selected branch", "given frequencies", "own decoder"])
def test_graphs_give_the_tokens_of_steps_that_are_called(kind: str) -> None:
    few = FEW | {"select_block_size": 16}  # the smallest tile of tensor cores
    options = few | {"branches": ["slc"]} if kind == "selected branch" else few
    turning = {"rope_parameters": ROPES["llama3"]} if kind == "given frequencies" else {}
    model = (own(nsa=few) if kind == "own decoder" else families.converted("qwen3", options, **turning)).float().cuda()
    rows = {name: x.cuda() for name, x in pad_left([tokens(50), tokens(31), tokens(9)]).items()}
    caches = [FlexNSACache(model.config, 64) for _ in range(2)]  # which grow on the way
    got, want = (
        model.generate(**rows, **LONG, past_key_values=cache, disable_compile=called)
        for cache, called in zip(caches, (False, True), strict=True)
    )
    assert torch.equal(got, want)
    assert caches[0].captured is not None
    assert caches[1].captured is None
    more = torch.cat((got, tokens(3, 7).cuda()), dim=1)
    mask = torch.cat((rows["attention_mask"], torch.ones(3, more.shape[1] - 50).cuda()), dim=1)
    got, want = (
        model.generate(more, **LONG, attention_mask=mask, past_key_values=cache, disable_compile=called)
        for cache, called in zip(caches, (False, True), strict=True)
    )
    assert torch.equal(got, want)
