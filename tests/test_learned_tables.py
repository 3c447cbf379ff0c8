"""The tables of what is learned, of recall and of text, are what was recorded."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
LEARNING, IDEAS = ROOT / "docs" / "learning.md", ROOT / "benchmarks/results/selection_ideas.json"
RECALL, LANGUAGE = (ROOT / "benchmarks" / "results" / name for name in ("recall.md", "language.md"))

# The rows of recall on the page for readers, by the names of the table that holds every model.
SHOWN = {
    "dense attention": "dense attention",
    "NSA, the default settings": "shared keys, begun as mean, slow, indexer, residual",
    "NSA, l = 4, d = 2": "slow compressors, l=4 d=2",
    "NSA": "slow compressors",
    "NSA without the selected branch": "without the selected branch",
    "NSA, one learning rate": "plain",
}
# The rows of text on it, by the models of the recording.
TEXTS = {
    "dense": "dense",
    "NSA, the paper's settings": "NSA",
    "with an indexer": "NSA, rope 1e8, shared keys, begun as mean, indexer",
    "text-125m": "NSA, rope 1e8, shared keys, begun as mean, indexer, residual",
}
# The ideas on it, by their names in the list of all.
TRIED = {
    "all heads, the default": "all heads of a group",
    "changes of rank 32 (`index_rank=32`)": "all heads, changes of rank 32",
    "a compressor for each key head": "all heads, a compressor for each key head",
    "3 of 6 heads": "3 index heads a key head, means of neighbouring queries plus a change",
    "2 heads": "2 index heads a key head",
    "2 heads, a key for every 4 tokens": "2 index heads a key head, keys of 4",
    "1 head": "1 index head a key head",
}
LOSS_KERNELS = ("block_log_sums", "compare_blocks", "query_gradients", "key_gradients")
RECALLED = {
    "dense attention": "dense",
    "shared keys, begun as mean, slow, indexer, residual": "NSA, shared keys, begun as mean, slow, indexer, residual",
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
    record = recall_record("recall_h200")
    runs: dict[str, list[dict[str, Any]]] = {}
    for point in sorted(record["points"], key=itemgetter("seed")):
        runs.setdefault(point["variant"], []).append(point)
    steps = sum(stage["steps"] for stage in record["plan"]["stages"])
    assert all(point["step"] == steps and not point["obstacles"] for point in record["points"])
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", RECALL.read_text(), re.MULTILINE)
    maps, scores, changes, on_cpu = ([row.strip("| ") for row in table.splitlines()] for table in tables)
    assert maps == [recalled_by_length(label, runs[variant]) for label, variant in RECALLED.items()]
    cells = {label: recalled_by_length(label, runs[variant]).split(" | ") for label, variant in RECALLED.items()}
    shown = [[label, *(cells[name][column] for column in (2, 4, 6, 8))] for label, name in SHOWN.items()]
    assert rows_of(LEARNING, "Recall") == shown
    assert scores == [
        unscored_in_training(label, runs[RECALLED[label.split(", seed")[0]]]) for label in map(label_of, scores)
    ]
    changed: dict[str, list[dict[str, Any]]] = {}
    ablation = recall_record("recall_ablation_h200")["points"]
    for point in sorted(ablation, key=itemgetter("seed")):
        changed.setdefault(point["variant"], []).append(point)
    assert changes == [recalled_with(label, changed.pop(label)) for label in map(label_of, changes)]
    assert not changed, "all that was recorded is told"
    small: dict[str, list[dict[str, Any]]] = {}
    for point in recall_record("recall_cpu")["points"]:
        small.setdefault(point["variant"], []).append(point)
    assert sorted(on_cpu) == sorted(recalled_on_cpu(label, seeds) for label, seeds in small.items())


def recall_record(name: str) -> dict[str, Any]:
    """A recording whose points have the lengths of the sequences at each look."""
    record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    for point in record["points"]:
        point["lengths"] = [seq_len for _, seq_len in record["looks"]]
    return record


def recalled_by_length(label: str, seeds: list[dict[str, Any]]) -> str:
    """Means over depths, and over seeds; of pairs alone, how many of each seed's 32."""
    cells = [f"{100 * fmean(pairs_found(seeds, 1024 * k)):.1f}" for k in (1, 2, 4, 8, 16, 32, 64)]
    cells += [alone_found(seeds, 1024 * k) for k in (16, 32, 64)]
    return " | ".join([label, f"{len(seeds)}", *cells])


