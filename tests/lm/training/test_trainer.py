"""What one step does, what it teaches indexers beside the language, and what many teach a model, with mods too."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import flexnsa
from flexnsa import NSAConfig, mods
from flexnsa.lm import Corpus, DecoderConfig, DecoderLM, TrainConfig, Trainer, read_corpus, run
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.lm.data.rows import Batch, PackedDocuments
from flexnsa.optim import index_parameters
from tests.lm.training.runs import trainer_of
from tests.support.inputs import TINY

MODEL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=TINY)
INDEXED = replace(TINY, index_heads=1, index_block_size=4, index_stride=4)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_learns_a_repeating_text_by_heart(attention: str):
    text = torch.tensor(list(b"native sparse attention is exact; ") * 20, dtype=torch.uint8)
    config = TrainConfig(steps=60, batch_size=4, seq_len=64, lr=1e-2, warmup_steps=5, eval_sequences=4)
    trainer = Trainer(DecoderLM(replace(MODEL, attention=attention, num_layers=1)), Corpus(text, text), config)
    first = trainer.validation_bits_per_byte()
    for _ in range(config.steps):
        trainer.train_step()
    assert first == pytest.approx(8, abs=0.3)
    assert trainer.validation_bits_per_byte() < 0.5  # of a window, only the first bytes are uncertain


@pytest.mark.parametrize("pack", [False, True])
def test_accumulated_gradient_is_the_gradient_of_the_whole_batch(text_folder: Path, pack: bool):
    config = TrainConfig(batch_size=4, seq_len=24, pack=pack)
    whole = trainer_of(text_folder, MODEL, config)
    parts = trainer_of(text_folder, MODEL, replace(config, batch_size=1, grad_accumulation=4))
    one, other = whole.train_step(), parts.train_step()
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_packed_loss_is_the_sum_over_documents_alone(text_folder: Path, attention: str):
    config = TrainConfig(seq_len=200, pack=True)
    trainer = trainer_of(text_folder, replace(MODEL, attention=attention), config)
    trainer.model.double()
    batch = trainer.training_rows.spread(2)
    assert batch.document_ids is not None
    alone, count = 0.0, 0
    for row, ids in zip(batch.tokens, batch.document_ids, strict=True):
        for document in row.split(torch.bincount(ids).tolist()):
            if len(document) > 1:
                alone += trainer.loss(Batch(document[None, :-1], document[None, 1:])).item()
            count += 1
    assert count > 2
    assert trainer.loss(batch).item() == pytest.approx(alone, rel=1e-6)


def test_only_matrices_of_linear_maps_decay(text_folder: Path):
    trainer = trainer_of(text_folder, MODEL, TrainConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    named = dict(trainer.model.named_parameters())
    assert len(decay) == len(named)
    assert decay[id(named["layers.0.mlp.up.weight"])] == 0.3
    assert decay[id(named["head.weight"])] == 0.3
    for name in ("embedding.weight", "norm.weight", "layers.1.attention_norm.weight"):
        assert decay[id(named[name])] == 0.0


@pytest.mark.parametrize(
    ("nsa", "of_index", "message"),
    [(TINY, False, "loss"), (INDEXED, False, "loss"), (INDEXED, True, ".* its gradient norm nan")],
)
def test_a_step_that_is_not_finite_changes_nothing(text_folder: Path, nsa: NSAConfig, of_index: bool, message: str):
    config = TrainConfig(batch_size=2, seq_len=40)
    model = replace(MODEL, nsa=nsa)
    trainer, other = (trainer_of(text_folder, model, config) for _ in range(2))
    assert trainer.train_step() == other.train_step()
    weight = index_parameters(trainer.model)[0] if of_index else trainer.model.head.weight
    finite = weight.detach().clone()
    weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=f"step 1: {message}"):
        trainer.train_step()
    weight.data.copy_(finite)
    for one, same in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, same)
        assert_close(trainer.optimizer.state[one], other.optimizer.state[same], rtol=0, atol=0)
    assert trainer.train_step() == other.train_step()


def test_with_another_config_a_trainer_learns_from_the_sequences_of_that_config(text_folder: Path):
    """Those of the next step were drawn ahead."""
    config = TrainConfig(batch_size=2, seq_len=40)
    trainer, other = (trainer_of(text_folder, MODEL, replace(config, seed=seed)) for seed in (0, 1))
    trainer.train_step()
    other.model.load_state_dict(trainer.model.state_dict())
    trainer.go_by(other.config)
    other.step = trainer.step
    for _ in range(2):
        assert trainer.train_step() == other.train_step()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_bf16_autocast_runs_in_bf16_and_stays_close_to_fp32(text_folder: Path, attention: str, pack: bool):
    dtypes, config = [], TrainConfig(batch_size=2, seq_len=40, pack=pack)
    full = trainer_of(text_folder, replace(MODEL, attention=attention), config)
    half = trainer_of(text_folder, replace(MODEL, attention=attention), replace(config, precision="bf16"))
    half.model.get_submodule("layers.1.mlp.down").register_forward_hook(
        lambda _module, _input, output: dtypes.append(output.dtype)
    )
    steps = [full.train_step(), half.train_step()]
    assert steps[1].loss == pytest.approx(steps[0].loss, rel=2**-8)
    assert steps[1].grad_norm == pytest.approx(steps[0].grad_norm, rel=2**-6)  # a loss of about log(256) says little
    assert dtypes == [torch.bfloat16]
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


def test_a_soft_capped_alibi_model_learns_from_packed_text():
    rows = PackedDocuments(read_corpus(Path(flexnsa.__file__).parent).train, seq_len=96)
    model = DecoderLM(MODEL)
    log_slopes = nn.Parameter(mods.alibi_slopes(MODEL.num_heads).log())
    optimizer = torch.optim.AdamW([*model.parameters(), log_slopes], lr=1e-2)
    losses = []
    for step in range(40):
        batch = rows.draw(random.Random(step), 4)
        score_mod = mods.chain(mods.soft_cap(20.0), mods.alibi(log_slopes.exp()))
        logits = model(batch.tokens, document_ids=batch.document_ids, score_mod=score_mod)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        assert log_slopes.grad is not None
        assert log_slopes.grad.isfinite().all()
        assert (log_slopes.grad != 0).all()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(256)) < 0.3
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0


NSA = replace(TINY, index_heads=2, index_block_size=2, index_stride=2)
TAUGHT = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, nsa=NSA)
TEACHING = TrainConfig(steps=2, batch_size=4, seq_len=64, warmup_steps=1, eval_sequences=4)


def teacher(text_folder: Path, model: DecoderConfig = TAUGHT, **fields: object) -> Trainer:
    return trainer_of(text_folder, model, replace(TEACHING, **fields))


def test_the_language_learns_as_if_there_were_no_selection_loss(text_folder: Path) -> None:
    light, heavy = teacher(text_folder, selection_loss_weight=1e-3), teacher(text_folder, selection_loss_weight=10.0)
    one, other = light.train_step(), heavy.train_step()
    assert (one.loss, one.grad_norm, one.selection_loss) == (other.loss, other.grad_norm, other.selection_loss)
    assert other.selection_grad_norm == pytest.approx(1e4 * (one.selection_grad_norm or 0), rel=1e-4)
    one, other = ([x for name, x in each.parameters.items() if ".indexer." not in name] for each in (light, heavy))
    assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("nsa", [TINY, NSA])
def test_each_gradient_is_clipped_by_its_own_norm_which_is_reported(text_folder: Path, nsa: NSAConfig) -> None:
    trainer = teacher(text_folder, replace(TAUGHT, nsa=nsa), clip=1e-3, selection_loss_weight=100.0)
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
        run(teacher(text_folder, steps=30, lr=1e-2, indexer_lr=rate, eval_every=30), tmp_path / str(rate))
        records = read_log(tmp_path / str(rate) / "log.jsonl")
        sums[rate] = sum(record["selection_loss"] for record in records[-10:])
        assert all(record["loss"] < 6 for record in records)
    assert sums[1.0] < 0.8 * sums[0.0]
    without = teacher(text_folder, replace(TAUGHT, nsa=TINY))
    assert without.train_step().to_dict().keys() == {"step", "loss", "lr", "grad_norm"}
