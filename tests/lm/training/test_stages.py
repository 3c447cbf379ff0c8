"""Sequences that grow while a run goes on: its rows, its dense stages, and that it resumes wherever it was killed."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from flexnsa import SelectionLoss
from flexnsa.lm import DecoderConfig, Trainer, read_corpus, run
from flexnsa.lm.cli import main
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import configs_of_run, load_checkpoint, save_checkpoint
from flexnsa.lm.training.checks import check_training
from flexnsa.lm.training.trainer import build_optimizer, draw_step, language_loss, set_learning_rate
from flexnsa.optim import index_parameters
from tests.lm.training.runs import curve, trainer_of
from tests.lm.training.test_more_steps import BEGUN, MODEL, Killed, after, kill
from tests.lm.training.test_trainer import TAUGHT

GROWING = replace(BEGUN, stages=((10, 0.25), (20, 0.375), (40, 0.375)), checkpoint_every=1)
INDEXED = replace(TAUGHT, nsa=replace(TAUGHT.nsa, select_block_size=4))  # so that 20 tokens have blocks to choose
LENGTHS = [10, 10, 20, 20, 20, 40, 40, 40]
EDGES = [0, 2, 5]
"""First steps of the stages."""
WARMED: dict[str, Any] = {"dense_stages": 1, "indexer_stages": 1}


@pytest.mark.parametrize(
    ("number", "alone", "pack", "passes"),
    [(0, 0, False, 2), (1, 0, True, 1), (2, 0, True, 2), (1, 1, False, 1), (1, 1, True, 2)],
)
def test_stages_are_a_loop_that_anyone_could_write(
    text_folder: Path, number: int, alone: int, pack: bool, passes: int
) -> None:
    options = {"pack": pack, "grad_accumulation": passes}
    trainer = _trainer(text_folder, INDEXED, dense_stages=number, indexer_stages=alone, **options)
    other = _trainer(text_folder, INDEXED, stages=(), **options)
    model, corpus, optimizer = other.model, other.corpus, build_optimizer(other.model, other.config)
    indexers = index_parameters(model)
    others = [parameter for parameter in model.parameters() if parameter not in set(indexers)]
    for step, length in enumerate(LENGTHS):
        dense, taught = step < EDGES[number + alone], step >= EDGES[number]
        model.train().attend_densely(("slc",) if dense else None)
        stage = replace(other.config, seq_len=length, batch_size=80 // length)
        batch = draw_step(corpus.tokens("train").rows(length, pack), stage, step)
        selection = SelectionLoss(seed=0, step=step) if taught else None
        loss = language_loss(model, batch, "fp32", selection=selection)
        (loss if selection is None else loss + selection.total).backward()
        for parameter in others if dense and taught else () if taught else indexers:
            parameter.grad = None  # also of 0, with which weights would decay
        norms = [nn.utils.clip_grad_norm_(parameters, stage.clip).item() for parameters in (others, indexers)]
        set_learning_rate(optimizer, stage.learning_rate(step))
        optimizer.step()
        optimizer.zero_grad()
        record = {"step": step, "lr": stage.learning_rate(step), "loss": loss.item(), "grad_norm": norms[0]}
        record |= {"dense": True} if dense else {}
        total = 0.0 if selection is None else torch.as_tensor(selection.total).item()
        record |= {"selection_loss": total, "selection_grad_norm": norms[1]} if taught else {}
        assert trainer.train_step().to_dict() == pytest.approx(record, rel=1e-4, abs=1e-7)
        # An evaluation is of the last length, and attends as the step before it
        assert trainer.validation_bits_per_byte() == pytest.approx(other.validation_bits_per_byte(), rel=1e-5)
        torch.testing.assert_close([*trainer.model.parameters()], [*model.parameters()], rtol=0, atol=1e-5)


def test_what_a_dense_stage_leaves_out_stays_as_drawn_and_learns_afterwards(text_folder: Path) -> None:
    trainer = _trainer(text_folder, INDEXED, dense_stages=2, weight_decay=0.5)
    read = tuple(f"attention.{name}.weight" for name in ("w_q", "w_k_slc", "w_v_slc", "w_o", "gate.linear"))
    unread = {name for name in trainer.parameters if ".attention." in name and not name.endswith(read)}
    for edge, left_out in ((5, unread), (8, set[str]())):
        before = {name: parameter.clone() for name, parameter in trainer.parameters.items()}
        while trainer.step < edge:
            trainer.train_step()
        assert {name for name, old in before.items() if torch.equal(old, trainer.parameters[name])} == left_out


def test_nothing_but_indexers_learns_in_their_stage_and_all_of_it_afterwards(text_folder: Path) -> None:
    trainer = _trainer(text_folder, INDEXED, weight_decay=0.5, lr=0.05, **WARMED)
    for parameter in index_parameters(trainer.model):
        nn.init.normal_(parameter)  # which has much to learn
    while trainer.step < 2:
        trainer.train_step()
    for edge, part in ((5, ".indexer."), (8, "")):
        learning = {name for name in trainer.parameters if part in name}
        before, losses = _state(trainer), list[float]()
        while trainer.step < edge:
            losses.append(trainer.train_step().selection_loss or 0.0)
            assert {name for name, x in trainer.parameters.items() if x.requires_grad} == learning
        assert 0 < losses[-1] < losses[0]
        changed = {name for name, old in before.items() if not all(map(torch.equal, old, _state(trainer)[name]))}
        assert changed == learning


def _state(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """Copy each parameter and its moments."""
    moments = trainer.optimizer.state
    return {name: [each.clone() for each in (x, *moments[x].values())] for name, x in trainer.parameters.items()}


def test_a_trainer_in_a_stage_of_indexers_takes_a_checkpoint_of_a_later_one(text_folder: Path, tmp_path: Path) -> None:
    one, other = (_trainer(text_folder, INDEXED, seed=seed, **WARMED) for seed in (0, 1))
    for trainer in (*[one] * 7, *[other] * 4):
        trainer.train_step()
    save_checkpoint(tmp_path / "checkpoint.safetensors", one)
    load_checkpoint(tmp_path / "checkpoint.safetensors", other)
    assert other.train_step() == one.train_step()
    assert all(map(torch.equal, other.model.parameters(), one.model.parameters()))


@pytest.mark.parametrize(
    ("done", "dense", "alone", "pack"),
    [
        *((1, 0, 0, False), (1, 1, 0, False), (2, 1, 0, True), (3, 2, 0, True), (5, 2, 0, False), (7, 1, 0, True)),
        *((2, 1, 1, True), (3, 1, 1, False), (5, 1, 1, True)),
    ],
)
def test_a_run_killed_at_the_edge_of_a_stage_or_inside_resumes_bit_for_bit(
    text_folder: Path, tmp_path: Path, done: int, dense: int, alone: int, pack: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"pack": pack, "dense_stages": dense, "indexer_stages": alone}
    whole, killed, resumed, ended = (_trainer(text_folder, INDEXED, seed=seed, **options) for seed in (0, 0, 1, 1))
    with suppress(Killed):
        run(killed, tmp_path / "killed", watchers=[after(done, kill)])
    run(whole, tmp_path / "whole")
    capsys.readouterr()
    run(resumed, tmp_path / "killed")
    output = "".join(capsys.readouterr())
    said = [line for line in output.splitlines() if " sequences of " in line]
    begun = {step: ", attending densely" * (step < EDGES[dense + alone]) for step in (done, *EDGES) if step >= done}
    rows = [f"step {x}: {80 // LENGTHS[x]} sequences of {LENGTHS[x]} tokens{how}" for x, how in begun.items()]
    assert said == rows
    assert output.count(" parameters learn, ") == alone * (done < EDGES[2])
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    run(ended, tmp_path / "whole")
    assert ended.validation_bits_per_byte() == whole.validation_bits_per_byte()
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    assert resumed.train_step() == whole.train_step()


@pytest.mark.parametrize(
    ("changes", "too_few"),
    [
        ({}, [0]),
        ({"dense_stages": 1}, []),
        ({"stages": ((10, 0.25), (16, 0.25), (40, 0.5)), "dense_stages": 1}, [2]),
        ({"stages": (), "seq_len": 16}, [0]),
        ({"stages": (), "seq_len": 17}, []),
    ],
)
def test_a_run_says_which_sequences_are_too_short_to_teach_indexers(
    text_folder: Path, tmp_path: Path, changes: dict[str, Any], too_few: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = _trainer(text_folder, INDEXED, **changes)
    run(trainer, tmp_path)
    said = re.findall(r"step (\d+): \d+ tokens are too few", "".join(capsys.readouterr()))
    losses = {int(step["step"]): step.get("selection_loss") for step in curve(tmp_path)}
    assert [*map(int, said)] == too_few == [start for start in trainer.config.by_stage() if losses[start] == 0]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((20, 0.5), (10, 0.25), (40, 0.25)), "lengths that do not fall, got 20:0.5,10:0.25,40:0.25"),
        (((10, 0.5), (20, 0.5)), "the last length to be seq_len=40, got 10:0.5,20:0.5"),
        (((15, 0.5), (40, 0.5)), r"lengths that divide batch_size \* seq_len=80, got 15:"),
        (((10, 0.5), (40, 0.4)), "shares whose sum is 1, got 10:0.5,40:0.4"),
        (((10, 0.99), (40, 0.01)), "at least one of 8 steps for each, got 10:0.99,"),
        (((10, 0.0), (40, 1.0)), "a positive, finite number, got 0.0"),
        (((0, 0.5), (40, 0.5)), "at least 1, got 0"),
        ((10, 40), r"pairs of a length and a share, got \(10, 40\)"),
    ],
)
def test_wrong_stages_are_named(stages: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^stages: expected {message}"):
        replace(GROWING, stages=stages)


ODD = {"stages": ((16, 0.5), (40, 0.5)), "steps": 2}


@pytest.mark.parametrize(
    ("training", "model", "sharing", "message"),
    [
        (ODD, {}, 1, "stages: expected sequences of 16 .* got 5"),
        (ODD, {}, 2, "stages: expected 4 chunks .* got 16 tokens"),
        ({"dense_stages": 3}, {}, 1, "dense_stages: expected at most 2, because the last stage.* got 3"),
        (WARMED | {"indexer_stages": 2}, {}, 1, "indexer_stages: expected at most 1, because the last .* got 2"),
        (WARMED, {}, 1, "indexer_stages: expected 0 without index_heads, .* got 1"),
        ({"indexer_stages": 1}, {"nsa": INDEXED.nsa}, 1, "indexer_stages: expected 0 without a dense stage .* got 1"),
        (WARMED, {"nsa": INDEXED.nsa}, 2, "dense_stages: expected 0 with context_parallel=2, .* got 1"),
        ({"dense_stages": 1}, {"attention": "dense"}, 1, "dense_stages: expected 0 with attention='dense', .* got 1"),
        ({"dense_stages": 2}, {"branches": ("cmp", "win")}, 1, "dense_stages: expected 0 without the sel.* got 2"),
        ({"dense_stages": 1}, {}, 2, "dense_stages: expected 0 with context_parallel=2, .* got 1"),
    ],
)
def test_stages_that_the_model_or_its_ranks_cannot_have_are_named(
    text_folder: Path, training: dict[str, Any], model: dict[str, Any], sharing: int, message: str
) -> None:
    corpus = read_corpus(text_folder)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_training(replace(MODEL, **model), corpus, replace(GROWING, **training), torch.device("cpu"), 2, sharing)


@torch._dynamo.config.patch(recompile_limit=2)  # the compiler's own limit, but for time's sake
def test_layers_are_compiled_for_each_length_alone(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one graph for several lengths, a resumed run would have another one."""
    quick = {"backend": "eager"}
    monkeypatch.setattr(Ranks, "compile", lambda _, model, **options: model.compile_layers(**quick, **options))
    many, model = tuple((length, 1 / 3) for length in (2, 24, 48)), replace(MODEL, compression="mean")
    counters.clear()
    torch.compiler.reset()
    plain, compiled = (_trainer(text_folder, model, how, steps=3, seq_len=48, stages=many) for how in (False, True))
    for number in range(1, 4):
        assert compiled.train_step().loss == pytest.approx(plain.train_step().loss, rel=1e-5)
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (number, 0)


