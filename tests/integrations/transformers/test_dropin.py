"""``attn_implementation="flexnsa"``: dense while all blocks are selected, and laid out in memory as dense attention."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import AttentionInterface, CompileConfig

from flexnsa.attention.dispatch import attend
from flexnsa.transformers import dropin, softmax
from tests.integrations.transformers.families import ALL, FAMILIES, FEW, dense, pad_left, sparse, tokens
from tests.integrations.transformers.test_one_model import THREE

OPTIONS = {"default": FEW, "three branches": THREE}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=OPTIONS)
def few(request: pytest.FixtureRequest) -> Any:
    """A model that leaves most keys out."""
    return sparse("llama", OPTIONS[request.param])


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_dense_model_while_every_block_is_selected(family: str) -> None:
    x, padded = tokens(2, 70), pad_left([tokens(50), tokens(31)])
    model = dense(family)
    want = model(x, labels=x)
    want.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    generated = [model.generate(**padded, **GREEDY, num_beams=beams) for beams in (1, 3)]

    same = sparse(family, ALL)
    got = same(x, labels=x)
    got.loss.backward()

    assert_close(got.logits, want.logits)
    assert_close({name: parameter.grad for name, parameter in same.named_parameters()}, gradients)
    assert_close([same.generate(**padded, **GREEDY, num_beams=beams) for beams in (1, 3)], generated)


@torch.no_grad()
def test_scores_are_scaled_as_the_model_says() -> None:
    models, x = (dense("llama"), sparse("llama", ALL)), tokens(1, 60)
    usual = models[0](x).logits
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.scaling *= 3
    want = models[0](x).logits
    assert (want - usual).abs().max() > 1e-2
    assert_close(models[1](x).logits, want)


def test_under_autocast_all_that_is_attended_to_is_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with weights in float32 gives that, and kernels take keys and values of one dtype only."""
    seen: list[Any] = []

    def attend_seeing(implementation: Any, q: Tensor, keys: Any, *rest: Any, **options: Any) -> Any:
        seen.append({q.dtype, *(x.dtype for x in asdict(keys).values())})
        return attend(implementation, q, keys, *rest, **options)

    monkeypatch.setattr(softmax, "attend", attend_seeing)
    model = sparse("qwen3", THREE).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens(1, 40), use_cache=False)
        model.generate(tokens(1, 40), max_new_tokens=2)
    assert [*seen[:2], *map(len, seen[2:])] == [{torch.bfloat16}] * 2 + [1] * 4


def test_gradients_flow_through_a_cache(few: Any) -> None:
    x, embedding = tokens(2, 50), few.get_input_embeddings().weight
    few(x).logits[:, 30:].square().mean().backward()
    want, embedding.grad = embedding.grad, None
    cache = few(x[:, :30], use_cache=True).past_key_values
    few(x[:, 30:], past_key_values=cache).logits.square().mean().backward()
    assert_close(embedding.grad, want)


def test_options_are_read_from_the_config_and_default_to_the_selected_branch() -> None:
    x = tokens(1, 70)
    defaults = dense("llama", attn_implementation="flexnsa")
    assert_close(defaults(x).logits, dense("llama")(x).logits)  # 1,024 tokens are selected
    without_scores = sparse("llama", FEW | {"branches": ["win"], "gates": [0, 1, 1], "window_size": 512})
    assert_close(without_scores(x).logits, dense("llama")(x).logits)
    for options, message in (
        ({"window": 3}, "config.flexnsa: expected some of branches, gates, impl, local, compress_block_size"),
        ({"gates": [1.0]}, "gates: expected a number for each of"),
        ({"branches": ["all"]}, "branches: expected some of"),
        ({"impl": "fast"}, "impl: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse("llama", options)(x)


def test_compiled_as_one_graph_it_has_the_same_gradients() -> None:
    """Of padded rows: others are in ``test_one_model``. For Inductor, a converted model stands for all."""
    few = sparse("llama", FEW, num_hidden_layers=1)
    batch = pad_left([tokens(40), tokens(25)])
    results: list[list[Tensor]] = []
    for model in (few, torch.compile(few, fullgraph=True, backend="aot_eager")):
        logits = model(**batch, use_cache=False).logits[:, -25:]
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(few.parameters()))])
    for got, want in zip(results[1], results[0], strict=True):  # the model's own norms and rotation are fp32
        assert_close(got, want, rtol=0, atol=64 * torch.finfo(torch.float32).eps * want.abs().max().item())


@torch.no_grad()
def test_steps_on_a_cache_of_fixed_size_compile_as_one_graph() -> None:
    """On a GPU, transformers compiles them without being asked."""
    few = sparse("llama", FEW, num_hidden_layers=1)
    rows = pad_left([tokens(40), tokens(25)])
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)  # pyright: ignore[reportArgumentType]
    config._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue]  (a flag that is there for tests)
    torch._dynamo.reset()
    counters.clear()
    got = few.generate(**rows, **GREEDY, cache_implementation="static", compile_config=config)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got, few.generate(**rows, **GREEDY))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mistral", "sliding_window": 16}, "sliding_window: expected None .* got 16"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0 .* got 0.1"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    model = sparse(changes.pop("family", "llama"), FEW, **changes).train()
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 40), use_cache=False)


def test_a_mask_of_ones_own_is_refused() -> None:
    model, x = sparse("llama", FEW), tokens(1, 20)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match=r"attention_mask: expected \(B, S\) .* got a tensor \(1, 1, 20, 20\)"):
        model(x, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected one run of tokens a row, .* got holes in row 0"):
        model(x, attention_mask=torch.tensor([[1] * 9 + [0] + [1] * 10]))


Outputs = list[Tensor]


def packed() -> dict[str, Tensor]:
    return {"input_ids": tokens(1, 50), "position_ids": torch.cat((torch.arange(30), torch.arange(20)))[None]}


BATCHES: dict[str, Any] = {
    "whole rows": lambda: {"input_ids": tokens(2, 50)},
    "padding on the left": lambda: pad_left([tokens(50), tokens(31)]),
    "padding on the right": lambda: {name: x.flip(1) for name, x in pad_left([tokens(50), tokens(31)]).items()},
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
@pytest.mark.parametrize("branches", OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_are_contiguous(batch: str, branches: str, trains: bool, outputs: Outputs) -> None:
    x, model = BATCHES[batch](), sparse("llama", OPTIONS[branches])
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