def recalled_with(label: str, seeds: list[dict[str, Any]]) -> str:
    """What was recalled of rows of 32 while learning, and of maps."""
    pairs = {seq_len: f"{100 * fmean(pairs_found(seeds, seq_len)):.1f}" for seq_len in (512, 1024, 2048, 4096)}
    lowest = f"{100 * min(pairs_found(seeds, 2048)):.1f}"
    alone = alone_found(seeds, 4096)
    short = f"{100 * fmean(last_looks(seed, 'recall')[32] for seed in seeds):.0f}"
    return " | ".join([label, f"{len(seeds)}", short, *[*pairs.values()][:3], lowest, pairs[4096], alone])


def recalled_on_cpu(label: str, seeds: list[dict[str, Any]]) -> str:
    found = {seq_len: [100 * share for share in pairs_found(seeds, seq_len)] for seq_len in (128, 256, 512, 1024)}
    cells = [f"{fmean(found[128]):.1f}", f"{fmean(found[256]):.1f}", f"{min(found[256]):.1f}"]
    return " | ".join([label, f"{len(seeds)}", *cells, f"{fmean(found[512]):.1f}", f"{fmean(found[1024]):.1f}"])


def pairs_found(seeds: list[dict[str, Any]], seq_len: int) -> list[float]:
    """The share of 16 depths in 32 sequences that each seed recalled."""
    return [sum(seed["maps"]["pairs"][str(seq_len)]) / (16 * 32) for seed in seeds]


def alone_found(seeds: list[dict[str, Any]], seq_len: int) -> str:
    return ", ".join(f"{sum(seed['maps']['needle'][str(seq_len)])}" for seed in seeds)


def unscored_in_training(label: str, seeds: list[dict[str, Any]]) -> str:
    """What one seed recalled, and the blocks that scored 0, at the last look of each length."""
    _, _, number = label.partition(", seed ")
    seed = next(seed for seed in seeds if seed["seed"] == int(number or 0))
    recall, unscored = last_looks(seed, "recall"), last_looks(seed, "unscored")
    return " | ".join(
        [label, *(f"{100 * recall[k]:.0f}, {100 * unscored[k]:.0f}" for k in (64, 128, 256, 512, 1024, 2048, 4096))]
    )


def last_looks(seed: dict[str, Any], kind: str) -> dict[int, float]:
    return dict(zip(seed["lengths"], seed[kind], strict=False))


def label_of(row: str) -> str:
    return row.partition(" | ")[0]


