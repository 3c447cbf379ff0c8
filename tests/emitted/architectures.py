"""Do all kernels fit every GPU? ``python -m tests.emitted.architectures``, without one.

Every kernel is emitted and compiled for each architecture, and what it takes is compared with what that has. With
``--json`` the table is written to a file as well. The exit status is 1 where a kernel does not fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flexnsa.lm.measure.table import format_table
from tests.emitted.machine_code import Resources, without_machine_code
from tests.emitted.targets import TARGETS, Target

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_COLUMNS = 512
"""Of Blackwell's tensor memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one kernel on one architecture."""

    target: str
    dtype: str
    dims: str
    call: str
    kernel: str
    resources: Resources | None
    limit: int
    verdict: str

    @property
    def is_good(self) -> bool:
        """Whether it fits, or was refused by name before anything was compiled."""
        return self.verdict in ("fits", "spills") or self.verdict.startswith("refused")


def survey(
    targets: Sequence[str],
    dtypes: Sequence[str],
    dims: Sequence[tuple[int, int]],
    processes: int = 1,
    packed: Sequence[bool] = (False, True),
    machine_code: bool = True,
) -> Iterator[Row]:
    """Compile every kernel, each architecture and dtype in a process of its own; to the end, or for its memory."""
    context = multiprocessing.get_context("forkserver")  # which has imported what all need, and no GPU
    context.set_forkserver_preload(["tests.emitted.all_kernels"])
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        tasks = [(target, dtype, dims, packed, machine_code) for target in targets for dtype in dtypes]
        for (target, dtype, *_), rows in zip(tasks, pool.map(_compile_all, *zip(*tasks, strict=True)), strict=True):
            print(f"{target} {dtype}: {sum(row.is_good for row in rows)} of {len(rows)} are good", file=sys.stderr)
            yield from rows


def _compile_all(
    name: str, dtype: str, dims: Sequence[tuple[int, int]], packed: Sequence[bool], machine_code: bool
) -> list[Row]:
    from tests.emitted.all_kernels import Shape, calls
    from tests.emitted.pretended_gpu import pretend

    target, rows = TARGETS[name], list[Row]()
    gc.set_threshold(700, 10, 100)  # among all that a compiler keeps there is little to collect
    pretend(target)
    for dk, dv in dims:
        size = str(dk) if dk == dv else f"{dk}/{dv}"
        for call, compile_kernels in calls(Shape((dk, dv), DTYPES[dtype]), packed):
            try:
                with nullcontext() if machine_code else without_machine_code():
                    kernels = compile_kernels()
            except Exception as error:  # whatever a compiler says is the finding
                verdict = "refused" if type(error) is ValueError else f"fails, {type(error).__name__}"
                line = " ".join(str(error).split())
                rows.append(Row(name, dtype, size, call, "", None, target.shared_memory, f"{verdict}: {line}"))
                continue
            for kernel, needed in kernels:
                verdict = _judge(needed, target)
                rows.append(Row(name, dtype, size, call, kernel, needed, target.shared_memory, verdict))
    return rows


def _judge(needed: Resources, target: Target) -> str:
    if needed.shared > target.shared_memory:
        return "too much shared memory"
    if needed.columns > MAX_COLUMNS:
        return "too much tensor memory"
    return "spills" if needed.spilled else "fits"


def format_rows(rows: Sequence[Row]) -> str:
    """Make a table of them."""
    header = ("kernel", "target", "dtype", "D", "warps", "stages", "shared", "of", "registers", "spilled", "verdict")
    cells = []
    for row in rows:
        need = row.resources
        name = f"{row.call}, {row.kernel}" if row.kernel else row.call
        numbers = ("", "", "", "", "")
        if need is not None:
            numbers = (need.num_warps, need.num_stages, need.shared, need.registers, need.spilled)
        warps, stages, shared, registers, spilled = ("-" if number is None else str(number) for number in numbers)
        place = (name, row.target, row.dtype, row.dims)
        cells.append((*place, warps, stages, shared, str(row.limit), registers, spilled, row.verdict))
    return format_table(header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.emitted.architectures", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--dims", nargs="+", type=_pair, default=[(64, 64), (128, 128)], metavar="D or DK/DV")
    parser.add_argument("--processes", type=int, default=1, help="that compile at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    args = parser.parse_args(argv)
    rows = list(survey(args.targets, args.dtypes, args.dims, args.processes))
    print(format_rows(rows))
    if args.json:
        unfinished = args.json.with_name(f"{args.json.name}.tmp")
        unfinished.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        unfinished.replace(args.json)
    return int(not all(row.is_good for row in rows))


def _pair(text: str) -> tuple[int, int]:
    dk, _, dv = text.partition("/")
    return int(dk), int(dv or dk)


if __name__ == "__main__":
    sys.exit(main())
