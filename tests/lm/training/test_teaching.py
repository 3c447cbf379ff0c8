"""The selection loss of a training step: of the whole step, beside the loss of the language, and for indexers alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexnsa import SelectionLoss
from flexnsa.lm import DecoderConfig, DecoderLM, TrainConfig, Trainer, read_corpus, run
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.lm.training.trainer import draw_step, language_loss
from flexnsa.optim import index_parameters
from tests.support.inputs import TINY

NSA = replace(TINY, index_heads=2, index_block_size=2, index_stride=2)
MODEL = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, nsa=NSA)
TRAINING = TrainConfig(steps=2, batch_size=4, seq_len=64, warmup_steps=1, eval_sequences=4)


def make(text_folder: Path, model: DecoderConfig = MODEL, **fields: object) -> Trainer:
    torch.manual_seed(0)
    return Trainer(DecoderLM(model), read_corpus(text_folder), replace(TRAINING, **fields))


def test_parts_of_a_step_add_up_to_the_whole(text_folder: Path) -> None:
    whole, parts = make(text_folder), make(text_folder, batch_size=1, grad_accumulation=4)
    for _ in range(2):
        one, other = whole.train_step(), parts.train_step()
        assert other.to_dict() == pytest.approx(one.to_dict(), rel=1e-5, abs=1e-7)  # of sums of logs of about 1
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(parts.parameters[name], parameter, rtol=0, atol=1e-6)


def test_loss_and_gradient_are_those_of_the_total_over_the_whole_step(text_folder: Path) -> None:
    trainer, model = make(text_folder, batch_size=2, grad_accumulation=2), make(text_folder).model
    batch, selection = draw_step(trainer.training_rows, trainer.config, 0), SelectionLoss(seed=0, step=0)
    language_loss(model.train(), batch, "fp32", selection=selection)
    total = selection.total
    assert isinstance(total, torch.Tensor)
    gradients = torch.autograd.grad(total, index_parameters(model))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    result = trainer.train_step()
    assert result.selection_loss == pytest.approx(total.item(), rel=1e-5, abs=1e-7)
    assert result.selection_grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_the_language_learns_as_if_there_were_no_selection_loss(text_folder: Path) -> None:
    light, heavy = make(text_folder, selection_loss_weight=1e-3), make(text_folder, selection_loss_weight=10.0)
    one, other = light.train_step(), heavy.train_step()
    assert (one.loss, one.grad_norm, one.selection_loss) == (other.loss, other.grad_norm, other.selection_loss)
    assert other.selection_grad_norm == pytest.approx(1e4 * (one.selection_grad_norm or 0), rel=1e-4)
    own = {*index_parameters(light.model), *index_parameters(heavy.model)}
    for name, parameter in light.parameters.items():
        if parameter not in own:
            assert torch.equal(parameter, heavy.parameters[name])


def test_each_gradient_is_clipped_by_its_own_norm(text_folder: Path) -> None:
    trainer = make(text_folder, clip=1e-3, selection_loss_weight=100.0)
    norms: list[torch.Tensor] = []

    def look(*_: object) -> None:
        own = set(index_parameters(trainer.model))
        kinds = own, set(trainer.parameters.values()) - own
        norms.extend(torch.stack([p.grad.norm() for p in kind if p.grad is not None]).norm() for kind in kinds)

    trainer.optimizer.register_step_pre_hook(look)
    trainer.train_step()
    assert [norm.item() for norm in norms] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_the_log_has_both_losses_apart_and_indexers_learn(text_folder: Path, tmp_path: Path) -> None:
    sums = dict[float, float]()
    for rate in (0.0, 1.0):
        run(make(text_folder, steps=30, lr=1e-2, indexer_lr=rate, eval_every=30), tmp_path / str(rate))
        records = read_log(tmp_path / str(rate) / "log.jsonl")
        sums[rate] = sum(record["selection_loss"] for record in records[-10:])
        assert all(record["loss"] < 6 for record in records)
    assert sums[1.0] < 0.8 * sums[0.0]
    without = make(text_folder, replace(MODEL, nsa=TINY))
    assert without.train_step().to_dict().keys() == {"step", "loss", "lr", "grad_norm"}
