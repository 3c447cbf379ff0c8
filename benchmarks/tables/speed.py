"""Time and memory of attention, training and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter

from benchmarks.harness.growth import crossover
from benchmarks.tables.points import Point, Rows, cells, lengths, passes, points_by, total

CPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LENGTHS = (8192, 16384, 32768, 65536)
FLEXNSA = "**flexnsa**"
ATTENTIONS = {
    FLEXNSA: "NSA with compression",
    "dense, cuDNN": "cuDNN SDPA",
    "dense, FlashAttention-2": "flash SDPA",
    "dense, FlexAttention": "dense Flex",
}
MODELS = {"**`m7c-125m`**": "m7c-125m", "**12 layers of 2,048, 16 / 4 heads of 128**": "16 heads of 128"}
STEPS = {
    f"{FLEXNSA}, the paper's settings": "NSA",
    "in pages of 64 tokens": "NSA, pages of 64",
    f"{FLEXNSA}, default settings": "NSA, default settings",
    "flash SDPA": "flash SDPA",
}
RANKS = {131072: "attention of 128k tokens, ", 524288: "512k tokens, ", 1048576: "1M tokens, "}
WAYS = {"pack": "one pack", "loop": "a loop over the documents", "pad": "padded to the longest"}
GROUPS = {"16": "G16", "8": "G8", "6 (60 heads)": "G6", "4": "G4", "1": "G1"}


def attention(write: Callable[[Point], str]) -> Rows:
    points = points_by("attention_h200", "name", "seq_len", kind="whole")
    rows = [["", *lengths(LENGTHS), "peak memory at 64k"]]
    for label, name in ATTENTIONS.items():
        by_length = [points[name, length] for length in LENGTHS]
        rows.append([label, *map(write, by_length), f"{by_length[-1]['peak_mib'] / 1024:.1f} GiB"])
    return rows


def crossovers() -> Rows:
    def begin(points: dict[tuple[str, int], Point], ours: str, dense: str, cost: Callable[[Point], float]) -> str:
        sizes = [length for name, length in points if name == ours and length <= LENGTHS[-1]]
        ratios = {length: cost(points[dense, length]) / cost(points[ours, length]) for length in sizes}
        return f"{(crossover(ratios) or math.nan) / 1024:.1f}k"

    gpu, cpu = (points_by(name, "name", "seq_len", kind="whole") for name in ("attention_h200", "cpu_throughput"))
    ours, cudnn, flash, _ = ATTENTIONS.values()
    models = (points_by("training_h200", "attention", "seq_len", model=model) for model in MODELS.values())
    small, large = (begin(points, "nsa", "dense", itemgetter("step_ms")) for points in models)
    return [
        ["", "faster than", "from"],
        ["attention, forward and backward, H200", "cuDNN", f"{begin(gpu, ours, cudnn, total)} tokens"],
        ["attention, forward alone, H200", "cuDNN", begin(gpu, ours, cudnn, itemgetter("forward_ms"))],
        [
            "a whole training step, H200",
            "dense attention in the same model",
            f"{small} (`m7c-125m`) or {large} (heads of 128)",
        ],
        ["attention, forward and backward, CPU", "flash SDPA", begin(cpu, "NSA", flash, total)],
    ]


def training() -> Rows:
    points = points_by("training_h200", "model", "attention", "seq_len")
    sizes = (4096, *LENGTHS)
    rows = [["tokens per sequence", *lengths(sizes)]]
    for label, model in MODELS.items():
        nsa, dense = ([points[model, kind, length] for length in sizes] for kind in ("nsa", "dense"))
        for name, of_name in ((f"{label}, NSA", nsa), ("dense baseline", dense)):
            rows.append([name, *(f"{x['tokens_per_s'] / 1e3:.0f}, {x['peak_mib'] / 1024:.1f}" for x in of_name)])
        for name, time in (("", "step_ms"), (", steps as CUDA graphs", "graph_step_ms")):
            ratios = (y[time] / x[time] for x, y in zip(nsa, dense, strict=True))
            rows.append([f"NSA / dense{name}", *cells(ratios, ".2f")])
    return rows


def on_cpu() -> Rows:
    points = points_by("cpu_throughput", "name", "seq_len", kind="whole")
    nsa, flash = ([total(points[name, length]) for length in CPU_LENGTHS] for name in ("NSA", "flash SDPA"))
    ratios = (f"{theirs / ours:.2f}x" for ours, theirs in zip(nsa, flash, strict=True))
    return [
        ["", *lengths(CPU_LENGTHS)],
        [f"{FLEXNSA}, ms", *cells(nsa, ",.0f")],
        ["dense, flash SDPA", *ratios],
    ]


def decoding() -> Rows:
    points, batches = points_by("decode_h200", "name", "batch", "part"), (1, 8, 32, 64)
    header = [f"batch {batch}" for batch in batches]
    rows = [["", f"{header[0]}, attention", "layer", *(cell for name in header[1:] for cell in (name, "layer"))]]
    for label, name in STEPS.items():
        steps = (points.get((name, batch, part)) for batch in batches for part in ("attention", "layer"))
        rows.append([label, *("" if step is None else f"{1e3 * step['graph_ms']['65536']:,.0f}" for step in steps)])
    return rows


def generation() -> Rows:
    points = points_by("generation_h200", "batch", "context", "attention")
    rows = [["batch, prompt", "tokens/s, NSA", "dense", "first token, ms, NSA", "dense"]]
    for batch, context in ((batch, context) for batch in (1, 32) for context in (1024, 32768)):
        pair = [points[batch, context, kind] for kind in ("nsa", "dense")]
        numbers = [point[quantity] for quantity in ("tokens_per_s", "first_token_ms") for point in pair]
        rows.append([f"{batch}, {context // 1024}k", *cells(numbers, ",.0f")])
    return rows


def context_parallel() -> Rows:
    points = points_by("ranks_h200", "seq_len", "ranks", kind="attention")
    rows = [["", "one GPU", "two", "four", "speedup", "communication of keys"]]
    for (seq_len, label), kind in ((size, kind) for size in RANKS.items() for kind in ("forward", "backward")):
        ms = {ranks: points[seq_len, ranks][f"{kind}_ms"] for ranks in (1, 2, 4) if (seq_len, ranks) in points}
        row = [f"{ms[ranks]:,.0f}" if ranks in ms else "" for ranks in (1, 2, 4)]
        shared = [ranks for ranks in ms if ranks > 1]
        speedup = ", ".join(f"{ms[1] / ms[ranks]:.2f}" for ranks in shared if 1 in ms)
        keys = (100 * points[seq_len, ranks][f"keys_{kind}_ms"] / ms[ranks] for ranks in shared)
        name = f"{label}{kind}" if kind == "forward" else kind
        rows.append([name, row[0] or "out of memory", *row[1:], speedup, f"{', '.join(cells(keys, '.1f'))} %"])
    return rows


def data_parallel() -> Rows:
    points, ways = points_by("ranks_h100", "attention", "parallel"), ("one GPU", "DDP", "FSDP2")
    nsa, dense = ([points[kind, way]["tokens_per_s"] / 1e3 for way in ways] for kind in ("nsa", "dense"))
    ratios = (x / y for x, y in zip(nsa, dense, strict=True))
    rows = [["", *ways], ["NSA", *cells(nsa, ".0f")], ["dense baseline", *cells(dense, ".0f")]]
    return [*rows, ["NSA / dense", *cells(ratios, ".2f")]]


def packing() -> Rows:
    points = points_by("packing_cpu", "name")
    rows = [["", "time", "peak memory"]]
    for name, label in WAYS.items():
        ratios = (points[name][quantity] / points["pack"][quantity] for quantity in ("ms", "peak_mib"))
        rows.append([label, *(f"{ratio:.1f}x" for ratio in ratios)])
    return rows


def packed_rows() -> Rows:
    points, sizes = points_by("packed_h200", "kind", "name", "seq_len"), (8192, 32768, 65536)
    rows = [["", *lengths(sizes)]]
    for kind, dim in (("64 / 4", 128), ("12 / 2", 64)):
        ratios = (total(points[kind, "packed", size]) / total(points[kind, "whole", size]) for size in sizes)
        rows.append([f"{kind} heads of {dim}", *(f"{ratio:.2f}x" for ratio in ratios)])
    return rows


def transformers() -> Rows:
    points = points_by("transformers_decoding_h200", "name", "context")
    rows = [["", "32k tokens", "64k tokens"]]
    for name in dict.fromkeys(name for name, _ in points):
        by_context = (points[name, context] for context in (32768, 65536))
        rows.append([name, *(f"{point['token_ms']:.1f} / {point['first_ms']:,.0f}" for point in by_context)])
    return rows


def groups() -> Rows:
    points, sizes = points_by("selected_h200", "name", kind="time"), ("8k", "32k", "64k")
    rows = [["query heads per key head", *sizes, "backward allocates at 64k"]]
    for label, name in GROUPS.items():
        by_length = [points[f"{name} {size}"] for size in sizes]
        times = [f"{point['forward']:.1f} / {point['backward']:.1f}" for point in by_length]
        rows.append([label, *times, f"{by_length[-1]['backward MiB'] / 1024:.1f} GiB"])
    flex = points_by("h200", "seq_len", name="slc branch")
    allocated = (flex[65536]["peak_mib"] - flex[65536]["saved_mib"]) / 1024
    times = [passes(flex[length]) for length in (8192, 32768, 65536)]
    return [*rows, ["16, FlexAttention ([h200.json](h200.json))", *times, f"{allocated:.1f} GiB"]]


def selector(name: str) -> Rows:
    points, sizes = points_by(f"{name.lower()}_h200", "name", "seq_len"), (8192, 32768, 131072)
    names = f"{name} with loss", name, "cuDNN SDPA"
    rows = ([name, *(passes(points[name, length]) for length in sizes)] for name in names)
    return [
        ["", *lengths(sizes)],
        *rows,
        ["selection alone", *cells((points["selection", length]["forward_ms"] for length in sizes), ".1f")],
    ]


TABLES = {
    "MSA": partial(selector, "MSA"),
    "QSA": partial(selector, "QSA"),
    "attention": partial(attention, passes),
    "attention, both passes": partial(attention, lambda point: f"{total(point):.1f}"),
    "crossovers": crossovers,
    "training": training,
    "attention on a CPU": on_cpu,
    "decoding": decoding,
    "generation": generation,
    "context parallelism": context_parallel,
    "data parallelism": data_parallel,
    "packing": packing,
    "packed rows": packed_rows,
    "decoding of transformers": transformers,
    "selected branch by group size": groups,
}
