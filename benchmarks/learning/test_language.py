"""Text is split by packages, runs resume as if they had never stopped, and what layers do is measured as it is said."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
from dataclasses import replace
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.habits import block_habits, first_that_chooses, head_entropies
from benchmarks.learning.language import KEY, MODELS, SIZES, is_whole, main, state_name
from benchmarks.learning.language_run import LanguageRun, final_names
from benchmarks.learning.packages import read_packages, read_text, split_packages
from benchmarks.learning.reading import bits_of_bytes, blocks_chosen, choices, drawn_blocks, forced_blocks
from benchmarks.learning.selection import selected_blocks
from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.lm import DecoderLM, Windows

TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight packages."""
    root = tmp_path_factory.mktemp("packages")
    for number in range(8):
        package = root / f"package{number}"
        package.mkdir()
        (package / "own.py").write_text(f"x_of_this_package_alone = {number}\n" * 50)
        (package / "same.py").write_text("y = 1\n" * 100)
        (package / "_vendor").mkdir()
        (package / "_vendor" / "other.py").write_text(f"z = {number}\n")
    return root


def test_text_is_kept_back_by_whole_packages_and_no_file_is_there_twice(folder: Path, tmp_path: Path) -> None:
    packages = read_packages([folder])
    train, held_out = split_packages(packages)
    assert {package.name for package in train + held_out} == {f"package{number}" for number in range(8)}
    assert train
    assert held_out
    files = [file for package in train + held_out for file in package.files]
    assert len(files) == len(set(files)) == 9, "own.py of each, same.py once, nothing of what they carry of others"
    corpus, about = read_text([folder], tmp_path / "text.pt")
    assert len(corpus.validation) == sum(size for _, size in about["held_out"])
    again, _ = read_text([], tmp_path / "text.pt")
    assert again.sha256() == corpus.sha256()


def test_text_may_be_read_by_several_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, save = tmp_path / "text.pt", torch.save

    def save_while_another_does(text: Any, path: Path) -> None:
        save(text, path)
        other = multiprocessing.get_context("spawn").Process(target=read_text, args=([folder], cache))
        other.start()
        other.join()
        assert other.exitcode == 0

    monkeypatch.setattr(torch, "save", save_while_another_does)
    read_text([folder], cache)
    assert [path.name for path in tmp_path.glob("text*")] == ["text.pt"]


def test_a_stopped_run_goes_on_as_if_it_had_not(folder: Path, tmp_path: Path) -> None:
    corpus, _ = read_text([folder], tmp_path / "text.pt")

    def run(name: str) -> LanguageRun:
        where: Any = {"device": "cpu", "folder": tmp_path / name, "compiled": False}
        model = MODELS["NSA, shared keys, begun as mean"]
        return LanguageRun(partial(model.build, TINY.model), corpus, TINY.training, TINY.finals, **where)

    whole, stopped, reports = run("whole"), run("stopped"), count()

    def stop(_: object) -> None:
        if next(reports) == 3:  # at the look after the last step; the checkpoint is two steps old
            raise InterruptedError

    whole.resume(time.time() + 60, lambda _: None)
    with pytest.raises(InterruptedError):
        stopped.resume(time.time() + 60, stop)
    # As if it had been killed where the record is written already, and the checkpoint is not.
    (tmp_path / "stopped" / "record.json").write_text((tmp_path / "whole" / "record.json").read_text())
    again = run("stopped")
    assert 0 < again.record.step < whole.record.step
    again.resume(time.time() + 60, lambda _: None)

    def timeless(run: LanguageRun) -> dict[str, Any]:
        seen = json.loads(json.dumps(run.describe()))
        seen["held_out"] = [(step, bits) for step, _, bits in seen["held_out"]]
        return seen | {"seconds": 0, "first_step_s": []}

    assert timeless(again) == timeless(whole)
    seconds = [entry[1] for entry in again.record.held_out]
    assert seconds == sorted(seconds)
    finals = whole.record.finals
    assert finals["bits with own blocks"]["mean"] == whole.record.held_out[-1][2], "of the same rows"
    assert set(finals) == set(final_names("nsa"))


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_sizes_that_their_names_say(name: str) -> None:
    usual = SIZES["m7c-125m"].model
    config = MODELS[name].configure(usual)
    letters = {
        "l": "compress_block_size",
        "d": "compress_stride",
        "l'": "select_block_size",
        "n": "num_selected_blocks",
    }
    named = {letters[letter]: int(number) for letter, number in re.findall(r"(l'|[ldn])=(\d+)", name)}
    if "indexer" in name:
        group = usual.num_heads // usual.num_kv_heads
        named |= {"index_heads": group, "index_block_size": 8, "index_stride": 8}
    assert config.nsa == replace(usual.nsa, **named)
    kind, rope = "nsa" if "NSA" in name else "dense", 1e8 if "rope 1e8" in name else usual.rope_base
    shared, begun = "shared keys" in name, "begun as mean" in name
    rank = re.search(r"rank (\d+)", name)
    changes: dict[str, Any] = {"rope_base": rope, "shared_keys": shared, "begin_as_mean": begun}
    changes |= {"index_rank": int(rank[1])} if rank else {}
    changes |= {"gate": "residual"} if "residual" in name else {}
    assert config == replace(usual, attention=kind, nsa=config.nsa, **changes)
    model = MODELS[name]
    assert model.compressor_rate == (1.0 if kind == "dense" or "plain" in name else 0.1)


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    """A model of NSA whose scores are far apart, so that which blocks are read makes a difference."""
    torch.manual_seed(0)
    made = DecoderLM(TINY.model).eval()
    for layer in nsa_layers(made):
        torch.nn.init.normal_(layer.w_q.weight)
        torch.nn.init.normal_(layer.get_submodule("w_v_slc").get_parameter("weight"))
    return made


