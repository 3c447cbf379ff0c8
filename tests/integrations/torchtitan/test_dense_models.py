"""NSA layers start from a dense checkpoint as its own layers, and what they become transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import flexnsa.transformers  # noqa: F401
from flexnsa.torchtitan.export import export
from tests.integrations.torchtitan.dense import FAMILIES, TRAINED, rows, run_from_dense
from tests.integrations.torchtitan.runs import FEW, config_of, override
from tests.parallel.conftest import RunOnce

GATED = 0.02
"""How far branches with gates of 0.02 may move the loss."""
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_all_blocks_selected_have_the_loss_of_the_dense_model(family: str, run_once: RunOnce) -> None:
    losses = run_once(1, run_from_dense, family)["losses"]
    assert losses["dense"] == pytest.approx(losses["transformers"], abs=1e-4)
    assert losses["selected"] == pytest.approx(losses["dense"], abs=1e-4)
    assert losses["three"] != losses["dense"]
    assert losses["three"] == pytest.approx(losses["dense"], abs=GATED)


@every_family
@pytest.mark.parametrize("name", TRAINED)
def test_an_exported_model_computes_the_same(family: str, name: str, run_once: RunOnce, tmp_path: Path) -> None:
    logits = run_once(1, run_from_dense, family)["logits"][name]
    folder = _folder_of(run_once, family)
    config = config_of(family, folder, f"--hf_assets_path={folder / 'dense'}", override(**TRAINED[name]))
    export(config, folder / name / "checkpoint" / "step-3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert model.config.flexnsa["num_selected_blocks"] == FEW["num_selected_blocks"]
    with torch.no_grad():
        assert_close(model(rows()[0]).logits, logits, rtol=1e-4, atol=1e-4)


@every_family
def test_a_run_begins_from_the_exported_checkpoint_of_a_dense_one(family: str, run_once: RunOnce) -> None:
    """As it is it lacks the parameters of new branches, and a distributed checkpoint has to have all."""
    run, (tokens, labels) = run_once(1, run_from_dense, family), rows()
    model = AutoModelForCausalLM.from_pretrained(Path(run["folder"], "exported")).eval()
    with torch.no_grad():
        logits = model(tokens).logits
    assert_close(logits, run["logits"]["dense run"], rtol=1e-4, atol=1e-4)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert run["losses"]["selected, begun"] == pytest.approx(loss, abs=1e-4)
    assert run["losses"]["three, begun"] == pytest.approx(loss, abs=GATED)


def _folder_of(run_once: RunOnce, family: str) -> Path:
    return Path(run_once(1, run_from_dense, family)["folder"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["layers.0.*"]}, "layers: expected 'all', as converted models have no dense ones, got layer 1"),
        ({"shared_keys": True}, "shared_keys: expected False, as each branch of a converted model has keys, got True"),
        ({"compression": "mlp"}, "compression: expected 'linear', as converted models compress, got 'mlp'"),
    ],
)
def test_what_converted_models_have_not_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        export(config_of("llama", tmp_path, override(**FEW, **options)), tmp_path, tmp_path)


def test_other_families_and_other_checkpoints_are_refused(run_once: RunOnce, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = config_of("llama", tmp_path, f"--hf_assets_path={tmp_path}", override(**FEW))
    with pytest.raises(
        ValueError, match=r"^hf_assets_path: expected the config.json of one of llama, qwen3, got 'gpt2'"
    ):
        export(config, tmp_path, tmp_path)
    folder = _folder_of(run_once, "llama")
    config = config_of("llama", tmp_path, f"--hf_assets_path={folder / 'dense'}", override(**FEW))
    with pytest.raises(ValueError, match=r"^checkpoint: expected layers\.0\.attention\.w_k_cmp\.weight"):
        export(config, folder / "one branch" / "checkpoint" / "step-3", tmp_path)
