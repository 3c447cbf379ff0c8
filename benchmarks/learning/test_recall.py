"""Rows ask for what can be known, runs resume as if they had never stopped, and a run that fails costs no other."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.curriculum import Run
from benchmarks.learning.plan import KINDS, Stage
from benchmarks.learning.recall import main
from benchmarks.learning.selection import selected_blocks, unscored_blocks
from benchmarks.learning.sizes import SIZES
from benchmarks.learning.tasks import SLOT, Rows, Vocabulary, depth_rows, training_rows
from benchmarks.learning.variants import ABLATIONS, VARIANTS
from benchmarks.learning.workers import places
from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from flexnsa.layers.indexer import Indexer
from flexnsa.lm import DecoderLM
from flexnsa.packing import IGNORED

VOCABULARY = Vocabulary(keys=40, values=10, fillers=5)
SMOKE = SIZES["smoke"]
INDEXED = "NSA, begun as mean, slow, indexer"
MODELS = {name: variant for size in SIZES.values() for name, variant in size.variants.items()}


def test_every_question_can_be_answered_from_the_row_alone() -> None:
    rows = training_rows(VOCABULARY, 6, 80, 12, torch.Generator().manual_seed(0))
    counts = []
    for tokens, targets, distances in zip(*(x.tolist() for x in rows), strict=True):
        asked = [place for place, distance in enumerate(distances) if distance]
        for place in asked:
            first = tokens.index(tokens[place])
            assert (first, tokens[first + 1]) == (place - distances[place], targets[place])
        notes = [place for place, target in enumerate(targets) if target != IGNORED and not distances[place]]
        assert [targets[place] for place in notes] == [tokens[place - 1] for place in notes]
        assert len(notes) == 2 * len(asked)
        counts.append(len(asked))
    assert counts == [1, 2, 3, 4, 7, 12]


def test_rows_ask_at_their_end_for_pairs_at_the_depths_given() -> None:
    depths = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.0, 0.25]])
    rows = depth_rows(VOCABULARY, 86, depths, 4, torch.Generator().manual_seed(0))
    asked = torch.arange(80, 86, SLOT)
    written_at = asked - rows.distances[:, asked]
    assert torch.equal(written_at, (depths * 39).round().long() * SLOT)
    assert torch.equal(rows.targets[:, asked], rows.tokens.gather(1, written_at + 1))
    assert (rows.distances > 0).sum(1).tolist() == [7, 7]


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    def run(name: str) -> Run:
        return Run(VARIANTS["NSA"], SMOKE.model, SMOKE.plan, seed=3, device="cpu", path=tmp_path / name)

    def stop(_: object) -> None:
        raise InterruptedError

    whole, stopped = run("whole"), run("stopped")
    whole.resume(math.inf, lambda _: None)
    with pytest.raises(InterruptedError):
        stopped.resume(math.inf, stop)
    again = run("stopped")
    assert 0 < again.step < whole.step
    again.resume(time.time(), lambda _: None)
    assert again.record.maps == {kind: {} for kind in KINDS}, "the time was up"
    del again.record.maps["needle chosen"]  # as in states saved before there were such maps
    again.resume(math.inf, lambda _: None)
    assert [len(whole.record.maps[kind]["64"]) for kind in KINDS] == [16] * 3
    timeless = {"seconds": 0}
    assert again.describe() | timeless == whole.describe() | timeless
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(parameter, again.model.state_dict()[name]), name


LETTERS = {"l": "compress_block_size", "d": "compress_stride", "l'": "select_block_size", "n": "num_selected_blocks"}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_sizes_and_the_rate_that_their_names_say(name: str) -> None:
    config = MODELS[name].configure(SIZES["gpu"].model)
    for letter, number in re.findall(r"(l'|[ldnw])=(\d+)", name):
        assert getattr(config.nsa, LETTERS.get(letter, "window_size")) == int(number), letter
    index = (config.nsa.index_heads, config.nsa.index_block_size, config.nsa.index_stride)
    assert index == ((2, 4, 4) if "indexer" in name else (None, None, None))
    (base,) = re.findall(r"rope (\d+)", name) or ["1e8"]
    assert config.rope_base == float(base)
    slow = "slow" in name or name in ABLATIONS
    rate = 0.3 if "a third" in name else 0.1 if slow else 1.0
    assert MODELS[name].compressor_rate == rate
    assert MODELS[name].begun_as_mean == ("begun as mean" in name)
    assert MODELS[name].shared_keys == ("shared keys" in name)


def losses(model: DecoderLM, rows: Rows) -> tuple[float, float]:
    """The loss of language, and that of selection."""
    selection = SelectionLoss()
    loss = model(rows.tokens, targets=rows.targets, selection=selection)
    assert isinstance(selection.total, torch.Tensor)
    return loss.item(), selection.total.item()


def test_a_step_teaches_indexers_and_records_the_loss_of_language_alone(tmp_path: Path) -> None:
    stage = Stage(seq_len=64, rows=4, pairs=4, steps=15)
    plan = replace(SMOKE.plan, stages=(stage,), warmup_steps=1, eval_every=1)
    run = Run(VARIANTS[INDEXED], SMOKE.model, plan, seed=0, device="cpu", path=tmp_path / "run")
    rows = training_rows(plan.vocabulary, stage.rows, stage.seq_len, stage.pairs, torch.Generator().manual_seed(0))
    first, _ = losses(run.model, rows)
    run.resume(math.inf, lambda _: None)
    assert run.record.loss[0] == pytest.approx(first, abs=1e-4)
    untaught = copy.deepcopy(run.model)
    for indexer in (module for module in untaught.modules() if isinstance(module, Indexer)):
        indexer.reset_parameters()
    (_, taught), (_, begun) = losses(run.model, rows), losses(untaught, rows)
    assert taught < 0.9 * begun


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["NSA", INDEXED])
def test_steps_that_are_replayed_learn_what_others_learn(variant: str, tmp_path: Path) -> None:
    plan = replace(SMOKE.plan, stages=(replace(SMOKE.plan.stages[1], steps=20),), eval_every=20)

    def learned(name: str, *, replayed: bool) -> list[float]:
        options = {"seed": 0, "device": "cuda", "path": tmp_path / name, "replayed": replayed}
        run = Run(VARIANTS[variant], SMOKE.model, plan, **options)
        run.resume(math.inf, lambda _: None)
        assert not run.record.obstacles
        return run.record.loss

    expected = learned("as they come", replayed=False)
    torch.testing.assert_close(learned("replayed", replayed=True), expected, rtol=1e-2, atol=0)


def test_nsa_reads_as_little_as_a_stage_says_and_in_the_end_what_its_config_says(tmp_path: Path) -> None:
    def sizes_on_the_way(variant: str) -> list[tuple[int, int]]:
        run = Run(MODELS[variant], SMOKE.model, SMOKE.plan, seed=0, device="cpu", path=tmp_path / variant)
        layer = next(module for module in run.model.modules() if isinstance(module, NativeSparseAttention))
        seen = list[NSAConfig]()
        run.resume(math.inf, lambda _: seen.append(layer.config))
        return [(sizes.num_selected_blocks * sizes.select_block_size, sizes.window_size) for sizes in seen]

    tight, end = (16, 4), (64, 16)
    assert sizes_on_the_way("NSA") == [tight, end, end, end, end]
    assert sizes_on_the_way("all blocks from the start") == [end] * 5


def first_layer(variant: str) -> NativeSparseAttention:
    torch.manual_seed(0)
    model = MODELS[variant].build(MODELS[variant].configure(SMOKE.model))
    return next(module for module in model.modules() if isinstance(module, NativeSparseAttention))


def test_a_compressor_begun_as_the_mean_gives_the_mean_of_its_blocks() -> None:
    keys = torch.randn(1, 2, 64, 32)
    mean = first_layer("NSA, mean compressor").phi_k(keys)
    for variant in ("linear, begun as mean", "MLP, begun as mean"):
        begun = first_layer(variant)
        torch.testing.assert_close(begun.phi_k(keys), mean)
        torch.testing.assert_close(begun.phi_v(keys), mean)


def test_normalised_compressed_keys_are_of_one_length_and_values_are_not() -> None:
    layer, x = first_layer("NSA, normalised"), torch.randn(1, 2, 64, 32)
    length = layer.phi_k(x).square().mean(-1)
    torch.testing.assert_close(length, torch.ones_like(length), rtol=1e-3, atol=0)
    assert layer.phi_v(x).square().mean(-1).max() < 0.5


def test_blocks_score_nothing_where_scores_are_so_far_apart_that_all_but_the_best_underflow() -> None:
    layer, x = first_layer("NSA"), torch.randn(2, 64, 64)
    assert not unscored_blocks(layer, x).any()
    with torch.no_grad():
        layer.w_q.weight.mul_(1e6)
    share = unscored_blocks(layer, x)
    assert not share[:, :16].any(), "no block is whole"
    assert 0.4 < share[:, 48:].mean() < 1


def test_blocks_of_shared_keys_are_those_of_keys_of_its_own_that_are_equal() -> None:
    shared, apart = (NativeSparseAttention(32, 4, 2, 8, config=SMOKE.model.nsa, shared_keys=x) for x in (True, False))
    state = shared.state_dict()
    apart.load_state_dict(state | {"w_k_cmp.weight": state["w_k_slc.weight"]})
    x = torch.randn(1, 200, 32)
    assert torch.equal(selected_blocks(shared, x), selected_blocks(apart, x))
    torch.nn.init.normal_(apart.get_parameter("w_k_cmp.weight"))
    assert not torch.equal(selected_blocks(shared, x), selected_blocks(apart, x))


def test_workers_are_spread_over_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(2, "cuda")] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(1, "cuda")] == ["3", "5"]
    assert places(2, "cpu") == [{}, {}]


def test_whole_runs_are_recorded_once_and_one_that_fails_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "NSA-0.pt").write_text("no state")
    path = tmp_path / "recall.json"

    def recall(*options: str, folder: Path, size: str = "smoke") -> dict[str, dict[str, Any]]:
        where = ["--json", f"{path}", "--folder", f"{folder}"]
        main(["--size", size, "--device", "cpu", "--seeds", "0", *where, *options])
        return {point["variant"]: point for point in json.loads(path.read_text())["points"]}

    points = recall("--variants", "NSA", "dense", "--workers", "2", folder=tmp_path)
    assert "label" in points["NSA"]
    assert points["dense"]["step"] == SMOKE.plan.steps
    maps = points["dense"]["maps"]
    drawn = {kind: {len(counts) for counts in lengths.values()} for kind, lengths in maps.items()}
    assert drawn == {"pairs": {16}, "needle chosen": set(), "needle": {16}}
    recorded = json.loads(path.read_text())
    assert [*map(tuple, recorded["looks"])] == SMOKE.plan.looks()
    assert len(points["dense"]["recall"]) == len(points["dense"]["loss"]) == len(recorded["looks"])

    elsewhere = tmp_path / "elsewhere"
    assert recall("--variants", "dense", folder=elsewhere) == points
    assert recall("--variants", "dense", "window only", "--deadline", "0", folder=elsewhere) == points
    assert capsys.readouterr().out.endswith("Not at their end: window only with seed 0.\n")
    assert not elsewhere.exists()
    with pytest.raises(SystemExit):
        recall("--variants", "dense", folder=elsewhere, size="cpu")
    assert "differs in plan, eval_every; plan, map_lengths;" in capsys.readouterr().err
