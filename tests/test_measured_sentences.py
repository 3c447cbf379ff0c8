"""What pages and figures of text say is what was recorded; tables are written from the recordings."""

from __future__ import annotations

import json
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.tables import text
from benchmarks.tables.points import Point, points_by, read_record, total
from flexnsa import NSAConfig
from plots import language
from plots.records import NotRecordedError, Results

ROOT = Path(__file__).parents[1]
LATER = "nsa, dense first, then indexers"


def test_the_seconds_of_a_step_are_what_was_recorded() -> None:
    points = points_by("stages_h100", "model", lr=8e-4, seed=0)
    names = (LATER, "nsa, dense first", "nsa", "dense")
    later, first, plain, dense = (0.15 * 330 / points[name]["steps"][0] for name in names)
    step = f"A step then takes {later:.3f} s; with the loss {first:.3f} s, without a dense stage {plain:.3f}"
    assert f"{step}, and a dense one {dense:.3f}." in words_of("docs/learning.md")


def test_the_differences_in_equal_seconds_are_what_was_recorded() -> None:
    page, points = words_of("docs/learning.md"), points_by("stages_h100", "model", "lr", "seed")
    nsa, dense = reports(points, LATER, 8e-4, range(10)), reports(points, "dense", 1.2e-3, range(10))
    gaps = gaps_between(nsa, dense)
    p = sign_flip_p(gaps)
    said = f"minus the dense model (0.0012) is {fmean(gaps):.3f} with a standard error of {error_of(gaps):.3f}"
    assert f"{said} (p = {p:.3f}), from {min(gaps):.3f} to {max(gaps):.3f}. " in page
    assert f"the other nine alone have {fmean(gaps[1:]):.3f}. " in page
    near, far = (
        fmean(other["positions"][at] for other in dense) - fmean(one["positions"][at] for one in nsa) for at in (0, -1)
    )
    assert f"by {near:.3f} in the first 512 bytes and by {far:.3f} behind 24k" in page
    saved = gaps_between(nsa[:5], reports(points, "nsa, dense first", 8e-4, range(5)))
    assert f"saves {-fmean(saved):.3f} bits (standard error {error_of(saved):.3f}) beside *dense first*" in page
    told = f"it has {-fmean(gaps):.3f} bits less than a dense model after the same seconds of an H100"
    assert f"{told}, without compiling (ten seeds, p = {p:.3f})" in words_of("README.md")


def reports(points: dict[Any, Point], model: str, lr: float, seeds: range) -> list[Point]:
    """Return the bits per reported byte of some seeds."""
    return [points[model, lr, seed]["report 32k"] for seed in seeds]


def gaps_between(ours: list[Point], theirs: list[Point]) -> list[float]:
    return [one["mean"] - other["mean"] for one, other in zip(ours, theirs, strict=True)]


