"""The tables of what is learned, of recall and of text, are what was recorded."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
RECALLED = {
    "dense attention": "dense",
    "slow compressors, l=4 d=2": "NSA, slow, l=4 d=2",
    "slow compressors": "NSA, slow",
    "normalised": "NSA, normalised",
    "shared keys, normalised": "NSA, shared keys, normalised",
    "shared keys, mean": "NSA, shared keys, mean compressor",
    "shared keys, begun as mean, slow": "NSA, shared keys, begun as mean, slow",
    "begun as mean, slow": "NSA, begun as mean, slow",
    "without the compressed branch": "NSA without compressed",
    "mean": "NSA, mean compressor",
    "without the selected branch": "NSA without selected",
    "shared keys, begun as mean": "NSA, shared keys, begun as mean",
    "shared keys": "NSA, shared keys",
    "begun as mean": "NSA, begun as mean",
    "plain": "NSA",
    "window only": "window only",
}


def test_the_tables_of_recall_are_what_was_recorded() -> None:
    record = json.loads((ROOT / "benchmarks/results/recall_h200.json").read_text())
    runs: dict[str, list[dict[str, Any]]] = {}
    for point in sorted(record["points"], key=itemgetter("seed")):
        runs.setdefault(point["variant"], []).append(point)
    steps = sum(stage["steps"] for stage in record["plan"]["stages"])
    assert all(point["step"] == steps and not point["obstacles"] for point in record["points"])
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", (ROOT / "docs" / "learning.md").read_text(), re.MULTILINE)
    maps, scores, looks, changes, on_cpu = ([row.strip("| ") for row in table.splitlines()] for table in tables)
    assert maps == [recalled_by_length(label, runs[variant]) for label, variant in RECALLED.items()]
    assert looks == [recalled_in_training(label, runs[RECALLED[label]]) for label in map(label_of, looks)]
    assert scores == [
        unscored_in_training(label, runs[RECALLED[label.split(", seed")[0]]]) for label in map(label_of, scores)
    ]
    changed: dict[str, list[dict[str, Any]]] = {}
    ablation = json.loads((ROOT / "benchmarks/results/recall_ablation_h200.json").read_text())["points"]
    for point in sorted(ablation, key=itemgetter("seed")):
        changed.setdefault(point["variant"], []).append(point)
    assert changes == [recalled_with(label, changed.pop(label)) for label in map(label_of, changes)]
    assert not changed, "all that was recorded is told"
    small: dict[str, list[dict[str, Any]]] = {}
    for point in json.loads((ROOT / "benchmarks/results/recall_cpu.json").read_text())["points"]:
        small.setdefault(point["variant"], []).append(point)
    assert sorted(on_cpu) == sorted(recalled_on_cpu(label, seeds) for label, seeds in small.items())


def recalled_by_length(label: str, seeds: list[dict[str, Any]]) -> str:
    """Means over depths, and over seeds; of pairs alone, how many of each seed's 32."""
    found: dict[tuple[str, int], list[float]] = {}
    for entry in (entry for seed in seeds for entry in seed["maps"]):
        found.setdefault((entry["kind"], entry["seq_len"] // 1024), []).append(fmean(entry["recall"]))
    cells = [f"{100 * fmean(found['pairs', k]):.1f}" for k in (1, 2, 4, 8, 16, 32, 64)]
    cells += [", ".join(f"{32 * share:.0f}" for share in found["needle", k]) for k in (16, 32, 64)]
    return " | ".join([label, f"{len(seeds)}", *cells])


def recalled_with(label: str, seeds: list[dict[str, Any]]) -> str:
    """What was recalled of rows of 32 while learning, and of maps."""
    found: dict[tuple[str, int], list[float]] = {}
    for entry in (entry for seed in seeds for entry in seed["maps"]):
        found.setdefault((entry["kind"], entry["seq_len"]), []).append(fmean(entry["recall"]))
    pairs = {seq_len: f"{100 * fmean(found['pairs', seq_len]):.1f}" for seq_len in (512, 1024, 2048, 4096)}
    lowest = f"{100 * min(found['pairs', 2048]):.1f}"
    alone = ", ".join(f"{32 * share:.0f}" for share in found["needle", 4096])
    short = f"{100 * fmean(last_looks(seed, 'recall')[32] for seed in seeds):.0f}"
    return " | ".join([label, f"{len(seeds)}", short, *[*pairs.values()][:3], lowest, pairs[4096], alone])


def recalled_on_cpu(label: str, seeds: list[dict[str, Any]]) -> str:
    found: dict[int, list[float]] = {}
    for entry in (entry for seed in seeds for entry in seed["maps"] if entry["kind"] == "pairs"):
        found.setdefault(entry["seq_len"], []).append(100 * fmean(entry["recall"]))
    cells = [f"{fmean(found[128]):.1f}", f"{fmean(found[256]):.1f}", f"{min(found[256]):.1f}"]
    return " | ".join([label, f"{len(seeds)}", *cells, f"{fmean(found[512]):.1f}", f"{fmean(found[1024]):.1f}"])


def recalled_in_training(label: str, seeds: list[dict[str, Any]]) -> str:
    """Means over seeds of the last look at each length."""
    last = [last_looks(seed, "recall") for seed in seeds]
    return " | ".join([label, *(f"{100 * fmean(look[2**power] for look in last):.1f}" for power in range(5, 15))])


def unscored_in_training(label: str, seeds: list[dict[str, Any]]) -> str:
    """What one seed recalled, and the blocks that scored 0, at the last look of each length."""
    _, _, number = label.partition(", seed ")
    seed = next(seed for seed in seeds if seed["seed"] == int(number or 0))
    recall, unscored = last_looks(seed, "recall"), last_looks(seed, "unscored")
    return " | ".join(
        [label, *(f"{100 * recall[k]:.0f}, {100 * unscored[k]:.0f}" for k in (64, 128, 256, 512, 1024, 2048, 4096))]
    )


def last_looks(seed: dict[str, Any], kind: str) -> dict[int, float]:
    return {seq_len: share for _, seq_len, share in seed[kind]}


def label_of(row: str) -> str:
    return row.partition(" | ")[0]


def test_the_tables_of_language_are_what_was_recorded() -> None:
    points = json.loads((ROOT / "benchmarks/results/language_h200.json").read_text())["points"]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for point in sorted(points, key=itemgetter("seed")):
        runs.setdefault((point["size"], point["model"], point["steps"]), []).append(point)
    few, plain, far = "NSA, few blocks first", "NSA, plain learning rate", "NSA, rope 1e8"
    short, small_blocks, shared = "NSA, l=8 d=4", "NSA, l'=16 n=64", "NSA, shared keys, begun as mean"
    far_dense, best = "dense, rope 1e8", "NSA, rope 1e8, shared keys, begun as mean"
    large = {
        (name, steps): runs["m7c-125m", name, steps]
        for steps, names in (
            (2000, ("dense", far_dense, "NSA", few, short, small_blocks, shared, far, best)),
            (1000, ("dense", "NSA", few, plain)),
            (1107, ("dense", "NSA")),
        )
        for name in names
    }
    small = {(name, 800): runs["small", name, 800] for name in ("dense", "NSA", plain)}
    longest = {name: seeds for (name, steps), seeds in large.items() if steps == 2000}
    assert sum(map(len, (large | small).values())) == len(points), "all that was recorded is told"
    expected = [
        [name, *map(mean_of, by_base)]
        for name, *by_base in (
            ("dense", longest["dense"], longest[far_dense]),
            ("NSA", longest["NSA"], longest[far]),
            ("NSA, shared keys, begun as mean", longest[shared], longest[best]),
        )
    ]
    expected += [[name, *ends(seeds)] for group in (large, small) for (name, _), seeds in group.items()]
    for name in ("dense", far_dense, "NSA", few, far, best):
        looks = [{step: bits for step, _, bits in run["held_out"]} for run in longest[name]]
        expected.append([name, *(f"{fmean(x[step] for x in looks):.3f}" for step in (200, 400, 600, 1000, 1500, 2000))])
    by_octave = {name: octaves(seeds) for name, seeds in longest.items()}
    expected += [[name, *(f"{x:.3f}" for x in row)] for name, row in by_octave.items()]
    for name, dense in (("NSA", "dense"), (best, far_dense)):
        gaps = zip(by_octave[dense], by_octave[name], strict=True)
        expected.append([f"{name} - {dense}", *(f"{b - a:+.3f}" for a, b in gaps)])
    for (name, steps), seeds in (large | small).items():
        if name.startswith("NSA") and name != small_blocks:  # the time was up before that one read other blocks
            costs = (cost_of(seeds, blocks) for blocks in ("initial", "random", "forced"))
            expected.append([f"{name}, small" if (name, steps) in small else name, f"{steps:,}", *costs])
    habits = longest[best][0]["finals"]["habits"]
    for branch, name in enumerate(("compressed", "selected", "window")):
        gates = [fmean(gate[branch] for gate in layer["gates"]) for layer in habits]
        expected.append([f"gate, {name}", *(f"{gate:.2f}" for gate in gates)])
    expected.append(["entropy, bits", *(f"{fmean(layer['entropy']):.1f}" for layer in habits)])
    expected.append(["captured by own blocks", *(f"{layer['chosen']['captured']:.2f}" for layer in habits)])
    expected.append(["shared with the query before", *(f"{layer['chosen']['shared']['1']:.2f}" for layer in habits)])
    page = (ROOT / "docs" / "language.md").read_text()
    rows = re.findall(r"^\| (\w.*\d[ a-z]*) \|$", page, re.MULTILINE)
    assert [row.split(" | ") for row in rows] == expected
    for sparse, dense in (
        (longest["NSA"], longest["dense"]),
        (large["NSA", 1000], large["dense", 1000]),
        (large[few, 1000], large["dense", 1000]),
        (longest[few], longest["dense"]),
        (longest[best], longest[far_dense]),
        (longest[best], longest["dense"]),
        (longest[far_dense], longest["dense"]),
        (longest[best], longest["NSA"]),
        (small["NSA", 800], small["dense", 800]),
    ):
        twins = {run["seed"]: run["finals"]["bits"]["mean"] for run in dense}
        gaps = [run["finals"]["bits"]["mean"] - twins[run["seed"]] for run in sparse]
        assert f"{fmean(gaps):+.3f} ± {stdev(gaps) / len(gaps) ** 0.5:.3f}" in page


def ends(seeds: list[dict[str, Any]]) -> list[str]:
    """Parameters, steps, mean seconds, and of each seed the bits per held-out byte."""
    parameters, steps = seeds[0]["parameters"], seeds[0]["step"]
    seconds = fmean(run["seconds"] for run in seeds)
    by_seed = {run["seed"]: f"{run['finals']['bits']['mean']:.4f}" for run in seeds}
    bits = ", ".join(by_seed.get(seed, "-") for seed in range(max(by_seed) + 1))
    return [f"{parameters / 1e6:.1f}M", f"{steps:,}", f"{seconds:.0f}", bits]


def means(seeds: list[dict[str, Any]], name: str = "bits") -> list[float]:
    return [run["finals"][name]["mean"] for run in seeds]


def octaves(seeds: list[dict[str, Any]]) -> list[float]:
    """Mean bits over seeds, of the first 64 bytes and of every doubling from there."""
    parts = [slice(0, 1), *(slice(2**power, 2 ** (power + 1)) for power in range(7))]
    return [fmean(fmean(run["finals"]["bits"]["positions"][part]) for run in seeds) for part in parts]


def cost_of(seeds: list[dict[str, Any]], blocks: str) -> str:
    return f"{fmean(means(seeds, f'bits with {blocks} blocks')) - fmean(means(seeds, 'bits with own blocks')):+.4f}"


def mean_of(seeds: list[dict[str, Any]]) -> str:
    """The mean of bits, or those of the one seed there is."""
    mean = f"{fmean(run['finals']['bits']['mean'] for run in seeds):.3f}"
    return mean if len(seeds) > 1 else f"{mean} of one seed"
