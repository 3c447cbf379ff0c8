"""The command line: its imports, its errors, its tables, and the recipe that it takes without ``--preset``."""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flexnsa.files import FileError
from flexnsa.lm import PRESETS, TRAIN_PRESETS, preset
from flexnsa.lm.cli import COMMANDS, main
from flexnsa.lm.cli.options import add_device_option, require
from flexnsa.lm.cli.train import add_recipe_options, model_config, train_config
from flexnsa.lm.measure.table import format_table
from flexnsa.lm.training.checkpoint import CHECKPOINT_NAME, configs_of_run
from tests.lm.cli.tiny_run import SIZES, write_text


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)
        else:
            yield action


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"flexnsa.lm.cli.{command}").add_arguments(parser)
    assert [action.option_strings for action in options_of(parser) if not action.help] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --steps 0", "argument --steps: expected at least 1, got 0"),
        ("train --steps many", "argument --steps: invalid int value: 'many'"),
        ("train --lr nan", "argument --lr: expected a finite number, got nan"),
        ("train --num-heads 8 --num-kv-heads 3", "argument --num-kv-heads: expected a divisor of num_heads=8, got 3"),
        ("train --compress-block-size 20", "argument --compress-block-size: expected a multiple of compress_stride=8"),
        ("train --share-index a", "argument --share-index: expected such as 3 or 0,0,2, got 'a'"),
        ("train --num-layers 3 --share-index 0,0", "argument --share-index: expected a number for each of 3 layers"),
        ("train --compression fft", "argument --compression: expected one of 'mean', 'linear', 'mlp', got 'fft'"),
        ("train --impl magic", "argument --impl: expected one of 'auto', "),
        ("train --branches cmp far", "argument --branches: expected some of ('cmp', 'slc', 'win')"),
        ("train --attention linear", "argument --attention: invalid choice: 'linear'"),
        ("train --precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("train --preset huge", "argument --preset: invalid choice: 'huge'"),
        ("train --device abacus", "argument --device: expected a device such as cpu or cuda:0, got 'abacus'"),
        ("train --text /nowhere", "argument --text: expected a file or a folder, got '/nowhere'"),
        ("train --seq-len 99999999", "argument --seq-len: expected less than the "),
        ("train --device meta", "argument --device: expected a device of this machine, got 'meta'"),
        ("train --device cuda:99", "argument --device: expected a device of this machine, got 'cuda:99'"),
        ("train --seed 12345678901234567890", "argument --seed: expected a number of at most 64 bits, got 1234567890"),
        ("train --out /dev/null", "argument --out: expected a folder, got '/dev/null', but '/dev/null' is a file"),
        ("train --out /dev/null/run", "argument --out: expected a folder, got '/dev/null/run', but '/dev/null' is a"),
        ("train --out a\0b", r"argument --out: expected a folder, got 'a\x00b', which no file system can"),
        ("train --out \ud800", r"argument --out: expected a folder, got '\ud800', which no file system can name"),
        ("train --recompute all", "--recompute: expected some of ('cmp', 'slc', 'win'), each once"),
        ("train --no-such-thing", "unrecognized arguments: --no-such-thing"),
        ("estimate --seq 0", "argument --seq: expected at least 1, got 0"),
        ("estimate --batch 0", "argument --batch: expected at least 1, got 0"),
        ("estimate --layers 0", "argument --layers: expected at least 1, got 0"),
        (f"estimate --seq {10**400}", "argument --seq: expected a number of at most 64 bits, got 1"),
        (f"estimate --budget {10**400}KB", "argument --budget: expected a number of at most 64 bits, got 1"),
        ("estimate --budget much", "argument --budget: expected a size such as 65GiB or 800MB, got 'much'"),
        ("", "COMMAND"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(main, arguments.split())
    assert line.startswith("flexnsa")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("impl", ["triton", "flex"])
@pytest.mark.parametrize("name", ["train", *(f"diagnose {look}" for look in ("gradients", "bisect", "matrix", "soak"))])
def test_an_implementation_that_cannot_train_on_the_device_is_named_before_the_run(
    name: str, impl: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    model = [*SIZES.split()[:10], "--seq-len", "24", "--device", "cpu"]
    said = refused(main, [*name.split(), "--text", str(text), "--out", str(out), *model, "--impl", impl])
    assert "argument --impl: expected 'auto' or 'sdpa' to train on a CPU" in said
    assert f"got '{impl}'" in said
    assert not out.exists()


def test_branches_that_run_again_are_an_option_of_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for options in ([], ["--recompute", "slc", "win"]):
        main(["estimate", "--impl", "flex", *options])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "saved for backward" in line]
        sizes.append(float(line.split()[-1].replace(",", "")))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(("cuda", "impl"), [(False, "sdpa"), (True, "triton")])
def test_estimate_is_of_what_would_run_here(
    cuda: bool, impl: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    main(["estimate", "--impl", "auto", "--compile"])
    default, _, _ = capsys.readouterr().out.partition("\n")
    assert f"impl={impl}" in default
    assert default.endswith("compiled")


def test_estimate_of_a_dense_model_is_what_nsa_is_compared_with(capsys: pytest.CaptureFixture[str]):
    tables = {}
    for attention in ("nsa", "dense"):
        main(["estimate", "--attention", attention, "--seq", "8192"])
        tables[attention] = capsys.readouterr().out.split("decoding one token")[1].splitlines()[2:]
    assert [line.split()[-1] for line in tables["dense"]] == [line.split()[-2] for line in tables["nsa"]]


def test_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    for here, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        parser = argparse.ArgumentParser()
        add_device_option(parser)
        assert parser.parse_args([]).device == torch.device(expected)


def test_mistakes_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch):
    for mistake in (ValueError("q: expected a tensor"), TypeError("no"), RuntimeError("no"), OSError("no"), KeyError()):

        def fail(*_: object, mistake: Exception = mistake, **__: object) -> None:
            raise mistake

        monkeypatch.setattr("flexnsa.lm.cli.estimate.estimate_training", fail)
        with pytest.raises(type(mistake)):
            main(["estimate"])


def test_an_interrupt_ends_any_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexnsa.lm.cli.diagnose.recipe_of", interrupt)
    with pytest.raises(SystemExit) as leaving:
        main(["diagnose", "soak"])
    assert leaving.value.code == 130
    assert capsys.readouterr().err == "flexnsa diagnose soak: interrupted\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_options(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"usage: flexnsa {command} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "shared_keys", "begin_as_mean"),
    [("", True, True), ("--no-shared-keys", False, True), ("--no-begin-as-mean --shared-keys", True, False)],
)
def test_a_preset_says_what_is_left_open(options: str, shared_keys: bool, begin_as_mean: bool) -> None:
    parser = argparse.ArgumentParser()
    add_recipe_options(parser)
    config = model_config(parser.parse_args(["--preset", "text-125m", *options.split()]))
    assert config == preset("text-125m", shared_keys=shared_keys, begin_as_mean=begin_as_mean)


