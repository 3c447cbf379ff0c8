"""Ranks that were started differently end before the first step, all of them, and it is said in what they differ."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from flexnsa.lm import Corpus, DecoderLM, Trainer, run
from flexnsa.lm.cli import main, train
from flexnsa.lm.cli import options as cli_options
from flexnsa.lm.cli.train import agreed_options, model_config, train_config
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.parallel.agreement import REFUSED, RanksDifferError, flat, require_same, require_same_in_store
from tests.parallel.conftest import RunOnce
from tests.parallel.processes import run_together
from tests.parallel.steps import CPU, MODEL, TRAINING, corpus, make_trainer, saved_results

SIZES = (
    "--device cpu --dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 4 --seq-len 64 "
    "--window-size 4 --compress-block-size 8 --compress-stride 4 --select-block-size 8 --steps 2 --eval-sequences 4"
)
NAMED = {"--text": "other", "--lr": "0.5", "--seed": "7", "--gate": "softmax"}
"""Options of the second rank, with their values."""
JOINING = {
    "--parallel": "fsdp2",
    "--context-parallel": "2",
    "--reduce-dtype": "bf16",
    "--dim": "32",  # which would hang where values are handed out
    "--watchdog": "60",
    "--strict": "",
    "--checkpointing": "all",
    "--preset": "text-125m",
}
ALONE = {
    "--text": "nowhere",
    "--head-dim": "3",
    "--batch-size": "3",  # of two, or of the sharing of two
    "--lr": "-1",
    "--impl": "triton",
}
"""Options that are wrong on the second rank alone, which so would not reach the comparison."""
Started = Callable[..., list[str]]


@pytest.fixture
def text_of_two(tmp_path: Path) -> Path:
    """Return a text that has another one in its folder."""
    for name, letter in (("text", "f"), ("other", "g")):
        (tmp_path / name).write_text("".join(f"def {letter}{n}(x):\n    return x * {n}\n\n" for n in range(300)))
    return tmp_path / "text"


@pytest.fixture
def started_apart(text_of_two: Path, tmp_path: Path) -> Started:
    """Return what two ranks have printed that end with status 2 before a folder is made; the second has options."""

    def outputs(parallel: str, *on_rank_1: str) -> list[str]:
        options = ("--text", str(text_of_two), "--out", str(tmp_path / "run"), "--parallel", parallel)
        return run_together(2, tmp_path / "output", _train, options, on_rank_1, status=2)

    return outputs


def _train(options: tuple[str, ...], on_rank_1: tuple[str, ...]) -> None:
    main(["train", *SIZES.split(), *options, *(on_rank_1 if os.environ["RANK"] == "1" else ())])


def _train_without_packages_on_rank_1(options: tuple[str, ...]) -> None:
    if os.environ["RANK"] == "1":
        cli_options.find_spec = lambda *_: None  # pyright: ignore[reportPrivateImportUsage]
    _train(options, ())


@pytest.mark.parametrize(
    ("parallel", "option"), [*(("ddp", option) for option in NAMED | JOINING), ("fsdp2", "--lr"), ("fsdp2", "--gate")]
)
def test_an_option_of_one_rank_ends_all_before_the_first_step(
    parallel: str, option: str, started_apart: Started, tmp_path: Path
) -> None:
    """Before ranks would wait for each other, too."""
    given = [str(tmp_path / "other")] if option == "--text" else (NAMED | JOINING)[option].split()
    _assert_named(started_apart(parallel, option, *given), option)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ALONE)
def test_what_one_rank_alone_refuses_ends_all(option: str, started_apart: Started, tmp_path: Path) -> None:
    for output in started_apart("ddp", option, ALONE[option]):
        assert re.search(rf"error: argument {option}: expected .*, got .* on rank 1 \(", output), output
    assert not (tmp_path / "run").exists()


def test_a_package_that_one_rank_lacks_ends_all(text_of_two: Path, tmp_path: Path) -> None:
    options = ("--text", str(text_of_two), "--out", str(tmp_path / "run"), "--parallel", "ddp")
    for output in run_together(2, tmp_path / "output", _train_without_packages_on_rank_1, options, status=2):
        assert "error: flexnsa: numpy, safetensors, tqdm not installed" in output
        assert "on rank 1" in output


def test_the_option_is_named_for_which_one_rank_refuses_another(started_apart: Started) -> None:
    options = ("--context-parallel", "2", "--seq-len", "36")  # seq_len: expected 4 chunks of at least 63 tokens
    _assert_named(started_apart("ddp", *options), "--context-parallel")


def test_a_rank_that_was_not_told_of_the_others_does_not_train_alone(text_of_two: Path, tmp_path: Path) -> None:
    options = ("--text", str(text_of_two), "--out", str(tmp_path / "run"))
    outputs = run_together(2, tmp_path / "output", _train_with_one_parallel, options, status=2)
    _assert_named(outputs, "--parallel")
    outputs = run_together(2, tmp_path / "output", _train, options, (), status=2)
    assert "error: argument --parallel: expected a way for the 2 processes of torchrun" in outputs[1]
    assert not (tmp_path / "run").exists()


def _train_with_one_parallel(options: tuple[str, ...]) -> None:
    main(["train", *SIZES.split(), *options, *(("--parallel", "ddp") if os.environ["RANK"] == "0" else ())])


def _assert_named(outputs: list[str], option: str) -> None:
    difference = rf"error: argument {option}: expected the same on all ranks, got (.+) on rank 0; (.+) on rank 1 \("
    for output in outputs:
        match = re.search(difference, output)
        assert match, output
        assert match[1] != match[2]


def test_options_that_may_differ_do(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some words of text\n" * 400)
    (tmp_path / "copy").write_text((tmp_path / "text").read_text())
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    common = ("--text", str(tmp_path / "text"), "--out", str(tmp_path / "run"), "--parallel", "ddp")
    on_rank_1 = ("--text", str(tmp_path / "copy"), "--out", str(tmp_path / "link"), "--log-ranks", "--device", "auto")
    for _ in range(2):  # and so they do when it is started again
        run_together(2, tmp_path / "output", _train, common, on_rank_1)
    assert (tmp_path / "run" / "log.rank-1.jsonl").exists()
    assert not list((tmp_path / "run").glob(".flexnsa.seen*"))


def test_every_option_is_compared_or_is_known_to_be_of_one_process() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    arguments = parser.parse_args([])
    text = Corpus(torch.zeros(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8))
    compared = flat(agreed_options(arguments, model_config(arguments), train_config(arguments), text))
    joining, may_differ = {"parallel", "reduce_dtype", "context_parallel"}, {"device", "out", "log_ranks"}
    options = {action.dest for action in parser._actions} - {"help"}
    assert options - joining - may_differ == compared.keys() - {
        "vocab_size",
        "index_head_dim",
        "index_score",
    }  # no options


def _trainers(file: Path, parallel: str) -> None:
    """Have the last rank build something else than the others; save the errors of all ranks."""
    text = corpus()
    other_text = Corpus(text.train.flip(0), text.validation)
    different: dict[str, dict[str, Any]] = {
        "lr": {"config": replace(TRAINING, lr=0.5)},
        "batch_size": {"config": replace(TRAINING, batch_size=3)},  # which the last rank alone would refuse
        "compressor_lr": {"config": replace(TRAINING, compressor_lr=0.1)},
        "text_sha256": {"text": other_text},
        "compiled": {"compiled": True},
        "gate": {"model": replace(MODEL, gate="softmax")},
        "dim": {"model": replace(MODEL, dim=64)},
        "head.weight": {"change": lambda model: model.head.double()},
    }
    with saved_results(file, parallel) as (ranks, errors):
        for name, options in different.items():
            on_last = options if ranks.rank == ranks.world_size - 1 else {}
            errors[name] = ranks.gather(_error_of(ranks, **({"text": text} | on_last)))


def _error_of(ranks: Ranks, text: Corpus, model: Any = MODEL, config: Any = TRAINING, **options: Any) -> str:
    change = options.pop("change", lambda _: None)

    def make() -> DecoderLM:
        made = DecoderLM(model)
        change(made)
        return made

    try:
        Trainer(ranks.build(make, CPU), text, config, ranks=ranks, **options)
    except RanksDifferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_trainers_that_are_built_differently_are_refused_on_all_ranks(run_once: RunOnce, parallel: str) -> None:
    for name, (first, second) in run_once(2, _trainers, parallel).items():
        assert re.match(rf"{re.escape(name)}: expected the same on all ranks, got .+ on rank 0; .+ on rank 1$", first)
        assert first == second


@pytest.mark.parametrize(
    ("values_by_rank", "message"),
    [
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "b: expected the same on all ranks, got 2 on rank 0; 3 on rank 1"),
        ([{"a": 1}, {}, {"a": 1}], "a: expected the same on all ranks, got 1 on rank 0, 2; None on rank 1"),
        ([{}, {"new": True}], "new: expected the same on all ranks, got None on rank 0; True on rank 1"),
        ([{"a": 1.0}, {"a": 1}], "a: expected the same on all ranks, got 1.0 on rank 0; 1 on rank 1"),
        (
            [{"a": 1, REFUSED: "b: no"}, {"a": 2, "b": 3}],
            "a: expected the same on all ranks, got 1 on rank 0; 2 on rank 1",
        ),
        ([{"a": 1, REFUSED: "b: no"}, {"a": 1, "b": 3}], "b: no on rank 0"),
        ([{REFUSED: "b: no"}, {REFUSED: "b: no"}], "b: no"),
        ([{REFUSED: "b: no"}, {}, {REFUSED: "c: no"}], "b: no on rank 0; c: no on rank 2"),
    ],
)
def test_the_first_difference_is_named(values_by_rank: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RanksDifferError, match=f"^{message}$"):
        require_same(values_by_rank)
    assert _errors_through_a_store(values_by_rank) == [message] * len(values_by_rank)


def test_ranks_compare_the_checkpoint_that_they_start_from_before_they_read_it(tmp_path: Path) -> None:
    class Other(Ranks):
        """A rank that has found another checkpoint than rank 0."""

        def require_same(self, values: Callable[[], Mapping[str, Any]]) -> None:
            if "newest checkpoint" in values():
                require_same([{"newest checkpoint": "of another step"}, values()])

    run(make_trainer(Ranks(), steps=1), tmp_path)
    trainer = make_trainer(Other(), steps=2)
    got = "'of another step' on rank 0; 'checkpoint.safetensors' on rank 1"
    with pytest.raises(RanksDifferError, match=f"^newest checkpoint: expected the same on all ranks, got {got}$"):
        run(trainer, tmp_path)
    assert trainer.step == 0


def test_the_same_is_welcome_and_leaves_nothing_in_the_store() -> None:
    require_same([flat({"a": {"b": [1, 2]}})] * 3)
    assert _errors_through_a_store([flat({"a": {"b": [1, 2]}})] * 3) == [""] * 3


def _errors_through_a_store(values_by_rank: list[dict[str, Any]]) -> list[str]:
    """Compare twice, as a process does that joins a second time."""
    store = HashStore()

    def compare(rank: int) -> str:
        try:
            require_same_in_store(store, rank, len(values_by_rank), values_by_rank[rank])
        except RanksDifferError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(values_by_rank)) as threads:
        first, second = (list(threads.map(compare, range(len(values_by_rank)))) for _ in range(2))
    assert store.num_keys() == 0
    assert first == second
    return first
