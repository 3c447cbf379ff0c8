"""The suite's summary: time and memory of every point, and how many times as much each baseline takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.layers import LAYERS, PEER
from benchmarks.harness.phases import PHASES
from benchmarks.suite.cases import BASELINES
from flexnsa.lm.measure.table import format_table

Point = dict[str, Any]
Line = dict[str, Point]
"""Points of one case by the work done: ``forward``, ``forward_backward``."""
LAYER_BASELINES = tuple(name for name in LAYERS if name == PEER)
SHAPE = ["S", "G", "dtype"]


def summary(points: Sequence[Point], environment: dict[str, Any]) -> str:
    """Write tables of time, of memory and of our phases; ``points`` are those of one run, labelled ones among them."""
    lines: dict[tuple[Any, ...], Line] = {}
    for point in points:
        lines.setdefault(_key(point), {})[point["work"]] = point
    layers = [line for line in lines.values() if _any(line)["name"] in LAYERS]
    phases = [line for line in lines.values() if _any(line)["name"] in PHASES]
    whole = [line for line in lines.values() if line not in layers and line not in phases]
    tables = []
    for kind, chosen, baselines in (("attention", whole, BASELINES), ("layer", layers, LAYER_BASELINES)):
        against = ["vs peer" if name == PEER else f"vs {name.split()[0]}" for name in baselines]
        header = [f"time, {kind}", *SHAPE, "forward, ms", *against, "and backward", *against, "tokens/s", ""]
        tables.append((header, [_time_line(line, lines, baselines) for line in chosen]))
        header = [f"memory, {kind}", *SHAPE, "saved, MiB", "peak", *against, "resident", *against]
        measured = [line for line in chosen if "peak_mib" in _any(line)]
        tables.append((header, [_memory_line(line, lines, baselines) for line in measured]))
    header = ["phase of NSA", *SHAPE, "forward, ms", "of NSA's", "and backward", "of NSA's", "peak, MiB", ""]
    tables.append((header, [_phase_line(line, lines) for line in phases]))
    remarks = [
        "vs: the median of the baseline over this one's, in the same run; above 1 where this one takes less.",
        "tokens/s: forward and backward. NSA's, of which phases are shares: that with compression.",
        "{device}, {threads} threads, torch {torch}, commit {commit}, load {load_average:.1f}".format(**environment),
    ]
    return "\n\n".join([*(format_table(header, rows) for header, rows in tables if rows), "\n".join(remarks)])


def _key(point: Point) -> tuple[Any, ...]:
    return point["name"], point["seq_len"], point["group"], point["dtype"]


def _any(line: Line) -> Point:
    return next(iter(line.values()))


def _value(line: Line, work: str, quantity: str) -> float | None:
    return line.get(work, {}).get(quantity)


def _shape(line: Line) -> list[str]:
    point = _any(line)
    return [point["name"], f"{point['seq_len']:,}", str(point["group"]), point["dtype"]]


def _against(
    line: Line, lines: dict[tuple[Any, ...], Line], work: str, quantity: str, baselines: Sequence[str]
) -> list[str]:
    """Return how many times our value each baseline's is, at the same shape."""
    ours, shape = _value(line, work, quantity), _key(_any(line))[1:]
    theirs = [_value(lines.get((name, *shape), {}), work, quantity) for name in baselines]
    return [_number(value / ours if ours and value else None, ".2f") for value in theirs]


def _time_line(line: Line, lines: dict[tuple[Any, ...], Line], baselines: Sequence[str]) -> list[str]:
    cells = []
    for work in ("forward", "forward_backward"):
        seconds = _value(line, work, "seconds")
        cells += [_number(seconds and seconds * 1e3), *_against(line, lines, work, "seconds", baselines)]
    speed = _number(_value(line, "forward_backward", "tokens_per_s"), ",.0f")
    return [*_shape(line), *cells, speed, _any(line).get("label", "")]


def _memory_line(line: Line, lines: dict[tuple[Any, ...], Line], baselines: Sequence[str]) -> list[str]:
    cells = [_number(_value(line, "forward_backward", "saved_mib"))]
    for quantity in ("peak_mib", "resident_mib"):
        value = _value(line, "forward_backward", quantity)
        cells += [_number(value), *_against(line, lines, "forward_backward", quantity, baselines)]
    return [*_shape(line), *cells]


def _phase_line(line: Line, lines: dict[tuple[Any, ...], Line]) -> list[str]:
    point, cells = _any(line), []
    whole = lines.get(("NSA with compression", *_key(point)[1:]), {})
    for work in ("forward", "forward_backward"):
        ours, all_of_it = _value(line, work, "seconds"), _value(whole, work, "seconds")
        cells += [_number(ours and ours * 1e3), _number(ours / all_of_it if ours and all_of_it else None, ".0%")]
    return [*_shape(line), *cells, _number(point.get("peak_mib")), point.get("label", "")]


def _number(value: float | None, spec: str = ",.1f") -> str:
    return "-" if value is None else format(value, spec)
