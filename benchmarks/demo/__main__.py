"""Train NSA and two dense models on real text, check exactness, measure memory and time, and draw one picture.

python -m benchmarks demo            # some minutes on two cores
python -m benchmarks demo --quick    # half a minute, without learning much
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from benchmarks.demo.picture import draw
from benchmarks.demo.twins import TwinResult, train_twins
from benchmarks.harness.growth import fit_power_law
from benchmarks.harness.parity import measure_parity, parity_table
from benchmarks.harness.scaling import ATTENTIONS, Point, measure
from flexnsa.layers.presets import text
from flexnsa.lm.cli.options import output_folder
from flexnsa.lm.measure.table import format_table
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.training.config import TrainConfig

# The last query sees 4 * 32 + 64 tokens and 63 compressed ones of 512, so attention is sparse
MODEL = DecoderConfig(
    dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    **text(
        4, 1, compress_block_size=16, compress_stride=8, select_block_size=32, num_selected_blocks=4, window_size=64
    ),
)
DENSE = replace(MODEL, attention="dense")
MODELS = {"dense": DENSE, "dense, wide": replace(DENSE, dim=192, head_dim=38), "NSA": MODEL}
"""Of the same sizes, which lack the compressors, the indexer and two branches; and of as many parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How long to train, and the lengths to measure."""

    training: TrainConfig
    sample_bytes: int
    seq_lens: dict[str, tuple[int, ...]]


_TRAINING = TrainConfig(
    steps=1400, batch_size=1, seq_len=512, lr=2e-3, min_lr=0.05, warmup_steps=30, eval_every=280, eval_sequences=64
)
FULL = Size(
    training=_TRAINING,
    sample_bytes=160,
    seq_lens={
        "math SDPA": (1024, 2048, 4096),
        "flash SDPA": (1024, 2048, 4096, 8192, 16384),
        "NSA": (1024, 2048, 4096, 8192, 16384),
    },
)
QUICK = Size(
    training=replace(_TRAINING, steps=120, eval_every=40, eval_sequences=16),
    sample_bytes=60,
    seq_lens={"math SDPA": (1024, 2048), "flash SDPA": (1024, 2048, 4096), "NSA": (1024, 2048, 4096)},
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="train and measure less, for a first look and for CI")
    parser.add_argument("--out", type=output_folder, default="demo", help="folder of the picture; default: %(default)s")
    arguments = parser.parse_args(argv)
    size = QUICK if arguments.quick else FULL
    start = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)

    _headline(
        "Exactness: largest relative error against the fp64 oracle, and that of plain PyTorch at the same precision"
    )
    parity = measure_parity(("sdpa",), (torch.float32, torch.bfloat16))
    print(parity_table(parity))

    _headline("Memory and time of one forward and backward pass, fp32, 12 query and 2 key heads of 64, on one core")
    points = _measure_all(size.seq_lens)
    print(scaling_table(points))

    _headline("Learning: the same bytes of Python's standard library, the same seed")
    twins = train_twins(MODELS, size.training, size.sample_bytes)
    print(learning_table(twins))
    for twin in twins:
        print(f"\n{twin.name} writes:\n" + textwrap.indent(twin.sample, "  | ", lambda _line: True))

    picture = arguments.out / "demo.png"
    draw(picture, twins, parity, points)
    print(f"\nPicture: {picture}. The demo took {time.perf_counter() - start:.0f} s.")


def learning_table(twins: list[TwinResult]) -> str:
    """Return a table with a line per model, and the differences of NSA from the dense ones."""
    by_name = {twin.name: twin for twin in twins}
    rows = [
        [
            twin.name,
            f"{twin.parameters:,}",
            f"{twin.bits_per_byte:.3f}",
            f"{twin.training_curve[-1][0] / twin.seconds:,.0f}",
        ]
        for twin in twins
    ]
    nsa = by_name.pop("NSA")
    ratios = [
        f"{abs(ratio):.1%} {'above' if ratio > 0 else 'below'} the dense model of {twin.parameters:,} parameters"
        for twin in by_name.values()
        for ratio in [nsa.bits_per_byte / twin.bits_per_byte - 1]
    ]
    header = ["attention", "parameters", "validation bits per byte", "bytes per second"]
    verdict = f"NSA, of {nsa.parameters:,} parameters, is {' and '.join(ratios)}; one seed, one learning rate."
    return f"{format_table(header, rows)}\n{verdict}\n{selection_line(nsa.selection_curve)}"


def selection_line(curve: list[float]) -> str:
    """Say how the loss of the choice of blocks fell, in means of a tenth of the steps."""
    part = max(1, len(curve) // 10)
    means = [sum(values) / len(values) for at in range(0, len(curve), part) if (values := curve[at : at + part])]
    worst = max(range(len(means)), key=means.__getitem__)
    return (
        f"Its choice of blocks learns apart, from a selection loss: {means[worst]:.4f} nats where it is largest, about "
        f"step {part * worst + 1}, and {means[-1]:.4f} in the end."
    )


def scaling_table(points: list[Point]) -> str:
    """Return a table per quantity: a line per attention, a column per length, and the fitted exponent."""
    lengths = sorted({point.seq_len for point in points})
    tables = []
    for quantity, title, digits in (
        ("peak_mib", "peak MiB", 0),
        ("saved_mib", "saved MiB", 0),
        ("seconds", "seconds", 2),
    ):
        rows = []
        for attention in ATTENTIONS:
            by_length = {point.seq_len: getattr(point, quantity) for point in points if point.attention == attention}
            cells = [f"{by_length[length]:,.{digits}f}" if length in by_length else "-" for length in lengths]
            rows.append([attention, *cells, f"{fit_power_law(by_length.items()).exponent:.2f}"])
        tables.append(format_table([title, *(f"S={length:,}" for length in lengths), "slope"], rows))
    return "\n\n".join(tables)


def _measure_all(seq_lens: dict[str, tuple[int, ...]]) -> list[Point]:
    from tqdm import tqdm

    cases = [(attention, length) for attention, lengths in seq_lens.items() for length in lengths]
    cases.sort(key=lambda point: point[1], reverse=True)  # the longest first, so that both cores are busy to the end
    with ThreadPoolExecutor(max_workers=min(2, torch.get_num_threads())) as pool:
        points = [pool.submit(measure, *point) for point in cases]
        for _ in tqdm(as_completed(points), total=len(points), unit="point", leave=False):
            pass
    return sorted((point.result() for point in points), key=lambda point: point.seq_len)


def _headline(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
