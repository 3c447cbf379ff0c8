"""Indexers of released models are taught from outside: the loss, its gradient, and all that stays as it was."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from benchmarks.harness.memory import AllocatorProbe
from flexnsa.attention import shares
from flexnsa.transformers import teach_indexers
from flexnsa.transformers.index_loss import Attention, differentiate_index
from flexnsa.transformers.released_indexers import RELEASED, Features, ReleasedIndexer
from flexnsa.transformers.taught_layers import indexed_layers
from tests.integrations.transformers.families import FEW, converted, dense, tokens
from tests.integrations.transformers.released_models import KINDS, plain_choice, plain_loss, plain_scores, released

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CAUSAL = tuple(kind for kind in KINDS if kind != "mistral_large4")


def indexers(model: Any) -> dict[str, Tensor]:
    """Return the gradients of the indexers' parameters."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." in name}
    assert found
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make all tensors on a device."""
    with torch.device(request.param):
        yield request.param


def gradients(model: Any, x: Tensor, stage: str = "warmup", weight: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Teach by one backward that begins at what the model returns."""
    model.zero_grad()
    with teach_indexers(model, stage, weight=weight):
        model(x, use_cache=False, **options)[0].sum().backward()
    return indexers(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_taught_model_computes_what_it_did_and_may_be_frozen(kind: str, attention: str) -> None:
    if (kind, attention) == ("hy_v4", "sdpa"):
        attention = "eager"  # the only one that it has
    model, x = released(kind).eval(), tokens(2, 45)
    model.set_attn_implementation(attention)
    before = model(x)[0]
    first = next(model.parameters()).requires_grad_(False)
    with teach_indexers(model, "joint"):
        assert torch.equal(model(x)[0], before)
    with teach_indexers(model, "warmup") as teaching:
        assert not torch.equal(model(x)[0], before)
        loss = teaching.loss()
        with torch.no_grad():
            assert not model(x)[0].requires_grad
        learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert learning == {name for name, _ in model.named_parameters() if ".indexer." in name}
        model.requires_grad_(False)(x)
        torch.testing.assert_close(teaching.loss(), loss)
    assert torch.equal(model(x)[0], before)
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1
    assert not first.requires_grad
    assert model.config._attn_implementation == attention
    assert not any("forward" in vars(module) or "taught" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("stage", "weights", "length"),
    [
        *(("warmup", "mass", 3), ("warmup", "mean", 37), ("warmup", "mass", 61)),
        *(("joint", "mean", 3), ("joint", "mass", 37), ("joint", "mean", 61)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.usefixtures("device")
def test_loss_and_gradient_are_those_of_the_dense_formula(
    kind: str, stage: str, weights: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher is the model's own attention to all past tokens, and in ``joint`` the choice is its own too."""
    model = released(kind).double()
    model.set_attn_implementation("eager")
    given: dict[Any, dict[str, Any]] = {}
    probs: list[tuple[Any, Tensor]] = []
    choices: dict[Any, Tensor] = {}
    module = sys.modules[type(model).__module__]
    attend, ahead = module.eager_attention_forward, torch.full((length, length), -torch.inf).triu(1)

    def attend_twice(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        probs.append((layer, attend(layer, q, k, v, ahead.to(q.dtype), **options)[1].detach()))
        return attend(layer, q, k, v, mask, **options)

    monkeypatch.setattr(module, "eager_attention_forward", attend_twice)

    def note(indexer: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        given[indexer] = inspect.signature(type(indexer).forward).bind(indexer, *args, **kwargs).arguments
        choices[indexer] = out

    with teach_indexers(model, stage, query_weights=weights) as teaching:
        for layer in indexed_layers(model):
            if layer.indexer is not None:
                layer.indexer.register_forward_hook(note, with_kwargs=True)
        model(tokens(2, length), use_cache=False)
        loss = teaching.loss()
        loss.backward()
    taught = indexers(model)
    model.zero_grad()
    expected, leader = torch.zeros((), dtype=torch.float64), None
    for layer, attention in probs:
        leader = layer.indexer if layer.indexer is not None else leader if hasattr(layer, "skip_topk") else None
        if leader is not None:
            inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given[leader].items()}
            scores = plain_scores(kind, leader, inputs)
            chosen = plain_choice(kind, leader, choices[leader], scores) if stage == "joint" else None
            expected = expected + plain_loss(kind, leader, scores, attention, chosen, by_mass=weights == "mass")
    assert len(probs) == {"qwen4_exp": 2}.get(kind, 3)
    assert_close(loss.detach().double(), expected.detach(), atol=2e-7, rtol=2e-7)
    expected.backward()
    for name, grad in indexers(model).items():
        assert_close(taught[name], grad, atol=2e-7 * max(1.0, grad.abs().max().item()), rtol=0)


class Known(ReleasedIndexer):
    """Ranks tokens by the products of the attention itself, from the best on or from the worst on."""

    num_chosen = 4

    def features(self, given: dict[str, Any], tokens: Tensor) -> Features:
        raise NotImplementedError

    def scores(self, features: Features, visible: Tensor) -> Tensor:  # noqa: ARG002
        return self.module * features.q @ features.k.mT


def test_recall_is_the_mass_of_the_chosen_over_that_of_the_best() -> None:
    q, k = torch.randn(2, 1, 1, 20, 8, dtype=torch.float64)
    probs = (q @ k.mT).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[0, 0]
    choosing = [row[: token + 1].sort().values for token, row in enumerate(probs) if token + 1 > Known.num_chosen]
    best, worst = sum(row[-4:].sum() for row in choosing), sum(row[:4].sum() for row in choosing)
    attention = Attention(q, k, torch.arange(20)[None], None, 1.0, None)
    options = {"among_chosen": False, "by_mass": True, "gradient": False}
    for sign, mass in ((1, best), (-1, worst)):
        sums, _ = differentiate_index(Known(sign), Features(q, k), attention, None, **options)
        assert_close((sums.found, sums.best), (mass, best))


@pytest.mark.parametrize("stage", ["warmup", "joint"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_queries_and_checkpoints_change_nothing(
    kind: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share an indexer run again before its own; the loss does not."""
    model, x = released(kind).double(), tokens(2, 61)
    whole = gradients(model, x, stage)
    with monkeypatch.context() as patch:
        patch.setitem(shares.CHUNK_SCORES, "cpu", 7 * 2 * 4 * 61)
        assert_close(gradients(model, x, stage), whole)
    if kind in CAUSAL:
        model.gradient_checkpointing_enable({"use_reentrant": stage == "warmup"})
        model.enable_input_require_grads()
        assert_close(gradients(model, x, stage), whole)


@pytest.mark.parametrize("kind", ["qwen4_exp", "minimax_m3_vl", "deepseek_v32"])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_memory_of_a_loss_is_linear(kind: str, device: str) -> None:
    """From 4k tokens on, as 256 queries of each sequence are compared in chunks."""
    layer = next(layer for layer in indexed_layers(released(kind)) if layer.indexer is not None)
    ranks, peaks = RELEASED[kind](layer.indexer), []
    heads = 2 if kind == "minimax_m3_vl" else 4
    for length in (4096, 16384, 65536):
        at = torch.arange(256)[None] * (length // 256) + length // 256 - 1
        weights = torch.rand(1, heads, 256) if kind == "deepseek_v32" else None
        features = Features(torch.randn(1, heads, 256, 16), torch.randn(1, 1, length, 16), weights)
        attention = Attention(torch.randn(1, 4, 256, 16), torch.randn(1, 2, length, 16), at, None, 0.25, None)
        with AllocatorProbe(device) as memory:
            differentiate_index(ranks, features, attention, None, among_chosen=False, by_mass=True, gradient=True)
            memory.mark("loss")
        peaks.append(memory.peak["loss"])
    assert peaks[0] > 256 * 16 * 4
    assert all(log(after / before, 4) <= 1.05 for before, after in pairwise(peaks))


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_pass_is_taught_once(kind: str) -> None:
    model, x = released(kind), tokens(2, 45)
    whole = gradients(model, x, "joint")
    rest = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for by_hand in (False, True):
        model.zero_grad()
        with teach_indexers(model, "joint", weight=1.0) as teaching:
            out, loss = model(x, use_cache=False)[0].sum(), teaching.loss()
            (out + loss if by_hand else out).backward()
        assert_close(indexers(model), whole)
        assert_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, rest)
    model.zero_grad()
    with teach_indexers(model, "joint") as teaching:
        model(x, use_cache=False)
        teaching.loss().backward()
        assert_close(indexers(model), whole)
        message = "loss, recall: expected a pass of the model since the last call, got none"
        with pytest.raises(ValueError, match=message):
            teaching.loss()
    assert all(p.grad is None for name, p in model.named_parameters() if ".indexer." not in name)


@pytest.mark.parametrize("kind", ["minimax_m3_vl", "deepseek_v32"])
def test_a_pass_that_was_taught_keeps_no_memory(kind: str) -> None:
    model, x, losses = released(kind), tokens(2, 45), list[Tensor]()
    for asks in (True, False):
        with teach_indexers(model, num_queries=20) as teaching:
            kept: list[int] = []
            for _ in range(4):
                model(x, use_cache=False)[0].sum().backward()
                losses += [teaching.loss().detach()] if asks else []
                gc.collect()
                kept.append(sum(type(each) is Tensor for each in gc.get_objects()) - len(losses))
            assert kept[1] == kept[2] == kept[3]
            if not asks:
                assert_close(teaching.loss().detach(), torch.stack(losses).mean())


def test_batches_accumulate() -> None:
    model, halves = released("deepseek_v32"), [tokens(2, 45), tokens(2, 45) // 2]
    with teach_indexers(model, weight=0.5, num_queries=45):
        for half in halves:
            model(half, use_cache=False)[0].sum().backward()
    taught = indexers(model)
    apart = [gradients(model, half) for half in halves]
    assert_close(taught, {name: (apart[0][name] + apart[1][name]) / 2 for name in taught})


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_rows_teach_what_they_teach_alone(kind: str) -> None:
    """A packed row repeats a document, so that both parts have one loss."""
    model, x = released(kind), tokens(1, 37)
    if kind == "qwen4_exp":  # linear layers of transformers need kernels to tell packed documents apart
        model = released(kind, layer_types=["indexed_attention"] * 3)
    close: dict[str, Any] = {"atol": 2e-6, "rtol": 2e-4}
    alone = gradients(model, x)
    mask = torch.tensor([[0] * 11 + [1] * 37])
    rows: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([x, tokens(1, 11)], {"attention_mask": mask.flip(1)}),
        ([tokens(1, 11), x], {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}),
        ([x, x], {"position_ids": torch.arange(37).repeat(2)[None]}),
    ]
    for parts, options in rows[:1] if kind == "minimax_m3_vl" else rows:  # that model is wrong for the others
        assert_close(gradients(model, torch.cat(parts, 1), **options), alone, **close)


def test_rows_that_a_model_is_wrong_for_are_refused() -> None:
    model, x = released("minimax_m3_vl"), tokens(1, 37)
    mask = torch.tensor([[0] * 4 + [1] * 33])
    refused: dict[str, dict[str, Any]] = {
        "attention_mask: expected padding on the right": {"attention_mask": mask},
        "attention_mask: expected no gap": {"attention_mask": mask.roll(9, 1)},
        "attention_mask: expected \\(B, S\\)": {"attention_mask": torch.ones(1, 1, 37, 37).bool()},
        "position_ids: expected one document a row": {"position_ids": torch.arange(37)[None] % 20},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            gradients(model, x, **options)
        with torch.no_grad(), teach_indexers(model) as teaching:
            model(x, **options)  # nothing is taught, nor measured
            with pytest.raises(ValueError, match="expected a pass"):
                teaching.recall()


def test_what_cannot_be_taught_is_refused() -> None:
    known = ", ".join(KINDS)
    for model, kind in ((dense("llama"), "llama"), (converted("qwen3", FEW), "flexnsa_qwen3")):
        with pytest.raises(ValueError, match=f"model: expected indexers of {known}, got '{kind}'"):
            teach_indexers(model)
    model = released("deepseek_v32")
    wrong: list[dict[str, Any]] = [{"stage": "x"}, {"weight": 0}, {"num_queries": 0}, {"query_weights": "x"}]
    for options in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
            teach_indexers(model, **options)
    with teach_indexers(model), pytest.raises(ValueError, match="model: expected one that is not taught already"):
        teach_indexers(model)
    model.config._attn_implementation = "flash-mla"
    with pytest.raises(ValueError, match="model: expected attn_implementation 'sdpa' or 'eager'"):
        teach_indexers(model)


@pytest.mark.parametrize("kind", ["qwen4_exp", "glm_moe_dsa"])
def test_indexers_learn_beside_adapters(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="pip install '.[hf-tests]'")
    adapted = peft.get_peft_model(released(kind), peft.LoraConfig(r=2, target_modules=["o_proj"]))
    frozen = [parameter.requires_grad for parameter in adapted.parameters()]
    with teach_indexers(adapted, "joint") as teaching:
        adapted(input_ids=tokens(2, 45), labels=tokens(2, 45), use_cache=False).loss.backward()
        assert teaching.loss() > 0
    learned = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert {".indexer." in name or "lora_" in name for name in learned} == {True}
    assert all(grad.any() for grad in indexers(adapted).values())
    assert [parameter.requires_grad for parameter in adapted.parameters()] == frozen


@pytest.mark.parametrize("kind", CAUSAL)
def test_bf16_is_close(kind: str) -> None:
    model, x = released(kind), tokens(2, 61)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        with teach_indexers(model.to(dtype)) as teaching:
            model(x, use_cache=False)[0].sum().backward()
            assert all(grad.isfinite().all() for grad in indexers(model).values())
            losses.append(teaching.loss().item())
        model.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("kind", ["qwen4_exp", "glm_moe_dsa"])
def test_indexers_learn(kind: str) -> None:
    """Of a random model; a uniform guess is no longer better, and every layer recalls more."""
    model, x = released(kind), tokens(4, 61)
    with teach_indexers(model) as teaching:
        optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        recalls, losses = [], []
        for _ in range(40):
            model(x, use_cache=False)
            loss = teaching.loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recalls.append(teaching.recall())
            losses.append((loss.item(), teaching.uniform_loss().item()))
    assert losses[-1][0] < losses[-1][1] < losses[0][0]
    assert (recalls[-1] > recalls[0]).all()
    with teach_indexers(model) as teaching, torch.no_grad():
        model(x[:, :9])
        assert teaching.recall().isnan().all()  # nothing had to be chosen


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("kind", "stage"), [("qwen4_exp", "joint"), ("glm_moe_dsa", "warmup")])
def test_data_parallel_steps_go_on(kind: str, stage: str) -> None:
    """Without a loss, DDP stops at the second step, because indexers are not used."""
    x = tokens(2, 45)
    whole = gradients(released(kind), x, stage)
    for shard in (False, True):
        model = released(kind)
        teaching = teach_indexers(model, stage)
        if shard:
            for layer in model.model.layers:
                fully_shard(layer)
        wrapped: Any = fully_shard(model) if shard else DistributedDataParallel(model)
        for _ in range(3):
            model.zero_grad()
            wrapped(input_ids=x, use_cache=False)[0].sum().backward()
        found = indexers(model)
        full = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in found.items()}
        assert_close(full, whole)
        teaching.remove()