def nsa_layers(model: DecoderLM) -> list[NativeSparseAttention]:
    return [module for module in model.modules() if isinstance(module, NativeSparseAttention)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_told_to_read_their_own_blocks_layers_do_as_they_do(model: DecoderLM, dtype: torch.dtype) -> None:
    rows = Windows(torch.randint(256, (700,), generator=torch.Generator().manual_seed(0)), 256).spread(3)
    precision = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)

    def bits() -> torch.Tensor:
        return bits_of_bytes(model, rows, 2, precision)

    usual, read = bits(), dict[str, torch.Tensor]()
    for name, ways in choices(model, model).items():
        with blocks_chosen(model, ways):
            read[name] = bits()
    assert torch.equal(read["own"], usual)
    assert torch.equal(read["initial"], usual), "of a model that has not been trained"
    first = first_that_chooses(TINY.model.nsa)
    for name in ("random", "forced"):
        assert not torch.equal(read[name][:, first:], usual[:, first:])
        assert torch.equal(read["random"][:, :first], usual[:, :first]), "there is nothing to choose from"
    assert torch.equal(bits(), usual), "all is as it was"


def test_forced_blocks_are_those_that_every_choice_has(model: DecoderLM) -> None:
    layer, x = nsa_layers(model)[0], torch.randn(2, 200, 32)
    forced, chosen, drawn = (choose(layer, x) for choose in (forced_blocks, selected_blocks, drawn_blocks))
    assert forced[1, 1, 170].tolist() == [0, 10, -1, -1]
    assert forced[1, 1, 3].tolist() == [0, -1, -1, -1]
    for blocks in (chosen, drawn):
        assert blocks.shape == forced.shape
        held = (blocks[..., None] == forced[..., None, :]).any(-2)
        assert held[forced >= 0].all()


def test_habits_are_those_of_blocks_that_are_known() -> None:
    config = NSAConfig(
        compress_block_size=4,
        compress_stride=4,
        select_block_size=4,
        num_selected_blocks=3,
        num_local_blocks=1,
        window_size=4,
    )
    # Beside the first block and its own, every query reads the fourth before its own; tokens 12 and 13 the third.
    own = torch.arange(32) // 4
    far = torch.where(own < 4, 1, own - 3)
    blocks = torch.stack([torch.zeros_like(own), far, own], -1).int()[None, None]
    blocks[:, :, :12] = torch.tensor([0, -1, -1])
    importance = torch.zeros(1, 1, 32, 8)
    importance[..., 1:] = 1.0
    seen = block_habits(blocks, importance, config)
    # 20 queries, five blocks' worth: within a block neighbours read the same, at the first token of a block not,
    # except at 16, where the fourth and the third before are both block 1.
    assert seen["shared"][1].item() == pytest.approx(16 / 19)
    assert seen["shared"][4].item() == pytest.approx(4 / 16)
    assert {least: share.item() for least, share in seen["back"].items()} == pytest.approx({1: 1.0, 2: 1.0, 4: 0.0})
    free = [2, 3, 4, 5, 6]
    assert seen["captured"].item() == pytest.approx(sum(1 / number for number in free) / len(free))

    q, k_cmp = torch.zeros(1, 2, 32, 8), torch.randn(1, 1, 8, 8)
    even = torch.tensor([(token + 1) // 4 for token in range(12, 32)]).double().log2().mean()
    torch.testing.assert_close(head_entropies(q, k_cmp, config), even.float().expand(2))


@pytest.mark.parametrize("option", ["--steps", "--side-by-side"])
def test_a_number_of_nothing_is_no_default(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--size", "tiny", "--device", "cpu", option, "0"])
    assert f"argument {option}: expected a positive int, got '0'" in capsys.readouterr().err


def test_models_are_recorded_once_and_a_run_that_fails_costs_no_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ["plain learning rate", "l'=16 n=64", "shared keys, begun as mean"]
    recorded, sparse = tmp_path / "language.json", ["NSA", *(f"NSA, {change}" for change in changed)]
    options = ["--size", "tiny", "--device", "cpu", "--steps", "2", "--side-by-side", "2", "--text", f"{folder}"]
    options += ["--json", f"{recorded}", "--folder", f"{tmp_path}", "--models", "dense", *sparse]
    text_bytes = len(read_text([folder], tmp_path / "text.pt")[0].train)
    values = ("tiny", "NSA, plain learning rate", 0, 2, text_bytes)
    broken = tmp_path / state_name(dict(zip(KEY, values, strict=True))) / "checkpoint.safetensors"
    broken.parent.mkdir()
    broken.write_text("no checkpoint")
    main(options)
    points = {point["model"]: point for point in json.loads(recorded.read_text())["points"]}
    assert broken.name in points.pop("NSA, plain learning rate")["label"]
    assert all(map(is_whole, points.values()))
    assert len(points["dense"]["finals"]["bits"]["positions"]) == 4

    broken.unlink()
    capsys.readouterr()
    main(options)
    again = {point["model"]: point for point in json.loads(recorded.read_text())["points"]}
    plain = again["NSA, plain learning rate"]
    assert is_whole(plain)
    assert "label" not in plain
    assert points == {name: again[name] for name in points}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny, ")]
    assert lines
    assert all("plain learning rate" in line for line in lines), "those that are whole are not run again"
    read = [again[name]["finals"]["bits"]["groups"] for name in sparse]
    assert all(one != other for one, other in combinations(read, 2)), "each has what its name says"

    main([*options, "--steps", "3", "--models", "dense"])
    ended = [point for point in json.loads(recorded.read_text())["points"] if point["model"] == "dense"]
    assert [(point["steps"], is_whole(point)) for point in ended] == [(2, True), (3, True)], "with the shorter run"