def rows_of(page: Path, section: str = "") -> list[list[str]]:
    """Return the cells of every row of the page's tables, or of a section's, that ends in a number."""
    text = re.split(r"^## ", page.read_text(), flags=re.MULTILINE) if section else [page.read_text()]
    text = next(part for part in text if part.startswith(section))
    rows = re.findall(r"^\| (\w.*\d[ a-z]*) \|$", text, re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_the_tables_of_language_are_what_was_recorded() -> None:
    points = json.loads((ROOT / "benchmarks/results/language_h200.json").read_text())["points"]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for point in sorted(points, key=itemgetter("seed")):
        runs.setdefault((point["size"], point["model"], point["steps"]), []).append(point)
    plain, indexed, recipe = "NSA, plain learning rate", TEXTS["with an indexer"], TEXTS["text-125m"]
    large = {
        (name, steps): runs["m7c-125m", name, steps]
        for steps, names in (
            (2000, ("dense", "NSA", indexed, recipe)),
            (1000, ("dense", "NSA", plain)),
            (1107, ("dense", "NSA")),
        )
        for name in names
    }
    small = {(name, 800): runs["small", name, 800] for name in ("dense", "NSA", plain)}
    longest = {name: seeds for (name, steps), seeds in large.items() if steps == 2000}
    assert sum(map(len, (large | small).values())) == len(points), "all that was recorded is told"
    assert rows_of(LEARNING, "Text") == [text_row(label, longest[name]) for label, name in TEXTS.items()]
    expected = [[name, *ends(seeds)] for group in (large, small) for (name, _), seeds in group.items()]
    gaps = [
        (f"{sparse} - {dense}", steps, gap_of(of[sparse, steps], of[dense, steps]))
        for of, steps, sparse, dense in (
            (large, 2000, "NSA", "dense"),
            (large, 1000, "NSA", "dense"),
            (small, 800, "NSA", "dense"),
        )
    ]
    expected += [[label, f"{steps:,}", gap] for label, steps, gap in gaps]
    told = set(re.findall(r"[+-]\d\S* ± \d\.\d+", LEARNING.read_text()))
    assert told == {gaps[0][2]}
    by_octave = {name: octaves(seeds) for name, seeds in longest.items()}
    expected += [[name, *(f"{x:.3f}" for x in row)] for name, row in by_octave.items()]
    pairs = zip(by_octave["dense"], by_octave["NSA"], strict=True)
    expected.append(["NSA - dense", *(f"{b - a:+.3f}" for a, b in pairs)])
    for (name, steps), seeds in (large | small).items():
        if name.startswith("NSA") and name != indexed:  # their time was up before
            costs = (cost_of(seeds, blocks) for blocks in ("initial", "random", "forced"))
            expected.append([f"{name}, small" if (name, steps) in small else name, f"{steps:,}", *costs])
    ideas = json.loads(IDEAS.read_text())["rows"]
    assert rows_of(LANGUAGE) == expected + [idea_row(label, ideas) for label in TRIED]


def test_the_seconds_of_a_step_are_what_was_recorded() -> None:
    points = json.loads((IDEAS.parent / "stages_h100.json").read_text())["points"]
    steps = {point["model"]: point["steps"][0] for point in points if (point["lr"], point["seed"]) == (8e-4, 0)}
    first, plain, dense = (0.15 * 330 / steps[name] for name in ("nsa, dense first", "nsa", "dense"))
    assert f"A step then takes {first:.3f} s in place of {plain:.3f}, a dense one {dense:.3f}." in words_of(LEARNING)


def gap_of(sparse: list[dict[str, Any]], dense: list[dict[str, Any]]) -> str:
    """Return the mean difference in bits of runs with the same seeds, and its standard error."""
    baseline = {run["seed"]: run["finals"]["bits"]["mean"] for run in dense}
    gaps = [run["finals"]["bits"]["mean"] - baseline[run["seed"]] for run in sparse]
    return f"{fmean(gaps):+.3f} ± {stdev(gaps) / len(gaps) ** 0.5:.3f}"


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
    """Mean bits over seeds, of the first 64 bytes and of every doubling from there, recorded by halves from 128 on."""
    parts = [slice(0, 1), slice(1, 2), *(slice(half, half + 2) for half in range(2, 14, 2))]
    return [fmean(fmean(run["finals"]["bits"]["positions"][part]) for run in seeds) for part in parts]


def cost_of(seeds: list[dict[str, Any]], blocks: str) -> str:
    name = f"bits with {blocks} blocks"
    whole = [run for run in seeds if name in run["finals"]]  # the time of others was up before
    return f"{fmean(means(whole, name)) - fmean(means(whole, 'bits with own blocks')):+.4f}"


def text_row(label: str, seeds: list[dict[str, Any]]) -> list[str]:
    """Bits by seed, the share of the best blocks' attention that layers find at the end, and seconds."""
    bits = {run["seed"]: f"{run['finals']['bits']['mean']:.4f}" for run in seeds}
    found = [fmean(map(fmean, run["selection"][-1][1])) for run in seeds if run.get("selection")]
    seconds = f"{fmean(run['seconds'] for run in seeds):.0f}"
    return [label, *(bits.get(seed, "-") for seed in range(3)), f"{fmean(found):.3f}" if found else "-", seconds]


def idea_row(label: str, ideas: list[dict[str, Any]]) -> list[str]:
    """What a run of seed 0 found after 500 steps, in the mean of the layers and in the worst."""
    row = next(row for row in ideas if row["idea"] == TRIED[label] and row["seed"] == 0)
    look = next(look for look in row["recall"] if look["step"] == 500)
    return [label, f"{look['mean']:.3f}", f"{look['worst']:.3f}"]


def test_what_the_page_says_of_text_125m_is_what_was_recorded() -> None:
    page = words_of(LEARNING)
    points = json.loads((IDEAS.parent / "training_indexer_h200.json").read_text())["points"]
    own, without, dense, own_far, without_far, dense_far = (point["step_ms"] for point in points)
    assert f"**A step of text-125m takes {own:.0f} ms at 8k and {own_far:.0f} at 32k**" in page
    assert f", dense {dense:.0f} and {dense_far:.0f} (" in page
    assert f"Without indexer: {without:.0f} and {without_far:.0f}." in page
    assert not any("commit" in point for point in points)
    loss = sum(ms for name, ms, _ in points[0]["longest_kernels"] if name in LOSS_KERNELS)
    assert f"Of {own:.0f} ms the selection loss takes {loss:.0f}." in page
    recorded = json.loads((IDEAS.parent / "language_h200.json").read_text())["points"]
    wanted = ("m7c-125m", TEXTS["text-125m"], 2000)
    recipe = [point for point in recorded if (point["size"], point["model"], point["steps"]) == wanted]
    worst = min(fmean(layer) for run in recipe for layer in run["selection"][-1][1])
    assert f"the worst layers of text-125m find {worst:.3f}" in page
    read = [run for run in recipe if "bits with best blocks" in run["finals"]]
    lost = fmean(means(read, "bits with own blocks")) - fmean(means(read, "bits with best blocks"))
    assert f"With the best blocks it would have {lost:.3f} bits less" in page


def test_what_the_page_says_of_teaching_is_what_was_recorded() -> None:
    page, record = words_of(LEARNING), json.loads((IDEAS.parent / "teaching_h200.json").read_text())
    sizes, nsa, training = (record["setting"][name] for name in ("sizes", "nsa", "training"))
    base = f"{sizes['rope_parameters']['rope_theta']:.0e}".replace("e+0", "e")
    model = f"{sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, `rope_theta={base}`"
    runs = {run["name"]: run for run in record["points"]}
    last = {name: run["held_out"][-1][1] for name, run in runs.items()}
    dense, untaught, best, own = (last[name] for name in ("pretraining", "means of keys", "best blocks", "taught"))
    start = f"in sequences of {training['seq_len']:,} bytes has {dense:.4f} nats per byte."
    assert f"A dense Llama ({model}) that learned Python source code {start}" in page
    blocks = f"{nsa['num_selected_blocks']} blocks of {nsa['select_block_size']}"
    assert (
        f"Reading {blocks}, it has {untaught:.4f} if means of keys choose them, {best:.4f} with the best ones" in page
    )
    taught, before = runs["taught"], runs["means of keys"]["recall"]
    took = f"{taught['steps']} steps ({taught['seconds']:.0f} s on an H200; {100 * taught['share_of_parameters']:.1f} %"
    assert f"and {own:.4f} with indexers, which learned alone for {took} more parameters)" in page
    assert f"Blocks found rise from {before['mean']:.3f} to {taught['recall']['mean']:.3f}." in page
    names = {name: [f"{name}, all weights, seed {seed}" for seed in (2, 3)] for name in ("taught", "dense")}
    ends = {name: [f"{last[run]:.4f}" for run in of_seeds] for name, of_seeds in names.items()}
    assert len(runs) == 4 + 2 * len(ends), "all that was recorded is told"
    told = f"taught models have {both(ends['taught'])}, dense ones {both(ends['dense'])}"
    assert f"After {training['steps']} steps of all weights, two seeds, {told}" in page


def words_of(page: Path) -> str:
    """Return a page without its line breaks."""
    return " ".join(page.read_text().split())


def both(seeds: list[str]) -> str:
    """Join what two seeds have."""
    first, second = seeds
    return f"{first} and {second}"
