"""Trainers of others: packed batches train as their documents do, and callbacks teach what is ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

from flexnsa import SelectionLoss
from flexnsa.optim import index_parameters
from flexnsa.transformers import TeachSelection, UpTraining
from tests.integrations.transformers.families import (
    FEW,
    INDEX,
    INDEXED,
    alive,
    converted,
    own,
    sparse,
    tokenizer,
    tokens,
)
from tests.integrations.transformers.test_mixed_layers import mixed

datasets = pytest.importorskip("datasets", reason="pip install '.[hf-tests]'")
trl = pytest.importorskip("trl", reason="pip install '.[hf-tests]'")
peft = pytest.importorskip("peft", reason="pip install '.[hf-tests]'")

DOCUMENTS = [tokens(length).tolist() for length in (40, 3, 61, 25, 17, 30, 50, 12)]
MODELS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW),
    "drop-in, mixed": lambda: mixed("gemma3"),
    "converted": lambda: converted("qwen3", FEW),
    "own decoder": own,
    "adapted": lambda: peft.get_peft_model(converted("qwen3", FEW), peft.LoraConfig(r=4, target_modules=["q_proj"])),
}


def options(out: Path, **others: Any) -> dict[str, Any]:
    given = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1}
    given |= {"output_dir": str(out), "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return given | {"lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, **others}


def sft(model: Any, out: Path, **others: Any) -> Any:
    """TRL's trainer with packing."""
    callbacks = others.pop("callbacks", None)
    packing = {"packing": True, "max_length": 96, "bf16": False, "gradient_checkpointing": False}
    arguments = trl.SFTConfig(**options(out, **packing, **others))
    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    return trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


def flat(model: Any, out: Path, **others: Any) -> Trainer:
    """Transformers' trainer with documents in one sequence, told apart by positions."""
    callbacks = others.pop("callbacks", None)
    rows: Any = [{"input_ids": document} for document in DOCUMENTS]
    collate, arguments = DataCollatorWithFlattening(), TrainingArguments(**options(out, **others))
    return Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=callbacks)


TRAINERS: dict[str, Any] = {"sft": sft, "flat": flat}


