"""Whatever is typed, a command ends with a status: no traceback, one line for a mistake, and no file lost."""

from __future__ import annotations

import io
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_run import SIZES, SPOILT_FOR_TRAINING, contents, train, write_text

from flexnsa import NSAConfig
from flexnsa.lm import DecoderConfig, TrainConfig
from flexnsa.lm.cli import main
from flexnsa.lm.cli.options import option_name

FLAG: list[str] = []
LARGEST = str(2**63 - 1)
INTEGERS = ["1", "2", "3", "4", "8", "16", "0", "-1", "", "x", "1.5", "1e3", "é", "9" * 20, "9" * 5000]
NUMBERS = ["0", "0.5", "1", "2", "1e-3", "1e-40", "5e-324", "1e30", "1e400", "-1", "nan", "inf", "", "x", "1,5"]
WORDS = ["auto", "sdpa", "reference", "flex", "nsa", "dense", "mlp", "mean", "sigmoid", "fp32", "bf16", "cpu", "large"]
WORDS += ["small", "cuda:77", "meta", "", "magic", "\0", "\udcff", "\ud800", "a\nb", "-", "--", "a" * 5000]
TEXTS = ["a", "def é", "\0", "", "\udcff", "\ud800", "x" * 70, "-x"]
PATHS = ["run", "spoilt", "spoilt/checkpoint.safetensors", "run/checkpoint.safetensors", "run/log.jsonl", "text"]
PATHS += ["texts", "text/below", "empty", "nowhere", "nowhere/new", "hollow", "a\0b", "\udcff", "\ud800", "a" * 300]
LAYERS = ["", "none", "all", "0:1", "1:9", "2:1", "every:2", "every:0", "0:" + "9" * 30, "every:" + "9" * 5000, "x"]
STAGES = ["8:0.5,24:0.5", "24:1", "2048:.5,8192:.5", "24:1e400", "0:1", "8:nan,24:1", "1e3:1", "8:-1,24:2", ":", ""]
BRANCHES = ["cmp", "slc", "win", "cmp slc", "cmp slc win", "far", "win win", ""]


def of_config(config_class: type, *but: str) -> dict[str, list[str]]:
    """Options of a config's fields, with values of all kinds."""
    kinds = {"int": [*INTEGERS, LARGEST], "float": NUMBERS}
    chosen = [field for field in fields(config_class) if field.name not in but]
    return {option_name(field.name): kinds.get(str(field.type).split(" |")[0], WORDS) for field in chosen}


# So many layers or rows would be built one by one, and so many tokens written.
COUNTED = dict.fromkeys(
    ["--num-layers", "--batch-size", "--grad-accumulation", "--eval-sequences", "--steps", "--layers"], INTEGERS
)
OPTIONS: dict[str, dict[str, list[str]]] = {
    "train": {
        "--text": PATHS,
        "--out": PATHS,
        "--preset": WORDS,
        "--device": WORDS,
        "--branches": BRANCHES,
        "--recompute": BRANCHES,
        "--checkpointing": LAYERS,
        "--no-checkpointing": FLAG,
        "--pack": FLAG,
        "--parallel": [*WORDS, "ddp", "fsdp2"],
        "--reduce-dtype": [*WORDS, "bf16", "fp16"],
        "--log-ranks": FLAG,
        "--strict": FLAG,
        "--cuda-graph": FLAG,
        "--watchdog": ["0", "-1", "nan", "inf", "1e9", "", "x", "600"],  # in less it would end whoever calls
        **of_config(DecoderConfig, "nsa", "branches", "recompute", "vocab_size", "checkpointing"),
        **of_config(NSAConfig),
        **of_config(TrainConfig, "pack", "stages"),
        "--stages": STAGES,
        **COUNTED,
    },
    "generate": {
        "--checkpoint": PATHS,
        "--prompt": TEXTS,
        "--max-new-tokens": [*INTEGERS, LARGEST],
        "--stop": [*TEXTS, "aé", "éab\udcff"],
        "--seed": [*INTEGERS, LARGEST],
        "--device": WORDS,
        "--temperature": NUMBERS,
        "--top-k": [*INTEGERS, LARGEST],
        "--top-p": NUMBERS,
    },
    "estimate": {
        "--preset": WORDS,
        "--seq": [*INTEGERS, LARGEST],
        "--batch": [*INTEGERS, LARGEST],
        "--stages": STAGES,
        "--dense-stages": INTEGERS,
        "--indexer-stages": INTEGERS,
        "--layers": INTEGERS,
        "--precision": WORDS,
        "--checkpointing": LAYERS,
        "--no-checkpointing": FLAG,
        "--recompute": BRANCHES,
        "--compile": FLAG,
        "--attention": WORDS,
        "--impl": WORDS,
        "--budget": ["1GiB", "0KB", ".5tb", "9" * 400 + "MB", "1e3GB", "", "x", "-1GB"],
    },
    "paint": {"--out": PATHS},
}
BEGINNINGS = {"train": f"--text text --out new {SIZES}", "generate": "--checkpoint run --prompt def --max-new-tokens 5"}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(["train"] * 6 + ["generate"] * 4 + ["estimate"] * 3 + ["paint"]))
    line = [command, *BEGINNINGS.get(command, "").split()]
    for option in draw(st.lists(st.sampled_from(list(OPTIONS[command])), max_size=3)):
        values = OPTIONS[command][option]
        line += [option, *draw(st.sampled_from(values)).split(" ")] if values else [option]
    line += draw(st.sampled_from([[]] * 20 + [["--seed"], ["--preset="], ["--", "x"], ["--help"], ["--no-pack"]]))
    return line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    text = write_text(folder / "text")
    train(folder / "run", text)
    train(folder / "spoilt", text)
    for name in ("texts", "hollow"):
        (folder / name).mkdir()
    for number in range(3):
        write_text(folder / "texts" / f"{number}.py")
    (folder / "empty").touch()
    return folder


@settings(max_examples=180, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(line=command_lines(), how=st.sampled_from(list(SPOILT_FOR_TRAINING)))
def test_no_traceback_and_nothing_lost(line: list[str], how: str, files: Path) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        shutil.copytree(files, folder, dirs_exist_ok=True)
        SPOILT_FOR_TRAINING[how](folder / "spoilt" / "checkpoint.safetensors")
        before = contents(folder)
        patch.chdir(folder)
        status, lines = run(line)
        after = contents(folder)
    if status == 2:
        assert len(lines) == 1
        assert lines[0].startswith("flexnsa")
        assert after == before
    elif status == 1 and line[0] != "estimate":  # which says so of a budget, on stdout
        assert "error: " in lines[-1]
    else:
        assert status in (0, 1)
    assert {file: data for file, data in after.items() if file in before} == before


def run(line: list[str]) -> tuple[object, list[str]]:
    """The status, and the lines on stderr; stdout takes what a terminal takes."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        try:
            main(line)
        except SystemExit as leaving:
            return leaving.code, errors.getvalue().splitlines()
    return 0, errors.getvalue().splitlines()
