"""The loss is that of the logits, whatever hangs on the head and whatever takes its place."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.testing import assert_close

from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.model import loss
from flexnsa.lm.model.loss import head_cross_entropy, only_multiplies

CONFIG = DecoderConfig(dim=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=50)
CHUNKS = {"one chunk": 2**30, "several chunks": 14 * 4 * CONFIG.vocab_size, "a position each": 4 * CONFIG.vocab_size}


class Capped(nn.Linear):
    """A head whose forward is more than a product."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().forward(input).tanh()


class CalledOtherwise(nn.Linear):
    """A head that does more when it is called, and whose forward is that of any linear map."""

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().__call__(input).tanh()


class LoRA(nn.Linear):
    """An adapter in place of a linear map, with a product of two more weights."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, bias=False)
        self.down, self.up = nn.Linear(dim, 4, bias=False), nn.Linear(4, out_dim, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + self.up(self.down(input))


class Doubled(nn.Module):
    """A parametrization that counts how often it computes the weight."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight


class Packed(Tensor):
    """Numbers that a product of their own reads, as of a quantized weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs or {})
        return (2 * result).as_subclass(Tensor) if func is F.linear else result


def patched(model: DecoderLM) -> None:
    model.head.forward = MethodType(lambda self, x: F.linear(x, self.weight).tanh(), model.head)  # pyright: ignore


def packed(model: DecoderLM) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Packed))


def replaced(make: Callable[[int, int], nn.Module]) -> Callable[[DecoderLM], None]:
    def replace(model: DecoderLM) -> None:
        model.head = make(CONFIG.dim, CONFIG.vocab_size)  # pyright: ignore[reportAttributeAccessIssue]

    return replace


HEADS: dict[str, Callable[[DecoderLM], object]] = {
    "plain": lambda _: None,
    "a hook": lambda model: model.head.register_forward_hook(lambda _head, _inputs, logits: 3 * logits.tanh()),
    "a hook before": lambda model: model.head.register_forward_pre_hook(lambda _head, inputs: (2 * inputs[0],)),
    "a hook of backward": lambda model: model.head.register_full_backward_hook(lambda _head, x, _out: (2 * x[0],)),
    "a forward of the object's own": patched,
    "a parametrization": lambda model: parametrize.register_parametrization(model.head, "weight", Doubled()),
    "a weight computed by a hook": lambda model: nn.utils.weight_norm(model.head),  # pyright: ignore[reportDeprecated]
    "a weight of a class of its own": packed,
    "a forward of the class's own": replaced(lambda dim, out: Capped(dim, out, bias=False)),
    "a call of the class's own": replaced(lambda dim, out: CalledOtherwise(dim, out, bias=False)),
    "an adapter": replaced(LoRA),
    "a bias": replaced(nn.Linear),
    "several modules": replaced(lambda dim, out: nn.Sequential(nn.Linear(dim, out, bias=False), nn.Tanh())),
}


def make(change: Callable[[DecoderLM], object] = lambda _: None) -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(CONFIG)
    nn.init.normal_(model.head.weight, std=0.3)
    change(model)
    return model.double()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1).masked_fill(tokens < 12, -100)


def gradients(model: DecoderLM, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_loss_of_the_logits(model: DecoderLM, **options: Any) -> None:
    tokens, targets = batch()
    for reduction in ("mean", "sum"):
        expected = F.cross_entropy(model(tokens, **options).flatten(0, 1), targets.flatten(), reduction=reduction)
        value = model(tokens, targets=targets.int(), reduction=reduction, **options)
        assert_close(value, expected)
        assert_close(gradients(model, value), gradients(model, expected))


@pytest.mark.parametrize("workspace", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_are_those_of_the_logits(head: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", workspace)
    assert_loss_of_the_logits(make(HEADS[head]))


def halve(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    return (inputs[0] / 2,) if getattr(module, "is_watched", False) else None


def cap(module: nn.Module, _inputs: object, output: Tensor) -> Any:
    return output.tanh() if getattr(module, "is_watched", False) else None


@pytest.mark.parametrize("kind", ["before", "behind"])
def test_a_hook_of_all_modules_is_one_of_the_head(kind: str) -> None:
    model = make()
    model.head.is_watched = True  # pyright: ignore[reportArgumentType]
    with register_module_forward_pre_hook(halve) if kind == "before" else register_module_forward_hook(cap):
        assert_loss_of_the_logits(model)


def test_a_head_that_is_its_weight_is_not_called_and_its_weight_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", CHUNKS["several chunks"])
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("called"))
    head, doubled = nn.Linear(32, 50, bias=False), Doubled()
    parametrize.register_parametrization(head, "weight", doubled)
    doubled.calls = 0
    head_cross_entropy(head, torch.randn(2, 23, 32), batch()[1], vocab_size=50).backward()
    assert doubled.calls == 1


@pytest.mark.parametrize("name", HEADS)
def test_which_heads_are_no_more_than_their_weight(name: str) -> None:
    weighed = only_multiplies(make(HEADS[name]).head)
    assert weighed == (name in ("plain", "a parametrization", "a weight of a class of its own"))


def test_a_hook_sees_slices_along_the_sequence_and_no_logits_wait_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", CHUNKS["several chunks"])
    model, seen, kept = make(), list[tuple[int, ...]](), list[int]()
    model.head.register_forward_hook(lambda _head, inputs, _logits: seen.append(tuple(inputs[0].shape)))
    tokens, targets = batch()

    def keep(x: Tensor) -> Tensor:
        kept.append(x.shape[-1] if x.dim() > 1 and x.numel() > CONFIG.vocab_size else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        value = model(tokens, targets=targets)
    slices = [(2, 3, 32)] * 7 + [(2, 2, 32)]
    assert seen == slices
    assert max(kept) > 0
    assert CONFIG.vocab_size not in kept
    value.backward()
    assert seen[len(slices) :] == slices[::-1]


@pytest.mark.parametrize("workspace", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("head", ["plain", "a hook", "an adapter"])
def test_loss_without_gradients_and_under_autocast(head: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", workspace)
    model = make(HEADS[head]).float()
    tokens, targets = batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        value = model(tokens, targets=targets)
        with torch.no_grad():
            assert_close(model(tokens, targets=targets), expected.detach(), rtol=2**-8, atol=0)
    assert_close(value, expected, rtol=2**-8, atol=0)
    assert gradients(model, value)["layers.0.mlp.up.weight"].any()


@pytest.mark.parametrize("head", ["a hook", "a bias", "an adapter"])
def test_a_chunk_draws_the_same_numbers_in_backward(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout in a head: what one pass draws, its own backward uses."""
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", CHUNKS["several chunks"])
    model = make(HEADS[head])
    masks: list[Tensor] = []

    def drop(_head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        masks.append(torch.rand_like(logits) < 0.5)
        return logits * masks[-1]

    model.head.register_forward_hook(drop)
    tokens, targets = batch()
    model(tokens, targets=targets).backward()
    forward, backward = masks[:8], masks[8:][::-1]
    assert all(torch.equal(one, other) for one, other in zip(forward, backward, strict=True))


@pytest.mark.parametrize("name", ["plain", "a hook", "a parametrization", "an adapter"])
def test_compiles_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = "one chunk" if name in ("a hook", "an adapter") else "several chunks"
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", CHUNKS[chunks])
    torch._dynamo.reset()
    head, targets = make(HEADS[name]).head, batch()[1]
    hidden = torch.randn(2, 23, 32, dtype=torch.float64, requires_grad=True)

    def loss_of(hidden: Tensor) -> Tensor:
        return head_cross_entropy(head, hidden, targets, vocab_size=50)

    values = [function(hidden) for function in (torch.compile(loss_of, fullgraph=True, backend="aot_eager"), loss_of)]
    assert_close(*values)
    assert_close(*(torch.autograd.grad(value, [hidden, *head.parameters()]) for value in values))


def test_a_called_head_in_a_transform_of_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WORKSPACE_BYTES", CHUNKS["several chunks"])
    model = make(HEADS["a bias"])
    tokens, targets = batch()
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (tokens,), {"targets": targets})

    assert_close(torch.func.grad(loss_of)(parameters), gradients(model, model(tokens, targets=targets)))