def test_the_command_takes_stages_and_resumes_with_them(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--attention dense --dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --device cpu"
    options = ["train", *sizes.split(), "--eval-sequences", "2", "--text", str(text_folder), "--out", str(tmp_path)]
    main([*options, "--batch-size", "2", "--steps", "4", "--stages", "10:0.25,20:0.25,40:0.5"])
    main([*options, "--steps", "8"])
    _, training = configs_of_run(tmp_path) or (None, GROWING)
    assert (training.stages, training.seq_len, training.steps) == (((10, 0.25), (20, 0.25), (40, 0.5)), 40, 8)
    for wrong, message in {"10:0.5,40:0.5": r"[[10, 0.25], [20, 0.25], [40, 0.5]], as in", "10-40": "such as"}.items():
        with pytest.raises(SystemExit):
            main([*options, "--steps", "8", "--stages", wrong])
        assert f"argument --stages: expected {message}" in capsys.readouterr().err


DENSE = "--dense-stages 1"
WARM = "--stages 1024:0.1,2048:0.1,32768:0.8 --dense-stages 1 --indexer-stages 1"


@pytest.mark.parametrize(
    ("preset", "dense", "largest"),
    [("text-125m", "", 2048), ("paper", "", 32768), ("text-125m", DENSE, 32768), ("text-125m", WARM, 32768)],
)
def test_an_estimate_is_of_the_largest_stage_that_selects(
    preset: str, dense: str, largest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = set[str]()
    for options in (f"--stages 2048:0.15,32768:0.85 --batch 2 {dense}", f"--seq {largest} --batch {65536 // largest}"):
        main(["estimate", "--preset", preset, "--impl", "sdpa", *options.split()])
        tables.add(capsys.readouterr().out.split("decoding one token")[0])
    assert len(tables) == 1


def _trainer(text: Path, model: DecoderConfig = MODEL, compiled: bool = False, seed: int = 0, **fields: Any) -> Trainer:
    return trainer_of(text, model, replace(GROWING, **fields), seed, compiled=compiled)