def error_of(gaps: list[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(gaps) / len(gaps) ** 0.5


def sign_flip_p(gaps: list[float]) -> float:
    """Return how often the mean is as far from 0 when each gap has a random sign: an exact two-sided test."""
    flipped = [abs(sum(signs)) for signs in product(*((gap, -gap) for gap in gaps))]
    return sum(total >= abs(sum(gaps)) for total in flipped) / len(flipped)


def test_what_is_said_of_8k_is_what_was_recorded() -> None:
    late, dense = (
        [points_by("stages_8k_h200", "model", seed=seed, lr=1.2e-3)[model]["report 8k"]["mean"] for seed in range(5)]
        for model in ("nsa, dense until 0.8, then indexers", "dense")
    )
    gaps = " ".join(f"{ours - theirs:+.4f}" for ours, theirs in zip(late, dense, strict=True))
    assert f"NSA minus the dense model is {gaps} bits (seeds 0 to 4" in words_of("docs/learning.md")


def test_what_is_said_of_needles_is_what_was_recorded() -> None:
    maps = [point["maps"] for point in read_record("recall_needles_h200")["points"]]
    chosen, right, pairs = (sum(sum(of[kind]["65536"]) for of in maps) for kind in ("needle chosen", "needle", "pairs"))
    said = f"the block of {chosen} of 96, and {right} are answered; of pairs, {pairs / len(maps) / 5.12:.1f} %"
    assert said in words_of("docs/learning.md")


def test_what_sharing_an_index_costs_is_what_was_recorded() -> None:
    shared, own = (
        points_by(f"stages_{card}", "model", lr=8e-4, seed=0)[name]["report 32k"]["positions"][-1]
        for card, name in (("h200", "nsa, dense first, shared index 3"), ("h100", "nsa, dense first"))
    )
    assert f"bytes behind 24k cost {shared - own:.3f} bits more" in words_of("docs/learning.md")


def test_a_step_with_a_shared_index_takes_what_was_recorded() -> None:
    points = points_by("decode_h100", "name", batch=1, part="layer", mode="eager")
    alone, leads, follows = (
        points[name]["graph_ms"]["65536"] for name in ("NSA", "NSA, default settings", "NSA, default settings, follows")
    )
    assert f"takes {(leads + 2 * follows) / 3 / alone:.2f} times one without an indexer" in words_of("docs/learning.md")


def test_what_the_page_says_of_text_125m_is_what_was_recorded() -> None:
    page = words_of("docs/learning.md")
    points = read_record("training_indexer_h200")["points"]
    own, without, dense, own_far, without_far, dense_far = (point["step_ms"] for point in points)
    assert f"**A step of text-125m takes {own:.0f} ms at 8k and {own_far:.0f} at 32k**" in page
    assert f", dense {dense:.0f} and {dense_far:.0f} (" in page
    assert f"Without indexer: {without:.0f} and {without_far:.0f}." in page
    assert not any("commit" in point for point in points)
    runs = text.runs_of("m7c-125m")
    seeds = runs[2000, text.DEFAULT]
    worst = min(fmean(layer) for run in seeds for layer in run["selection"][-1][1])
    assert f"the worst layers of text-125m find {worst:.3f}" in page
    assert f"by {text.gap(runs[2000, 'NSA'], runs[2000, 'dense'])} bits" in page


def test_what_the_page_says_of_teaching_is_what_was_recorded() -> None:
    page, record = words_of("docs/learning.md"), read_record("teaching_h200")
    sizes, nsa, training = (record["setting"][name] for name in ("sizes", "nsa", "training"))
    base, stride = f"{sizes['rope_parameters']['rope_theta']:.0e}".replace("e+0", "e"), training["index_stride"]
    model = f"{sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, `rope_theta={base}`"
    runs = {run["name"]: run for run in record["points"]}
    last = {name: run["held_out"][-1][1] for name, run in runs.items()}
    kinds = "pretraining", "default means of keys", "means of keys", "best blocks", "taught"
    dense, default, untaught, best, own = (last[name] for name in kinds)
    start = f"in sequences of {training['seq_len']:,} bytes, to {dense:.4f} nats per byte."
    assert f"A dense Llama ({model}) learned Python source code {start}" in page
    blocks = f"{nsa['num_selected_blocks']} blocks of {nsa['select_block_size']} tokens"
    usual = f"{default:.4f} if means of {NSAConfig.for_text(4, 1).index_stride} keys choose the blocks, as by default,"
    told = f"Reading only {blocks}, it has - {usual} and {untaught:.4f} if means of {stride} keys do,"
    assert told in page
    assert f"- {best:.4f} with the best blocks." in page
    taught, before = runs["taught"], runs["means of keys"]["recall"]
    took = f"{taught['steps']} steps ({taught['seconds']:.0f} s on an H200; {100 * taught['share_of_parameters']:.1f} %"
    assert f"- {own:.4f} if indexers do, which learned alone for {took} more parameters)," in page
    left = f"[{100 * (own - best) / (untaught - best):.0f} % of what selection loses is left]"
    assert left in words_of("docs/transformers.md")
    assert f"Blocks found rise from {before['mean']:.3f} to {taught['recall']['mean']:.3f}." in page
    names = {name: [f"{name}, all weights, seed {seed}" for seed in (2, 3)] for name in ("taught", "dense")}
    ends = {name: [f"{last[run]:.4f}" for run in of_seeds] for name, of_seeds in names.items()}
    assert len(runs) == len(kinds) + 2 * len(ends), "all that was recorded is told"
    told = f"taught models have {both(ends['taught'])}, dense ones {both(ends['dense'])}"
    assert f"After {training['steps']} more steps of all weights, two seeds, {told}" in page


def test_the_first_step_takes_what_was_recorded() -> None:
    points = points_by("training_text_h200", "attention", "seq_len")
    nsa, dense = ([x["first_step_s"] for key, x in points.items() if key[0] == kind] for kind in ("nsa", "dense"))
    first, others = f"{max(nsa):.0f} s", f"{min(nsa):.0f} to {sorted(nsa)[-2]:.0f} with `dynamic=False`"
    said = f"{first}, at another length {others}, dense {min(dense):.0f} to {max(dense):.0f} ("
    assert f"with default settings {said}" in words_of("docs/performance.md")


def test_what_the_readme_says_of_default_settings_is_what_was_recorded() -> None:
    points = points_by("training_text_h200", "attention", seq_len=8192)
    nsa, dense = points["nsa"], points["dense"]
    memory = [f"{point['peak_mib'] / 1024:.1f}" for point in (nsa, dense)]
    said = f"takes {nsa['step_ms']:.0f} ms and {memory[0]} GiB at 8k, dense {dense['step_ms']:.0f} and {memory[1]};"
    graphs = f"replayed as a CUDA graph {nsa['graph_step_ms']:.0f} ms, dense {dense['graph_step_ms']:.0f}."
    assert f"{said} {graphs}" in words_of("README.md")


def test_what_mods_cost_is_what_was_recorded() -> None:
    points = points_by("mods_h200", "name", "seq_len")
    ratios = {(name, n): total(x) / total(points["no mod", n]) for (name, n), x in points.items() if name != "no mod"}
    capped = [ratios.pop(("soft_cap", n)) for n in (8192, 32768)]
    said = f"take {capped[0]:.2f} (8k) and {capped[1]:.2f} times (32k tokens) as long as without a mod, with other mods"
    assert f"{said} {min(ratios.values()):.1f} to {max(ratios.values()):.1f} times" in words_of("docs/mods.md")


KERNELS = {
    "selected: `hopper_forward_parts`": ["hopper_forward_parts"],
    "`hopper_combine`: joins parts, the window, the gated sum; before without the sum": ["hopper_combine"],
    "`hopper_backward_parts`": ["hopper_backward_parts"],
    "`hopper_sum_slots`: sums parts, with the gradients of queries from the other branches": ["hopper_sum_slots"],
    "compressed: `hopper_forward`": ["hopper_forward"],
    "`hopper_backward_queries`, and `hopper_backward_keys` also of the window": [
        "hopper_backward_queries",
        "hopper_backward_keys",
    ],
    "gates: `gated_stats`; before with the sum": ["gated_stats"],
    "importance and top-n": ["hopper_importance", "top_blocks_kernel"],
}
"""Rows of the table of kernels, and the recorded ones that they sum."""


def test_the_table_of_kernels_is_what_was_recorded() -> None:
    point = points_by("training_h200", "attention", model="m7c-125m", seq_len=8192)["nsa"]
    took = {name: ms for name, ms, _ in point["longest_kernels"]}
    page = (ROOT / "benchmarks/results/speed.md").read_text()
    assert f"milliseconds in one step of {point['step_ms']:.0f}" in page
    shown = {cells[0]: cells[-1] for cells in (row.strip("| ").split(" | ") for row in page.splitlines())}
    assert {label: shown[label] for label in KERNELS} == {
        label: f"{sum(took[name] for name in names):.1f}" for label, names in KERNELS.items()
    }


def test_the_times_of_models_of_transformers_are_what_was_recorded() -> None:
    words = words_of("docs/transformers.md")
    served = read_record("transformers_serving_h200")["points"]
    rate = {(x["name"], x["way"]): f"{x['tokens_per_second']:.0f}" for x in served if "seconds" in x}
    paged, whole = (rate["drop-in", way] for way in ("continuous batching", "static batch"))
    assert f"of the drop-in gives {paged} tokens per second, `generate` {whole} (converted:" in words
    assert f"(converted: {rate['converted', 'static batch']}), dense `generate_batch` " in words
    assert f"dense `generate_batch` {rate['dense', 'continuous batching']} (" in words
    runs = points_by("up_training_h200", "name")
    names = ("three branches", "selected branch", "dense")
    three, slc, dense = (f"{runs[name]['held_out'][-1][1] / log(2):.3f}" for name in names)
    assert f"the three branches have {three}, the selected branch alone {slc}, dense attention {dense}" in words


def words_of(page: str) -> str:
    """Return a page without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def both(seeds: list[str]) -> str:
    """Join what two seeds have."""
    first, second = seeds
    return f"{first} and {second}"


BEST = "NSA, rope 1e8, shared keys, begun as mean"
BITS = {"dense": 1.0, "dense, rope 1e8": 0.9, "NSA": 1.1, BEST: 0.93}


def run(model: str, seed: int, bits: float, *, other_blocks: bool) -> dict[str, Any]:
    """A run whose every position has the same bits, and half a bit more with random blocks."""
    costs = {"own": 0.0, "random": 0.5, "forced": 1.0} if other_blocks else {}
    finals: dict[str, Any] = {
        f"bits with {name} blocks": {"mean": bits + cost, "positions": [bits + cost] * 14}
        for name, cost in costs.items()
    }
    finals["bits"] = {"mean": bits, "num_rows": 1, "positions": [bits] * 14}
    held_out, gates = [[0, 0.0, 8.0], [9, 5.0, bits]], [[0, [[0.5] * 3]], [9, [[0.1, 0.2, 0.3]]]]
    about = {"size": "m7c-125m", "model": model, "seed": seed, "steps": 9, "parameters": 10}
    return about | {"finals": finals, "held_out": held_out, "gates": gates}


def recorded(folder: Path, points: list[dict[str, Any]]) -> Results:
    sizes = {"num_selected_blocks": 16, "select_block_size": 64, "window_size": 512}
    sizes |= {"compress_block_size": 32, "compress_stride": 16}
    model = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 1, "nsa": sizes}
    training = {"batch_size": 1, "seq_len": 8192, "precision": "bf16", "eval_sequences": 4}
    environment = {"device": "a GPU", "threads": 1, "torch": "2", "commit": "0"}
    setting = {"device": "cuda", "sizes": {"m7c-125m": {"model": model, "training": training}}}
    content = {"environment": environment, "setting": setting, "text": {"bytes": {"train": 1e6}}, "points": points}
    (folder / "language_h200.json").write_text(json.dumps(content))
    return Results(folder)


def headline(figure: Figure) -> str:
    return next(text.get_text() for text in figure.texts if text.get_fontweight() == "bold")


def test_models_are_compared_with_the_dense_one_of_their_positions_and_seeds(tmp_path: Path) -> None:
    points = [run(model, 0, bits, other_blocks="NSA" in model) for model, bits in BITS.items()]
    points += [run("dense, rope 1e8", 1, 7.0, other_blocks=False)]  # of a seed that its twin has not
    results = recorded(tmp_path, points)
    assert headline(language.losses(results)).endswith("NSA - dense: NSA +0.100; NSA, rope 1e8, shared keys +0.030")
    figure = language.positions(results)
    assert headline(figure).startswith("NSA, rope 1e8, shared keys: random blocks")
    assert "+0.500" in headline(figure)
    drawn = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    lines = {line.get_color(): set(np.round(np.asarray(line.get_ydata()), 9)) for line in drawn}
    gaps = {name: lines[language.COLOURS[name]] for name in ("NSA", BEST)}
    assert gaps == {"NSA": {0.1}, BEST: {0.03}}
    assert [lines[colour] for _, colour in language.BLOCKS.values()] == [{0.5}, {1.0}]


def test_what_was_not_read_with_other_blocks_is_not_drawn_with_them(tmp_path: Path) -> None:
    points = [run(model, 0, bits, other_blocks=model == "NSA") for model, bits in BITS.items()]
    assert headline(language.positions(recorded(tmp_path, points))).startswith("NSA: random blocks")
    points = [run(model, 0, bits, other_blocks=False) for model, bits in BITS.items()]
    with pytest.raises(NotRecordedError, match="read with other blocks"):
        language.positions(recorded(tmp_path, points))
