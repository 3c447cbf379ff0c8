"""What holds for all tests: one thread, a fixed seed; deselected, and counted, is what cannot run here."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.parallel.processes import import_for_all
from tests.support.flex_tiles import without_compiler
from tests.support.interpreter import Interpret, interpreter

# CI draws the same few calls each time; --hypothesis-profile thorough draws new ones, ten thousand of them in all.
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", max_examples=160)
hypothesis.settings.load_profile("ci")

# The tests' operations are so small that a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)

# A full collection looks at a million objects of what was imported, and finds next to nothing: one in ten is enough.
gc.set_threshold(700, 10, 100)

# Workers are as many as cores already, and a pool of compilers imports PyTorch for each. Those of a GPU are one worker.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# What was compiled once need not be again, by this worker, another one or a later run: Inductor goes by contents.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".compiled"))

# Processes are forked from a server that the first of them starts, and those of others would import the rest again.
forkserver.set_forkserver_preload = import_for_all

EMITTED = Path(__file__).parent / "emitted"
INTEGRATIONS = {"transformers": "Hugging Face transformers", "torchtitan": "torchtitan", "vllm": "vLLM"}
"""Packages by the name of their tests' folder and of the target of make that runs these."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Have ``-n auto`` start two workers more than there are cores, as tests of several processes mostly wait.

    Not where only a folder was asked for that runs alone: there a worker imports more than it waits.
    """
    alone = any(_are_alone(config, folder) for folder in (EMITTED, *map(_folder_of, INTEGRATIONS)))
    return (os.cpu_count() or 1) + (0 if alone else 2)


def pytest_report_header(config: pytest.Config) -> list[str]:
    emitted = "selected" if _are_alone(config, EMITTED) else "deselected, they run alone: pytest tests/emitted"
    lines = [f"tests of emitted kernels: {emitted}"]
    for name, package in INTEGRATIONS.items():
        alone = _are_alone(config, _folder_of(name))
        lines.append(f"tests with {package}: {'selected' if alone else f'left out, they run alone: make {name}'}")
    return lines


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # They cannot even be read without their package, which is installed for them alone.
    is_left_out = any(
        collection_path == _folder_of(name) and not _are_alone(config, collection_path) for name in INTEGRATIONS
    )
    return True if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _are_alone(config, EMITTED):
        config.hook.pytest_deselected(items=[item for item in items if item.path.is_relative_to(EMITTED)])
        items[:] = [item for item in items if not item.path.is_relative_to(EMITTED)]


def _folder_of(name: str) -> Path:
    return Path(__file__).parent / "integrations" / name


def _are_alone(config: pytest.Config, folder: Path) -> bool:
    """Tell whether only tests of a folder were asked for.

    Those of emitted kernels pretend to their process that it has a GPU.
    """
    places = ((config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args)
    return all(place.is_relative_to(folder) for place in places)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have FlexAttention run its formula on the tiles that its mask lists.

    Inductor compiles each branch for other tests, at half a minute of C++.
    """
    without_compiler(monkeypatch)


@pytest.fixture
def threads() -> Iterator[int]:
    """Have PyTorch use four threads, or as many as the test sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def interpret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpret]:
    """Return the interpreter of Triton that this worker's tests share; see ``tests/support/interpreter.py``."""
    pytest.importorskip("triton", reason="triton not installed: pip install triton, which has builds for Linux")
    with interpreter(tmp_path_factory.mktemp("interpreted")) as ask:
        yield ask


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def compute(request: pytest.FixtureRequest, interpret: Interpret) -> Interpret:
    """Return what runs the kernels of a module's case: the interpreter, or a GPU."""
    return interpret if request.param == "interpreter" else lambda module, name: module.interpret(name, request.param)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls a command, which has to leave with status 2, and returns its one line of stderr."""

    def refuse(command: Callable[..., object], *arguments: object) -> str:
        with pytest.raises(SystemExit) as leaving:
            command(*arguments)
        assert leaving.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refuse
