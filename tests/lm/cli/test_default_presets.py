"""Without ``--preset`` commands take the recipe for text of the device, and a run that goes on its own settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexnsa.files import FileError
from flexnsa.lm import PRESETS, TRAIN_PRESETS
from flexnsa.lm.cli import main
from flexnsa.lm.cli.train import add_recipe_options, model_config, train_config
from flexnsa.lm.training.checkpoint import CHECKPOINT_NAME, configs_of_run

_SIZES = "--dim 16 --num-layers 1 --num-heads 4 --num-kv-heads 2 --head-dim 4 --batch-size 1 --seq-len 300"
SIZES = _SIZES.split()


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
    main([*options, *SIZES, *preset, "--steps", "2"])
    began = configs_of_run(tmp_path / "run")
    assert began is not None
    assert (began[0].nsa.index_heads is None) == bool(preset)
    main([*options, "--steps", "3"])
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [0, 1, 2]
    assert ("selection_loss" in log[-1]) == (not preset)
    went_on = configs_of_run(tmp_path / "run")
    assert went_on is not None
    assert went_on[0] == began[0]
    assert went_on[1].lr == began[1].lr == (0.002 if preset else TRAIN_PRESETS["text-small"].lr)


def test_another_preset_or_a_damaged_checkpoint_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    main([*options, *SIZES, "--steps", "1"])
    capsys.readouterr()
    said = refused(main, [*options, *SIZES, "--preset", "small", "--steps", "1"])
    assert "begin-as-mean: expected True, as in the checkpoint" in said
    assert "dim: expected 16" in refused(main, [*options, *SIZES, "--dim", "32", "--steps", "1"])
    checkpoint = tmp_path / "run" / CHECKPOINT_NAME
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    with pytest.raises(FileError, match="not a whole"):
        configs_of_run(tmp_path / "run")
    assert configs_of_run(tmp_path / "none") is None
