"""Runs that are stopped, killed and started again have the same results, bit for bit."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from flexnsa import NSAConfig
from flexnsa.files import FileError
from flexnsa.lm import DecoderConfig, DecoderLM, TrainConfig, Trainer, run
from flexnsa.lm.checkpoint import whole_file
from flexnsa.lm.checkpoint.checksum import sealed
from flexnsa.lm.checkpoint.lock import locked
from flexnsa.lm.checkpoint.log import JSONLog, read_log
from flexnsa.lm.training.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from tests.lm.training.runs import curve, train, trainer_of, untouched
from tests.parallel.processes import started
from tests.parallel.steps import share_keys
from tests.support.inputs import TINY

MODEL = DecoderConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, nsa=TINY)
INDEXED = replace(TINY, index_heads=1, index_block_size=2, index_stride=2)
TRAINING = TrainConfig(
    steps=12, batch_size=2, seq_len=40, warmup_steps=2, eval_every=5, eval_sequences=4, checkpoint_every=4
)


@pytest.mark.parametrize("nsa", [TINY, INDEXED], ids=["the paper's scores", "an indexer"])
@pytest.mark.parametrize("pack", [False, True])
def test_resumed_run_equals_uninterrupted_run(text_folder: Path, tmp_path: Path, pack: bool, nsa: NSAConfig):
    whole = _trainer(text_folder, pack=pack, nsa=nsa)
    run(whole, tmp_path / "whole")

    interrupted = _trainer(text_folder, pack=pack, nsa=nsa)
    for step in range(7):  # dies three steps after its checkpoint
        interrupted.train_step()
        if step == 3:
            (tmp_path / "resumed").mkdir()
            save_checkpoint(tmp_path / "resumed" / "checkpoint.safetensors", interrupted)
    lines = [sealed(record) + b"\n" for record in read_log(tmp_path / "whole" / "log.jsonl")[:7]]
    (tmp_path / "resumed" / "log.jsonl").write_bytes(b"".join(lines) + b'{"step": 7, "lo')
    resumed = _trainer(text_folder, seed=99, pack=pack, nsa=nsa)  # other weights, which the checkpoint must replace
    run(resumed, tmp_path / "resumed")

    assert curve(tmp_path / "resumed") == curve(tmp_path / "whole")
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_layers_that_share_a_projection_go_on_sharing_it(text_folder: Path, tmp_path: Path):
    whole, stopped, resumed = (_trainer_of_shared_keys(text_folder) for _ in range(3))
    for trainer in (whole, stopped):
        trainer.train_step()
    save_checkpoint(tmp_path / "checkpoint.safetensors", stopped)
    load_checkpoint(tmp_path / "checkpoint.safetensors", resumed)
    for trainer in (whole, resumed):
        trainer.train_step()
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_what_overlaps_is_written_as_it_is(tmp_path: Path):
    whole = torch.arange(6.0)
    tensors = {"whole": whole, "part": whole[2:5], "again": whole}
    whole_file.save(tmp_path / "file", tensors, {})
    written = whole_file.read(tmp_path / "file").layout
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "checkpoint-1.dcp"])
def test_what_has_learned_apart_is_not_put_into_one_place(text_folder: Path, tmp_path: Path, name: str):
    apart, shared = _trainer(text_folder), _trainer_of_shared_keys(text_folder)
    apart.ranks.sharded = name.endswith(".dcp")
    apart.train_step()
    save_checkpoint(tmp_path / name, apart)
    message = r"layers\.0\.attention\.w_k_slc\.weight.* to have learned as one"
    with untouched(shared), pytest.raises(FileError, match=message):
        load_checkpoint(tmp_path / name, shared)


def test_killed_process_goes_on_to_the_samecurve(text_folder: Path, tmp_path: Path):
    options = ["--steps", "200", "--checkpoint-every", "7", "--eval-every", "50"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with started(1, tmp_path / "output", _train, text_folder, killed, *options) as group:
        group.wait_until(lambda: len(curve(killed)) >= 10)  # and is killed
    kept = curve(killed)
    assert 10 <= len(kept) < 200

    for folder in (killed, whole):
        _train(text_folder, folder, *options)
    assert len(curve(killed)) == 200
    assert curve(killed) == curve(whole)
    assert curve(killed)[: len(kept)] == kept


@pytest.mark.parametrize("place", ["train_step", "log", "save_checkpoint", "set_postfix_str", "update"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_anywhere_in_a_step_ends_with_a_checkpoint_of_that_step(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: signal.Signals
):
    trainer = _trainer(text_folder)
    step = 4 if place == "save_checkpoint" else 3  # a checkpoint is due at 4
    owner, name = {
        "train_step": (Trainer, "train_step"),
        "log": (JSONLog, "write"),
        "save_checkpoint": (sys.modules["flexnsa.lm.training.run"], "save_checkpoint"),
    }.get(place, (tqdm, place))
    original = getattr(owner, name)

    def signalled(*arguments: object, **options: object) -> object:
        result = original(*arguments, **options)
        if trainer.step == step:
            signal.raise_signal(number)
            signal.raise_signal(number)  # as from a terminal and from the program that started this one
        return result

    monkeypatch.setattr(owner, name, signalled)
    before = signal.getsignal(number)
    assert run(trainer, tmp_path / "run") == number
    assert signal.getsignal(number) == before
    assert trainer.step == step
    assert len(curve(tmp_path / "run")) == step
    assert read_checkpoint(tmp_path / "run" / "checkpoint.safetensors")[0]["step"] == step


def test_second_process_in_a_folder_is_told_of_the_first(text_folder: Path, tmp_path: Path):
    options = (tmp_path / "run", "--steps", "100000", "--checkpoint-every", "5")
    with started(1, tmp_path / "output", _train, text_folder, *options) as group:
        group.wait_until(lambda: len(curve(tmp_path / "run")) >= 6)
        first = group.processes[0].pid
        with pytest.raises(FileError, match=rf"^{tmp_path / 'run'}: process {first} is training here; "):
            run(_trainer(text_folder), tmp_path / "run")
    with locked(tmp_path / "run"):  # a lock dies with its process
        pass


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        (MODEL, replace(TRAINING, lr=0.5), r"^lr: expected 0.001, as in the checkpoint .* got 0.5"),
        (MODEL, replace(TRAINING, compressor_lr=1.0), r"^compressor_lr: expected 0.1, as in the checkpoint .* got 1.0"),
        (MODEL, replace(TRAINING, pack=True), r"^pack: expected False, as in the checkpoint .* got True"),
        (replace(MODEL, attention="dense"), TRAINING, r"^attention: expected 'nsa', .* got 'dense'"),
        (replace(MODEL, nsa=replace(TINY, window_size=9)), TRAINING, r"^window_size: expected 8, .* got 9"),
    ],
)
def test_checkpoint_of_another_run_is_refused(
    text_folder: Path, tmp_path: Path, model: DecoderConfig, training: TrainConfig, message: str
):
    path = tmp_path / "checkpoint.safetensors"
    trainer = _trainer(text_folder)
    trainer.train_step()
    save_checkpoint(path, trainer)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, Trainer(DecoderLM(model), trainer.corpus, training))
    (text_folder / "file_0.txt").write_text("another text")
    with pytest.raises(ValueError, match=r"^text_sha256: expected"):
        load_checkpoint(path, _trainer(text_folder))


def test_a_run_goes_on_with_other_branches_and_layers_run_again(text_folder: Path, tmp_path: Path):
    path = tmp_path / "checkpoint.safetensors"
    trainer = _trainer(text_folder)
    trainer.train_step()
    save_checkpoint(path, trainer)
    thrifty = Trainer(
        DecoderLM(replace(MODEL, recompute=("slc", "win"), checkpointing="every:2")), trainer.corpus, TRAINING
    )
    load_checkpoint(path, thrifty)
    assert thrifty.train_step() == trainer.train_step()


@pytest.mark.parametrize(
    "content", [b"notes of mine", b"[1]\n", sealed({}) + b"\n", sealed({"step": 0}) + b"\nnotes\n", b"\0\0\n"]
)
def test_file_that_is_no_log_is_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileError, match=rf"^{path}: line [12] is no record of a training step; "):
        JSONLog(path, resume_step=1)
    assert path.read_bytes() == content


def _trainer(text_folder: Path, seed: int = 0, pack: bool = False, nsa: NSAConfig = TINY) -> Trainer:
    return trainer_of(text_folder, replace(MODEL, nsa=nsa), replace(TRAINING, pack=pack), seed)


def _trainer_of_shared_keys(folder: Path) -> Trainer:
    trainer = _trainer(folder)
    return Trainer(share_keys(trainer.model), trainer.corpus, TRAINING)


def _train(text_folder: Path, out: Path, *options: str) -> None:
    train("--pack", "--text", text_folder, "--out", out, *options)