def loss_of_documents(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of the tokens of a packed sequence, each document by itself."""
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    losses, count = [], 0
    for first, last in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
        document = batch["input_ids"][:, first:last]
        logits = model(input_ids=document, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, document[0, 1:], reduction="sum"))
        count += last - first - 1
    return torch.stack(losses).sum() / count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_packed_batch_trains_as_its_documents_do(trainer: str, name: str, tmp_path: Path) -> None:
    run = TRAINERS[trainer](MODELS[name](), tmp_path)
    batch = run._prepare_inputs(next(iter(run.get_train_dataloader())))
    model = run.model.train()
    assert len((batch["position_ids"] == 0).nonzero()) > 1
    run.compute_loss(model, dict(batch)).backward()
    got = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    loss_of_documents(model, batch).backward()
    for name_of, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(got[name_of], parameter.grad, atol=1e-6, rtol=1e-4, msg=name_of)


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        *(("sft", "drop-in, mixed"), ("sft", "own decoder"), ("dpo", "converted"), ("dpo", "adapted")),
        *(("dpo", "own decoder"), ("plain", "drop-in"), ("plain", "converted"), ("plain", "own decoder")),
    ],
)
def test_metrics_of_predictions_are_logged(trainer: str, name: str, tmp_path: Path) -> None:
    model, expected = MODELS[name]().float(), {"sft": "mean_token_accuracy", "dpo": "rewards/margins", "plain": "right"}
    if trainer == "sft":
        run = sft(model, tmp_path)
    elif trainer == "dpo":
        pairs = {"prompt": ["w4 w5"] * 4, "chosen": [" w6 w7 w8"] * 4, "rejected": [" w9 w8"] * 4}
        arguments = trl.DPOConfig(**options(tmp_path, bf16=False, gradient_checkpointing=False))
        rows: Any = datasets.Dataset.from_dict(pairs)
        reference = None if name == "adapted" else MODELS[name]().float()  # else read from the folder of the model
        run: Any = trl.DPOTrainer(model, reference, arguments, train_dataset=rows, processing_class=tokenizer())
    else:
        run = flat(model, tmp_path)
        run.compute_metrics = lambda told: {"right": float((told.predictions.argmax(-1) == told.label_ids).mean())}
    run.train()
    if trainer == "plain":
        run.evaluate(run.train_dataset)
    entries = [item for entry in run.state.log_history for item in entry.items()]
    logged = [value for each, value in entries if each.endswith(expected[trainer])]
    assert logged
    assert all(math.isfinite(value) for value in logged)


@pytest.mark.parametrize("name", ["converted", "own decoder"])
def test_trl_takes_a_saved_model_that_is_loaded(name: str, tmp_path: Path) -> None:
    MODELS[name]().float().save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="module transformers has no attribute FlexNSA"):
        sft(str(tmp_path), tmp_path)
    sft(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path).train()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_up_training_is_a_callback_of_any_trainer(trainer: str, tmp_path: Path) -> None:
    model = converted("qwen3", FEW).float()
    before = {name: x.clone() for name, x in model.named_parameters()}
    TRAINERS[trainer](model, tmp_path, callbacks=[UpTraining(opening_steps=4, frozen_steps=9)]).train()
    changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed
    assert all(any(new in name for new in ("_cmp", "_win", "compress_", "gate")) for name in changed)
    assert model.config.flexnsa["opening"] == 0.5


TAUGHT: dict[str, Any] = {
    "converted": lambda: converted("qwen3", INDEXED),
    "own decoder": lambda: alive(own(nsa=FEW | INDEX, index_rank=4)),
    "without logits": lambda: alive(own(nsa=FEW | INDEX, index_rank=4, skip_logits=True)),
}


@pytest.mark.parametrize(
    ("trainer", "name", "accumulation"),
    [
        *(("sft", "converted", 1), ("sft", "own decoder", 2), ("flat", "converted", 2), ("flat", "own decoder", 1)),
        ("flat", "without logits", 2),
    ],
)
def test_selection_is_taught_in_any_trainer(trainer: str, name: str, accumulation: int, tmp_path: Path) -> None:
    """A step moves indexers by the gradient of the mean selection loss of its batches, and nothing else by it."""
    model, weight, rate = TAUGHT[name]().float(), 0.5, 1e-2
    teach = TeachSelection(weight=weight, num_queries=20, seed=3)
    accumulate = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "learning_rate": rate}
    run = TRAINERS[trainer](model, tmp_path, callbacks=[teach], **accumulate)
    before = {each: x.detach().clone() for each, x in model.named_parameters()}
    fresh, batches = TAUGHT[name]().float().train(), []
    prepare = run._prepare_inputs
    run._prepare_inputs = lambda inputs: batches.append(prepare(inputs)) or batches[-1]
    run.train()
    moved = [(before[each] - x) / rate for each, x in model.named_parameters() if ".indexer." in each]
    losses = []
    for batch in batches:
        selection = SelectionLoss(num_queries=20, seed=3, step=0)
        options = {each: batch[each] for each in ("input_ids", "position_ids")}
        fresh(**options, labels=batch["labels"], use_cache=False, selection=selection)
        losses.append(selection.total)
    (weight * torch.stack(losses).mean()).backward()
    for got, parameter in zip(moved, index_parameters(fresh), strict=True):
        assert_close(got, parameter.grad, atol=2e-5, rtol=1e-2)
    logged = [entry["selection_loss"] for entry in run.state.log_history if "selection_loss" in entry]
    assert logged[0] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    model.zero_grad()
    model.train()(tokens(1, 40), labels=tokens(1, 40), use_cache=False).loss.backward()  # not taught any longer
    assert all(not parameter.grad.any() for parameter in index_parameters(model) if parameter.grad is not None)


def test_what_cannot_be_taught_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model: expected one with indexers, got 'FlexNSAQwen3ForCausalLM'"):
        flat(converted("qwen3", FEW), tmp_path, callbacks=[TeachSelection()]).train()
    with pytest.raises(ValueError, match="model: expected one with indexers, got 'LlamaForCausalLM'"):
        flat(sparse("llama", FEW), tmp_path, callbacks=[TeachSelection()]).train()
    wrong: list[dict[str, Any]] = [{"weight": 0}, {"num_queries": 0}, {"query_weights": "x"}]
    for options in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
            TeachSelection(**options)
    with pytest.raises(TypeError):
        TeachSelection(queries=3)
