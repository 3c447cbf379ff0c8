"""Steps that a CUDA graph replays learn what other steps learn; they need a GPU and a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexnsa.lm import DecoderLM, Trainer, preset, read_corpus
from flexnsa.lm.cli import main
from flexnsa.lm.training.checkpoint import load_checkpoint, save_checkpoint
from flexnsa.lm.training.checks import check_cuda_graph
from tests.lm.training.runs import trainer_of
from tests.lm.training.test_stages import GROWING, WARMED
from tests.lm.training.test_trainer import TAUGHT


def test_graphs_need_a_gpu_and_one_process(text_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    expected = "cuda_graph: expected a GPU and a single process with it, got"
    with pytest.raises(ValueError, match=f"{expected} device 'cpu' and 1 processes"):
        Trainer(DecoderLM(TAUGHT), read_corpus(text_folder), GROWING, cuda_graph=True)
    with pytest.raises(ValueError, match=f"{expected} device 'cuda' and 2 processes"):
        check_cuda_graph(True, torch.device("cuda"), 2)
    command = ["train", "--cuda-graph", "--device", "cpu", "--text", f"{text_folder}", "--out", f"{tmp_path / 'run'}"]
    assert f"argument --cuda-graph: {expected.removeprefix('cuda_graph: ')} device 'cpu'" in refused(main, command)
    assert "argument --strict: expected no --cuda-graph with it" in refused(main, [*command, "--strict"])
    assert not (tmp_path / "run").exists()


def test_what_changes_between_steps_comes_by_tensors(text_folder: Path) -> None:
    """A replay knows nothing of the trainer's step but that of its capture."""
    config = replace(GROWING, stages=(), pack=True)
    plain, captured = (trainer_of(text_folder, TAUGHT, config) for _ in range(2))
    learn = captured._take_step

    def replay(*tensors: torch.Tensor) -> torch.Tensor:
        step, captured.step = captured.step, 0
        numbers = learn(*tensors)
        captured.step = step
        return numbers

    captured._take_step = replay
    steps: list[int] = []  # which choose the queries whose indexers learn
    captured.model.register_forward_pre_hook(
        lambda *call: steps.append(int(call[2]["selection"].step)), with_kwargs=True
    )
    assert [captured.train_step() for _ in range(4)] == [plain.train_step() for _ in range(4)]
    assert steps == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "fields", [{"dense_stages": 1}, {"pack": True, "grad_accumulation": 2, "dense_stages": 2}, WARMED]
)
def test_replayed_steps_are_the_same_steps(
    text_folder: Path, tmp_path: Path, compiled: bool, fields: dict[str, Any]
) -> None:
    """Through stages of which two have one length, evaluations between steps, and a checkpoint of the other kind."""
    model = replace(preset("text-125m"), dim=128, num_layers=2, num_heads=6, num_kv_heads=1, head_dim=64)
    stages = ((256, 0.25), (256, 0.25), (512, 0.5))
    config = replace(GROWING, steps=20, batch_size=2, seq_len=512, stages=stages, precision="bf16", **fields)
    corpus = read_corpus(text_folder)

    def build(cuda_graph: bool) -> Trainer:
        torch.manual_seed(0)
        return Trainer(DecoderLM(model).cuda(), corpus, config, compiled=compiled, cuda_graph=cuda_graph)

    plain, graphed = build(False), build(True)
    for step in range(config.steps):
        if step == 16:
            save_checkpoint(tmp_path / "checkpoint.safetensors", graphed)
            graphed = build(True)
            load_checkpoint(tmp_path / "checkpoint.safetensors", graphed)
        expected, found = plain.train_step().to_dict(), graphed.train_step().to_dict()
        assert found == pytest.approx(expected, rel=2e-3), step
        assert graphed.validation_bits_per_byte() == pytest.approx(plain.validation_bits_per_byte(), rel=2e-3)