def test_missing_package_is_answered_with_its_extra():
    require("json", extra="train")
    with pytest.raises(SystemExit, match=r"no_such_package not installed: install flexnsa with its extra 'plot'$"):
        require("json", "no_such_package", extra="plot")


def test_table_aligns_words_left_and_numbers_right():
    table = format_table(["name", "MiB"], [["a", "1"], ["longer", "1,000"]])
    assert table == "name      MiB\n------  -----\na           1\nlonger  1,000"
    with pytest.raises(ValueError, match=r"zip\(\)"):
        format_table(["name", "MiB"], [["a"]])


_FEW = "--dim 16 --num-layers 1 --num-heads 4 --num-kv-heads 2 --head-dim 4 --batch-size 1 --seq-len 300"
FEW = _FEW.split()


@pytest.mark.parametrize(("device", "name"), [("cpu", "text-small"), ("cuda", "text-125m")])
def test_the_device_decides(device: str, name: str) -> None:
    parser = argparse.ArgumentParser()
    add_recipe_options(parser)
    arguments = parser.parse_args([])
    arguments.device = torch.device(device)
    assert model_config(arguments) == PRESETS[name]
    assert train_config(arguments) == TRAIN_PRESETS[name]


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    text = tmp_path / "text"
    text.write_text("".join(f"def f{number}():\n    return {number}\n\n" for number in range(300)))
    looks = ["--eval-sequences", "1", "--warmup-steps", "1"]
    return ["train", "--device", "cpu", "--text", str(text), "--out", str(tmp_path / "run"), *looks]


@pytest.mark.parametrize("preset", [[], ["--preset", "small", "--lr", "0.002"]])
def test_a_run_that_goes_on_needs_none_of_its_options(preset: list[str], options: list[str], tmp_path: Path) -> None:
    main([*options, *FEW, *preset, "--steps", "2"])
    began = configs_of_run(tmp_path / "run")
    assert (began[0].nsa.index_heads is None) == bool(preset)
    main([*options, "--steps", "3"])
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [0, 1, 2]
    assert ("selection_loss" in log[-1]) == (not preset)
    went_on = configs_of_run(tmp_path / "run")
    assert went_on[0] == began[0]
    assert went_on[1].lr == began[1].lr == (0.002 if preset else TRAIN_PRESETS["text-small"].lr)


def test_another_preset_or_a_damaged_checkpoint_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    main([*options, *FEW, "--steps", "1"])
    capsys.readouterr()
    said = refused(main, [*options, *FEW, "--preset", "small", "--steps", "1"])
    assert "begin-as-mean: expected True, as in the checkpoint" in said
    assert "dim: expected 16" in refused(main, [*options, *FEW, "--dim", "32", "--steps", "1"])
    checkpoint = tmp_path / "run" / CHECKPOINT_NAME
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    with pytest.raises(FileError, match="not a whole"):
        configs_of_run(tmp_path / "run")
    assert configs_of_run(tmp_path / "none") is None
