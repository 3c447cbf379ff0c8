"""Every option of ``train`` goes through every command of ``diagnose``; a new option is met without a word here.

What a case does is done, but in this process, at the smallest size.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from flexnsa.lm import DecoderLM
from flexnsa.lm.cli import main
from flexnsa.lm.cli import train as train_command
from flexnsa.lm.cli.diagnose import LOOKS
from flexnsa.lm.cli.train import model_config
from flexnsa.lm.diagnosis import GradientTrace, Outcome
from flexnsa.lm.estimate import estimate_training
from flexnsa.lm.parallel import Ranks
from tests.lm.cli.tiny_run import write_text

SIZES = "--dim 8 --num-layers 2 --num-heads 2 --num-kv-heads 1 --head-dim 4 --batch-size 1 --seq-len 24 --device cpu"
COMMANDS = {
    "diagnose gradients": "",
    "diagnose bisect": "--steps 1",
    "diagnose matrix": "--steps 1 --axis ranks=1 --axis precision=fp32 --axis checkpointing=none",
    "diagnose soak": "--steps 2 --threshold 1e9",
    "diagnose allocator": "--steps 1 --setting A=1",
    "train": "--steps 1 --eval-sequences 2",
    "train --strict": "--steps 1 --eval-sequences 2",
}
VALUES: dict[str, list[str]] = {
    "branches": ["cmp", "slc", "win", "cmp slc", "cmp win", "slc win"],
    "recompute": ["cmp slc win", "slc"],
    "checkpointing": ["all", "0:1", "every:2"],
    "impl": ["sdpa", "reference"],
    "compression": ["mean", "linear", "mlp"],
    "gate": ["sigmoid", "softmax", "residual"],
}
"""Of options that take words."""
NUMBERS = (
    "dim=12 num_layers=3 share_index=0,0,2 num_heads=4 num_kv_heads=2 head_dim=6 v_head_dim=10 rope_base=100 "
    "compress_block_size=8 compress_stride=4 select_block_size=8 num_selected_blocks=4 num_init_blocks=2 "
    "num_local_blocks=1 window_size=5 "
    "index_block_size=4 index_stride=4 index_heads=2 index_rank=3 batch_size=2 seq_len=30 grad_accumulation=2 lr=0.01 "
    "min_lr=0.5 warmup_steps=3 compressor_lr=0.5 indexer_lr=0.5 selection_loss_weight=2 weight_decay=0 beta1=0.5 "
    "beta2=0.5 clip=2 seed=7 eval_sequences=4"
)
"""Of options that take numbers; they meet a command together."""
OF_RUNS = {"out", "text", "device", "tokenizer", "steps", "eval_every", "checkpoint_every", "strict", "watchdog"}
OF_RUNS |= {"stages", "dense_stages", "indexer_stages", "parallel", "reduce_dtype", "context_parallel"}
OF_RUNS |= {"log_ranks", "cuda_graph"}
"""Options of ``train`` alone, or of every command below; a tokenizer needs a package of another extra."""


def _actions(add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, argparse.Action]:
    """Return the actions of a command by their option strings."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return {name: action for action in parser._actions for name in action.option_strings}


def _lines() -> Iterator[str]:
    """Return what is added to a command line: numbers together, what turns off together, what goes with all else, too.

    Every other option comes alone.
    """
    actions = {name: x for name, x in _actions(train_command.add_arguments).items() if x.dest not in OF_RUNS}
    values: dict[str, str] = dict(re.findall(r"(\w+)=(\S+)", NUMBERS))
    numbers = {name: x for name, x in actions.items() if x.type in (int, float) or x.dest in values}
    yield " ".join(f"{name} {values[action.dest]}" for name, action in numbers.items())
    off = [name for name, action in actions.items() if action.nargs == 0 and name.startswith("--no-")]
    yield " ".join(off)
    words: dict[str, list[str]] = {}
    for name, action in actions.items():
        if name in numbers or name in off:
            continue
        if action.nargs == 0:
            yield name
        else:
            words[name] = [f"{name} {value}" for value in action.choices or VALUES[action.dest]]
    alone = ("--branches", "--recompute", "--attention")  # which decide what else there can be
    for name in alone:
        yield from words.pop(name)
    yield from (" ".join(filter(None, row)) for row in zip_longest(*words.values()))


LINES = list(_lines())
TOGETHER = ["--shared-keys --begin-as-mean --gate softmax --recompute cmp slc win --pack --checkpointing every:2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Run cases in this process, which pass and then report the chosen status. Nothing is compiled."""
    ends = {"status": "passed"}

    def run_here(_folder: Path, function: Callable[..., dict[str, Any]], *arguments: Any, **_: Any) -> Outcome:
        values = function(*arguments)
        return Outcome(ends["status"], "planted" * (ends["status"] != "passed"), 0.0, values)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def alone(*_: Any, **__: Any) -> Iterator[Ranks]:
        yield Ranks()

    def trace_once(model: DecoderLM, loss: Any, *, static_graph: bool, **_: Any) -> GradientTrace:
        if not static_graph:  # which is DDP's alone
            loss(model).backward()
        return GradientTrace()

    monkeypatch.setattr("flexnsa.lm.diagnosis.recipe.run_case", run_here)
    monkeypatch.setattr("flexnsa.lm.diagnosis.gradients.joined_ranks", alone)
    monkeypatch.setattr("flexnsa.lm.diagnosis.gradients.trace_gradients", trace_once)
    monkeypatch.setattr(DecoderLM, "compile_layers", lambda *_, **__: None)
    return ends


@pytest.mark.parametrize("line", LINES + TOGETHER)
def test_an_option_meets_every_diagnosis(
    line: str, here: dict[str, str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (command, options) in enumerate(COMMANDS.items()):
        called = f"{command} {SIZES} {options} {line}".split()
        called += ["--text", str(text), "--out", str(tmp_path / str(number))]
        if command == "train --strict" and "--compile" in line:
            with pytest.raises(SystemExit):
                main(called)
            assert "argument --strict: expected no --compile with it" in capsys.readouterr().err
        elif command == "diagnose bisect":
            here["status"] = "failed"  # so that every layer and branch is tried
            with pytest.raises(SystemExit) as left:
                main(called)
            assert left.value.code == 1, capsys.readouterr().err
            here["status"] = "passed"
        else:
            main(called)


@pytest.mark.parametrize("line", LINES + TOGETHER)
def test_an_estimate_counts_the_parameters_of_every_option(line: str) -> None:
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    config = model_config(parser.parse_args([*SIZES.split(), *line.split()]))
    estimate = estimate_training(config, seq_len=24, batch_size=1, impl="sdpa", fused_norm=False, optimizer=True)
    assert estimate.parameters == sum(4 * parameter.numel() for parameter in DecoderLM(config).parameters())


OF_NO_TRAINING = ("environment", "selection")


@pytest.mark.parametrize("look", [name for name in LOOKS if name not in OF_NO_TRAINING])
def test_a_diagnosis_takes_the_options_of_training(look: str) -> None:
    missing = _actions(train_command.add_arguments).keys() - _actions(LOOKS[look].add_arguments).keys()
    of_runs = {"--eval-every", "--checkpoint-every", "--strict", "--watchdog", "--reduce-dtype", "--log-ranks"}
    of_runs |= {"--context-parallel", "--stages", "--dense-stages", "--indexer-stages", "--cuda-graph"}
    assert missing - {"--steps", "--parallel"} == of_runs
