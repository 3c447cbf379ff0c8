"""The selection loss of a training step: beside the loss of the language, and for indexers alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexnsa import NSAConfig
from flexnsa.lm import DecoderConfig, DecoderLM, TrainConfig, Trainer, read_corpus, run
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.optim import index_parameters
from tests.support.inputs import TINY

NSA = replace(TINY, index_heads=2, index_block_size=2, index_stride=2)
MODEL = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, nsa=NSA)
TRAINING = TrainConfig(steps=2, batch_size=4, seq_len=64, warmup_steps=1, eval_sequences=4)


def make(text_folder: Path, model: DecoderConfig = MODEL, **fields: object) -> Trainer:
    torch.manual_seed(0)
    return Trainer(DecoderLM(model), read_corpus(text_folder), replace(TRAINING, **fields))


def test_the_language_learns_as_if_there_were_no_selection_loss(text_folder: Path) -> None:
    light, heavy = make(text_folder, selection_loss_weight=1e-3), make(text_folder, selection_loss_weight=10.0)
    one, other = light.train_step(), heavy.train_step()
    assert (one.loss, one.grad_norm, one.selection_loss) == (other.loss, other.grad_norm, other.selection_loss)
    assert other.selection_grad_norm == pytest.approx(1e4 * (one.selection_grad_norm or 0), rel=1e-4)
    own = {*index_parameters(light.model), *index_parameters(heavy.model)}
    for name, parameter in light.parameters.items():
        if parameter not in own:
            assert torch.equal(parameter, heavy.parameters[name])


@pytest.mark.parametrize("nsa", [TINY, NSA])
def test_each_gradient_is_clipped_by_its_own_norm_which_is_reported(text_folder: Path, nsa: NSAConfig) -> None:
    trainer = make(text_folder, replace(MODEL, nsa=nsa), clip=1e-3, selection_loss_weight=100.0)
    norms: list[torch.Tensor] = []

    def look(*_: object) -> None:
        own = set(index_parameters(trainer.model))
        kinds = filter(None, (own, set(trainer.parameters.values()) - own))
        norms.extend(torch.stack([p.grad.norm() for p in kind if p.grad is not None]).norm() for kind in kinds)

    trainer.optimizer.register_step_pre_hook(look)
    assert trainer.train_step().grad_norm > 1e-2
    assert [norm.item() for norm in norms] == pytest.approx([1e-3] * (1 + (nsa is NSA)), rel=1e-3)


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
