"""Models on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from tests.integrations.transformers.families import ALL, WIDE, dense, tokenizer
from tests.parallel import processes

# Processes start with transformers imported.
processes.PRELOAD += tuple(f"tests.integrations.transformers.{name}" for name in ("spread_models", "train_text"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with a tokenizer, and the same converted."""
    path, model = tmp_path_factory.mktemp("models"), dense("llama", **WIDE).float()
    model.save_pretrained(path / "dense")
    tokenizer().save_pretrained(path / "dense")
    convert(model, NSAConfig(**ALL), branches=["slc"]).save_pretrained(path / "converted")
    return path
