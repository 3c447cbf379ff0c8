"""The page of this integration: its command is one of torchtitan's, and its sample exports a model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides
from transformers import AutoModelForCausalLM

import flexnsa.transformers  # noqa: F401
from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.options import Options
from tests.integrations.torchtitan.dense import TRAINED, run_from_dense
from tests.integrations.torchtitan.runs import CONFIGS, override
from tests.parallel.conftest import RunOnce

PAGE = (Path(__file__).parents[3] / "docs" / "torchtitan.md").read_text()


def test_the_command_adapts_a_model_of_torchtitan() -> None:
    (command,) = re.findall(r"^torchrun (.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
    arguments = shlex.split(command.replace("\\\n", " "))
    config: Any = ConfigManager().parse_args(arguments[arguments.index("torchtitan.train") + 1 :])
    apply_overrides(config.override, config)
    layers = [layer.attention for layer in config.model_spec.model.layers]
    assert all(type(layer) is NSAttention.Config for layer in layers)
    assert len(config.optimizer.param_groups) == 2


def test_defaults_in_the_table_are_those_of_the_options() -> None:
    said = {}
    for names, values in re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", PAGE, re.MULTILINE):
        given = zip(names.replace("`", "").split(", "), values.replace("`", "").split(", "), strict=True)
        said |= {name: value for name, value in given if name in Options.__slots__}
    defaults = Options()
    assert said == {
        "layers": f'"{defaults.layers}"',
        "packed": str(defaults.packed).lower(),
        "warmup": str(defaults.warmup).lower(),
        "selection_loss_weight": str(defaults.selection_loss_weight),
        "compressor_lr": str(defaults.compressor_lr),
        "indexer_lr": str(defaults.indexer_lr),
    }


def test_the_sample_exports_what_a_run_has_saved(
    run_once: RunOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(run_once(1, run_from_dense, "llama")["folder"])
    name = "three branches"
    given = ["--module", CONFIGS, "--config=llama", f"--hf_assets_path={folder / 'dense'}"]
    given += [f"--dump_folder={folder / name}", override(**TRAINED[name])]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["export.py", *given])
    (sample,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(sample, "torchtitan.md", "exec"), {})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.model_type == "flexnsa_llama"
