"""What holds for all tests: one thread, a fixed seed; deselected, and counted, is what cannot run here."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

# CI draws the same few calls each time; --hypothesis-profile thorough draws new ones, ten thousand of them in all.
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", max_examples=160)
hypothesis.settings.load_profile("ci")

# The tests' operations are so small that a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)

EMITTED = Path(__file__).parent / "emitted"
TRANSFORMERS = Path(__file__).parent / "integrations" / "transformers"


def pytest_report_header(config: pytest.Config) -> list[str]:
    emitted = "selected" if _are_alone(config, EMITTED) else "deselected, they run alone: pytest tests/emitted"
    transformers = "selected" if _are_alone(config, TRANSFORMERS) else "left out, they run alone: make transformers"
    return [
        f"tests of emitted kernels: {emitted}",
        f"tests with Hugging Face transformers: {transformers}",
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # They cannot even be read without transformers, which is installed for them alone.
    return True if collection_path == TRANSFORMERS and not _are_alone(config, TRANSFORMERS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _are_alone(config, EMITTED):
        config.hook.pytest_deselected(items=[item for item in items if item.path.is_relative_to(EMITTED)])
        items[:] = [item for item in items if not item.path.is_relative_to(EMITTED)]


def _are_alone(config: pytest.Config, folder: Path) -> bool:
    """Tell whether only tests of a folder were asked for.

    Those of emitted kernels pretend to their process that it has a GPU.
    """
    places = ((config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args)
    return all(place.is_relative_to(folder) for place in places)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
