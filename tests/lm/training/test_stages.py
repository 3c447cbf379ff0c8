"""Sequences that grow while a run goes on: its rows, and that it resumes wherever it was killed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from flexnsa.lm import DecoderLM, Trainer, read_corpus, run
from flexnsa.lm.cli import main
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import configs_of_run
from flexnsa.lm.training.checks import check_training
from flexnsa.lm.training.trainer import draw_step
from tests.lm.training.test_more_steps import BEGUN, MODEL, Killed, after, kill

GROWING = replace(BEGUN, stages=((10, 0.25), (20, 0.375), (40, 0.375)), checkpoint_every=1)
LENGTHS = [10, 10, 20, 20, 20, 40, 40, 40]


@pytest.mark.parametrize(("pack", "passes"), [(False, 1), (False, 2), (True, 2)])
def test_each_step_has_rows_of_its_stage_and_as_many_tokens(text_folder: Path, pack: bool, passes: int) -> None:
    trainer = _trainer(text_folder, pack=pack, grad_accumulation=passes)
    loss, read = trainer.loss, list[Tensor]()
    trainer.loss = lambda batch, selection=None: read.append(batch.tokens) or loss(batch, selection)
    for step, length in enumerate(LENGTHS):
        read.clear()
        assert trainer.train_step().lr == BEGUN.learning_rate(step)
        assert [tokens.shape for tokens in read] == [(80 // length, length)] * passes
        alone = replace(BEGUN, seq_len=length, batch_size=80 // length, grad_accumulation=passes)
        rows = trainer.corpus.tokens("train").rows(length, pack)
        assert torch.equal(torch.cat(read), draw_step(rows, alone, step).tokens)
        read.clear()
        trainer.validation_bits_per_byte()
        assert [tokens.shape for tokens in read] == [(2, 40)] * 2


@pytest.mark.parametrize(("done", "pack"), [(1, False), (2, False), (3, True), (5, True), (7, False)])
def test_a_run_killed_at_the_edge_of_a_stage_or_inside_resumes_bit_for_bit(
    text_folder: Path, tmp_path: Path, done: int, pack: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed, resumed = (_trainer(text_folder, pack=pack, seed=seed) for seed in (0, 0, 1))
    with suppress(Killed):
        run(killed, tmp_path / "killed", watchers=[after(done, kill)])
    run(whole, tmp_path / "whole")
    capsys.readouterr()
    run(resumed, tmp_path / "killed")
    said = [line for line in "".join(capsys.readouterr()).splitlines() if " sequences of " in line]
    begun = [done, *(step for step in (2, 5) if step > done)]
    assert said == [f"step {step}: {80 // LENGTHS[step]} sequences of {LENGTHS[step]} tokens" for step in begun]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.train_step() == whole.train_step()


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


@pytest.mark.parametrize(("sharing", "message"), [(1, "sequences of 16 .* got 5"), (2, "4 chunks .* got 16 tokens")])
def test_ranks_share_every_stage_evenly(text_folder: Path, sharing: int, message: str) -> None:
    odd, corpus = replace(GROWING, stages=((16, 0.5), (40, 0.5)), steps=2), read_corpus(text_folder)
    with pytest.raises(ValueError, match=f"^stages: expected {message}"):
        check_training(MODEL, corpus, odd, torch.device("cpu"), 2, sharing)


def test_layers_are_compiled_for_each_length_alone(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one graph for several lengths, a resumed run would have another one."""
    quick = {"backend": "eager"}
    monkeypatch.setattr(Ranks, "compile", lambda _, model, **options: model.compile_layers(**quick, **options))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)  # the compiler's own limit, but for time's sake
    many = tuple((length, 1 / 4) for length in (2, 8, 24, 48))
    counters.clear()
    torch.compiler.reset()
    plain, compiled = (_trainer(text_folder, compiled, steps=4, seq_len=48, stages=many) for compiled in (False, True))
    for number in range(1, 5):
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


@pytest.mark.parametrize(("preset", "largest"), [("text-125m", 2048), ("paper", 32768)])
def test_an_estimate_is_of_the_largest_stage(preset: str, largest: int, capsys: pytest.CaptureFixture[str]) -> None:
    tables = set[str]()
    for options in ("--stages 2048:0.15,32768:0.85 --batch 2", f"--seq {largest} --batch {65536 // largest}"):
        main(["estimate", "--preset", preset, "--impl", "sdpa", *options.split()])
        tables.add(capsys.readouterr().out.split("decoding one token")[0])
    assert len(tables) == 1


def _trainer(text_folder: Path, compiled: bool = False, seed: int = 0, **changes: Any) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(DecoderLM(MODEL), read_corpus(text_folder), replace(GROWING, **changes), compiled=compiled)
