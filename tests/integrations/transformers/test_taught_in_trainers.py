"""Stages of indexers in trainers of transformers: what they move, log and save, and how they go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from flexnsa.transformers import TeachSelection
from tests.integrations.transformers.families import FEW, converted, tokens
from tests.integrations.transformers.released_models import released


def train(model: Any, out: Path, teach: TeachSelection, resume: str | None = None, **options: Any) -> Trainer:
    given = {"output_dir": str(out), "max_steps": 4, "logging_steps": 1, "use_cpu": True, "report_to": []}
    given |= {"save_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True, "learning_rate": 1e-2}
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens(8, 45)]
    trainer = Trainer(model, TrainingArguments(**given | options), train_dataset=rows, callbacks=[teach])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("kind", ["qwen4_exp", "glm_moe_dsa"])
def test_stages_of_a_trainer_survive_a_resume(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of warm-up move indexers alone; a run that is resumed among them ends where one without a break does.

    Both begin with a dense checkpoint, for which each makes random indexers of its own.
    """
    weights, messages = released(kind).state_dict(), list[str]()
    given = {name: x for name, x in weights.items() if ".indexer." not in name}
    released(kind).save_pretrained(tmp_path / "dense", state_dict=given)
    whole, resumed = (released(kind).from_pretrained(tmp_path / "dense") for _ in range(2))
    start = {name: x.clone() for name, x in whole.state_dict().items()}
    assert all(torch.equal(start[name], x) for name, x in given.items())
    others = [name for name, x in resumed.state_dict().items() if not torch.equal(x, start[name])]
    assert others == [name for name, x in weights.items() if name not in given and x.dim() > 1]
    monkeypatch.setattr(logging.get_logger(), "info", messages.append)
    run = train(whole, tmp_path / "whole", TeachSelection(warmup_steps=3, num_queries=20), save_steps=3)
    for start_of, message in zip(("'warmup' from step 0", "'joint' from step 3"), messages, strict=True):
        sizes = [x.numel() for name, x in whole.named_parameters() if "joint" in start_of or ".indexer." in name]
        assert message.startswith(f"stage {start_of}: {sum(sizes):,} parameters learn")
        assert sum(int(line.split()[1]) for line in message.splitlines() if line.startswith("learns ")) == len(sizes)
    warm = released(kind).from_pretrained(tmp_path / "whole/checkpoint-3").state_dict()
    moved = {name for name, x in start.items() if not torch.equal(x, warm[name])}
    assert moved == {name for name in start if ".indexer." in name}
    learned = {name: x for name, x in whole.state_dict().items() if x.dim() > 1 and x.is_floating_point()}
    assert not any(torch.equal(x, warm[name]) for name, x in learned.items())
    logged = [entry for entry in run.state.log_history if "selection_loss" in entry]
    assert len(logged) == 4
    assert all({"selection_loss_uniform", "selection_recall", "loss"} <= entry.keys() for entry in logged)
    assert not hasattr(whole, "taught")
    cut = released(kind)
    cut.load_state_dict(start)
    train(cut, tmp_path / "cut", TeachSelection(warmup_steps=3, num_queries=20))
    resume = str(tmp_path / "cut/checkpoint-2")
    train(resumed, tmp_path / "resumed", TeachSelection(warmup_steps=3, num_queries=20), resume)
    assert_close(resumed.state_dict(), whole.state_dict(), atol=0, rtol=0)


def test_checkpoints_of_adapters_keep_what_indexers_learn(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install '.[hf-tests]'")

    def adapted(**options: Any) -> Any:
        set_seed(0)
        return peft.get_peft_model(released("minimax_m3_vl"), peft.LoraConfig(target_modules=["o_proj"], **options))

    with pytest.raises(ValueError, match=r"model: expected adapters with modules_to_save=\['indexer'\]"):
        train(adapted(), tmp_path, TeachSelection())
    whole, resumed = (adapted(modules_to_save=["indexer"]) for _ in range(2))
    train(whole, tmp_path, TeachSelection(warmup_steps=3))
    start, end = adapted(modules_to_save=["indexer"]).state_dict(), whole.state_dict()
    learned = {name for name, x in start.items() if not torch.equal(x, end[name])}
    kinds = {re.sub(r".*self_attn.|.default.*", "", name) for name in learned}
    assert kinds == {"indexer.modules_to_save", "o_proj.lora_B"}
    train(resumed, tmp_path / "resumed", TeachSelection(warmup_steps=3), str(tmp_path / "checkpoint-2"))
    assert_close(resumed.state_dict(), whole.state_dict(), atol=0, rtol=0)


def test_a_converted_model_has_no_warm_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="warmup_steps: expected 0"):
        train(converted("qwen3", FEW), tmp_path, TeachSelection(warmup_steps=1))
