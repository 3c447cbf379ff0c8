"""Time block selection (importance and top-n) on a CUDA device, over tile configurations and lengths.

    python -m benchmarks kernels.select_blocks --json select_blocks.json

Correctness comes first: importance and indices of the kernels against the formula in float64, at 8k tokens. Times are
medians over CUDA events; ``top-n`` is the time of scoring and selecting less the time of scoring alone, as the two run
chunk by chunk in turn, and ``torch.topk`` is the same for one call of it a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.memory import AllocatorProbe
from benchmarks.harness.recording import Recording
from benchmarks.harness.setting import Setting
from flexnsa import block_importance
from flexnsa.attention.interface import Call
from flexnsa.attention.selection import top_blocks as best_blocks
from flexnsa.attention.tiles.device import Tiles
from flexnsa.attention.triton import selection as scoring_triton
from flexnsa.attention.triton.kernels.importance import Band, Scores, importance
from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp
from flexnsa.attention.triton.kernels.top_blocks import write_top_blocks
from flexnsa.attention.triton.selection import chunks, select_blocks_triton
from flexnsa.config import num_blocks, num_compressed
from flexnsa.lm.measure.memory import MIB
from flexnsa.positions import Positions

SETTING = Setting()
CONFIG, Q_HEADS, KV_HEADS, HEAD_DIM = SETTING.config, SETTING.num_heads, SETTING.num_kv_heads, SETTING.head_dim
SCALE = HEAD_DIM**-0.5
TILES = [
    Tiles(128, 32, 8, 2),
    Tiles(128, 32, 8, 2, 128),
    Tiles(128, 32, 8, 3, 128),
    Tiles(64, 32, 4, 2),
    Tiles(64, 32, 4, 2, 168),
    Tiles(64, 32, 4, 3, 168),
    Tiles(64, 64, 4, 1),
    Tiles(64, 64, 4, 2),
    Tiles(64, 64, 4, 3),
    Tiles(128, 64, 8, 1, 128),
    Tiles(128, 64, 8, 2),
    Tiles(256, 32, 8, 2),
]


def inputs(seq_len: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (1, Q_HEADS, seq_len, HEAD_DIM), (1, KV_HEADS, num_compressed(seq_len, CONFIG), HEAD_DIM)
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes)
    return q, k


class Selection:
    """The loop of ``select_in_chunks`` with its parts and launch parameters open to choice."""

    def __init__(self, seq_len: int) -> None:
        self.q, self.k = inputs(seq_len)
        self.lse = log_sum_exp(self.q, self.k, None, config=CONFIG, scale=SCALE)
        self.plan = list(chunks(seq_len, KV_HEADS, None, CONFIG))
        cells = max(rows * width for _, rows, width in self.plan) * KV_HEADS
        self.own, self.passed = torch.empty(2, cells, device="cuda")
        self.out = torch.empty(1, KV_HEADS, seq_len, CONFIG.num_selected_blocks, dtype=torch.int32, device="cuda")

    def run(self, tiles: Tiles, select: Callable[[Scores, int], object] | None) -> None:
        """Score all chunks with ``tiles``, and hand each to ``select``."""
        for first_row, num_rows, width in self.plan:
            scores = Scores(self.own, self.passed, num_rows, width, Band.of(CONFIG))
            arguments = (self.q, self.k, self.lse, None, scores, first_row)
            importance(*arguments, config=CONFIG, scale=SCALE, tiles=tiles)
            if select is not None:
                select(scores, first_row)

    def top_blocks(self, num_warps: int | None = None) -> Callable[[Scores, int], object]:
        """Select by the kernel, with ``num_warps`` warps a query."""

        def select(scores: Scores, first_row: int) -> None:
            write_top_blocks(scores, None, self.out, first_row, config=CONFIG, num_warps=num_warps)

        return select

    def topk(self, scores: Scores, first_row: int) -> None:
        """Select by ``torch.topk``, which leaves out forced blocks and order."""
        del first_row
        cells = KV_HEADS * scores.num_rows * scores.width
        free = CONFIG.num_selected_blocks - CONFIG.num_init_blocks - CONFIG.num_local_blocks
        scores.own[:cells].view(KV_HEADS, scores.num_rows, scores.width).topk(min(free, scores.width))


def check(seq_len: int = 8192, step: int = 512) -> dict[str, float]:
    """Compare kernels and formula; raise if the selection is not the exact top-n of the importance."""
    case = Selection(seq_len)
    selected = select_blocks_triton(case.q, case.k, None, Call(CONFIG, SCALE))
    worst, same = 0.0, 0
    for first_row in range(0, seq_len, step):
        rows, end = slice(first_row, first_row + step), first_row + step
        own, passed = torch.zeros(2, KV_HEADS, step, num_blocks(seq_len, CONFIG), device="cuda")
        scores = Scores(own, passed, step, own.shape[-1], Band.of(CONFIG))
        importance(case.q, case.k, case.lse, None, scores, first_row, config=CONFIG, scale=SCALE)
        got = (own + torch.nn.functional.pad(passed, (1, -1)))[None, ..., : num_blocks(end, CONFIG)]
        q, k_cmp = case.q[:, :, rows].double(), case.k[:, :, : num_compressed(end, CONFIG)].double()
        wanted = block_importance(q, k_cmp, config=CONFIG, seq_len=end)
        worst = max(worst, ((got - wanted).abs() / wanted.clamp_min(1e-3)).max().item())
        positions = Positions.of_sequence(seq_len, "cuda").at(rows)
        if not torch.equal(selected[:, :, rows], best_blocks(got, positions, config=CONFIG)):
            raise AssertionError(f"queries from {first_row}: the selection is not the top-n of the importance")
        same += (selected[:, :, rows] == best_blocks(wanted, positions, config=CONFIG)).all(-1).sum().item()
    if worst > 1e-5:
        raise AssertionError(f"importance is off by {worst:.1e}, relative")
    return {"seq_len": seq_len, "relative_error": worst, "rows_as_in_float64": same / (KV_HEADS * seq_len)}


def race_tiles(selection: Selection, seq_len: int, recording: Recording) -> Tiles:
    """Time the scores with every tile configuration; give the fastest."""
    times = {}
    for tiles in TILES:
        try:
            first_ms = Clock("wall", "cuda").time(lambda tiles=tiles: selection.run(tiles, None))
        except triton.runtime.errors.OutOfResources as error:
            print(f"{tiles}: {error}")
            continue
        times[tiles] = milliseconds(lambda tiles=tiles: selection.run(tiles, None))
        recording.add({"seq_len": seq_len, "tiles": asdict(tiles), "scores_ms": times[tiles]})
        print(f"{seq_len:7d}  scores {times[tiles]:7.3f} ms  (first call {first_ms / 1e3:4.1f} s)  {tiles}", flush=True)
    return min(times, key=lambda tiles: times[tiles])


def race_warps(selection: Selection, seq_len: int, best: Tiles, recording: Recording) -> None:
    """Time scores and top-n by the warps that share a query."""
    for num_warps in (1, 2, 4):
        total_ms = milliseconds(lambda warps=num_warps: selection.run(best, selection.top_blocks(warps)))
        recording.add({"seq_len": seq_len, "top_warps": num_warps, "total_ms": total_ms})
        print(f"{seq_len:7d}  scores + top-n {total_ms:7.3f} ms  top-n by {num_warps} warps")


def race_scratch(seq_len: int, best: Tiles, recording: Recording) -> None:
    """Time scores and top-n by the memory that chunks may take."""
    default = scoring_triton.SCRATCH_BYTES
    for megabytes in (16, 32, 128, 256):
        scoring_triton.SCRATCH_BYTES = megabytes * 2**20
        budget = Selection(seq_len)
        total_ms = milliseconds(lambda budget=budget: budget.run(best, budget.top_blocks()))
        recording.add({"seq_len": seq_len, "scratch_mb": megabytes, "total_ms": total_ms})
        print(f"{seq_len:7d}  scores + top-n {total_ms:7.3f} ms  scratch {megabytes} MB, {len(budget.plan)} chunks")
    scoring_triton.SCRATCH_BYTES = default


def measure(seq_len: int, best: Tiles) -> dict[str, Any]:
    """Time the parts and the whole operator, and its memory, at one length."""
    case = Selection(seq_len)
    scores_ms = milliseconds(lambda: case.run(best, None))
    row = {
        "seq_len": seq_len,
        "tiles": asdict(best),
        "scores_ms": scores_ms,
        "top_n_ms": milliseconds(lambda: case.run(best, case.top_blocks())) - scores_ms,
        "torch_topk_ms": milliseconds(lambda: case.run(best, case.topk)) - scores_ms,
        "log_sum_exp_ms": milliseconds(lambda: log_sum_exp(case.q, case.k, None, config=CONFIG, scale=SCALE)),
    }
    with AllocatorProbe("cuda") as probe:
        row["operator_ms"] = milliseconds(lambda: select_blocks_triton(case.q, case.k, case.lse, Call(CONFIG, SCALE)))
        probe.mark("operator")
    return row | {"peak_mb": probe.peak["operator"] / MIB}


def milliseconds(call: Callable[[], object]) -> float:
    """Median over CUDA events, the cache as the call before left it."""
    return Clock("events", "cuda").median(call, 7, warm_up=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Check, then time all tiles at the longest length, and the best of them at every length."""
    parser = options.parser(__doc__, device=False, lengths=[8192, 16384, 32768, 65536])
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a machine with CUDA, got one without")
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=SETTING.to_dict(), check=check())
    print(recording.content["check"], flush=True)
    seq_len = max(arguments.lengths)
    longest = Selection(seq_len)
    best = race_tiles(longest, seq_len, recording)
    race_warps(longest, seq_len, best, recording)
    race_scratch(seq_len, best, recording)
    for seq_len in arguments.lengths:
        row = measure(seq_len, best)
        recording.add(row)
        shown = (f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, int | float))
        print("  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
