"""Why ranks make no step: a snapshot of each, and the first collective that is not the same on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexnsa.files import write_whole

RECENT = 256
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has started.

    Args:
        group: name of the process group.
        number: index within the group, counted on every rank.
        what: operation and sizes, such as ``"all_reduce of (8, 3)"``; the same on all ranks that take part.
        place: position in the code that called it.
        ended: whether it has ended on this rank.
    """

    group: str
    number: int
    what: str
    place: str
    ended: bool


def write_flight_record(path: Path) -> list[Collective]:
    """Write the record of torch's flight recorder, and return its last collectives; empty without a recorder.

    The recorder is on by default, for gloo and NCCL; ``TORCH_FR_BUFFER_SIZE=0`` turns it off.
    ``torchfrtrace --prefix flight.rank-`` reads the files of all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    module = getattr(torch._C, "_distributed_c10d", None)  # whose functions depend on the version
    recorders = [getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
    entries: list[dict[str, Any]] = []
    for record in (recorder() for recorder in recorders if recorder is not None):
        recorded = pickle.loads(record).get("entries", [])
        if recorded and not entries:  # NCCL's before gloo's: the tool reads one file per rank
            write_whole(path, record)
        entries += recorded
    ordered = sorted(entries, key=lambda entry: entry["time_created_ns"])
    return [_collective(entry) for entry in ordered if not entry["is_p2p"]][-RECENT:]


def _collective(entry: dict[str, Any]) -> Collective:
    operation = entry["profiling_name"].partition(":")[2]
    # The inputs of all collectives but scatter are the same on all ranks
    sizes = ", ".join(str(tuple(size)) for size in entry["output_sizes" if operation == "scatter" else "input_sizes"])
    callers = (frame for frame in entry.get("frames", []) if not frame["filename"].startswith(_TORCH))
    place = next((f"{Path(frame['filename']).name}:{frame['line']}, {frame['name']}" for frame in callers), "")
    ended = bool(entry.get("retired")) or entry.get("state") == "completed"
    number = entry["collective_seq_id"]
    return Collective(str(entry["process_group"][0]), number, f"{operation} of {sizes}", place, ended)


@dataclass(frozen=True, slots=True)
class Sighting:
    """Snapshot of a rank that makes no step.

    Args:
        step: its current step.
        begun: number of collectives that it has started; ranks wait for those that have started fewer.
        moves: whether its stack changed while it was sampled.
        place: innermost position of its stack.
        recent: its last collectives, where PyTorch has recorded them.
        broke_off: whether it lost the connection to another rank at that position.
    """

    step: int
    begun: int
    moves: bool
    place: str
    recent: Sequence[Collective] = ()
    broke_off: bool = False


def describe_stall(seen: Sequence[Sighting | None], seconds: float, gone: Collection[int] = ()) -> str:
    """Name the ranks that wait, and those of the others that are slow, stuck or gone.

    Args:
        seen: snapshots by rank; None for a rank that did not answer.
        seconds: time without a step.
        gone: ranks that did not answer because their processes have ended.
    """
    answered = {rank: sighting for rank, sighting in enumerate(seen) if sighting is not None}
    begun = max((sighting.begun for sighting in answered.values()), default=0)
    some_are_late = len(answered) < len(seen) or any(sighting.begun < begun for sighting in answered.values())
    works = [
        f"rank {rank} {_does(sighting, rank in gone)}"
        for rank, sighting in enumerate(seen)
        if sighting is None or sighting.begun < begun or not some_are_late
    ]
    whom = "them" if len(works) > 1 else "it"
    waits = [
        f"rank {rank} {'lost' if sighting.broke_off else 'waits for'} {whom} in {sighting.place}{_last(sighting)}"
        for rank, sighting in answered.items()
        if sighting.begun == begun and some_are_late
    ]
    step = max((sighting.step for sighting in answered.values()), default=0)
    broke_off = any(sighting.broke_off for sighting in answered.values())
    parting = describe_parting({rank: sighting.recent for rank, sighting in answered.items()})
    reasons = "; ".join([*works, *waits, *([parting] if parting else [])])
    return f"step {step} {'has broken off' if broke_off else f'has not ended in {seconds:g} s'}: {reasons}"


def _does(sighting: Sighting | None, is_gone: bool) -> str:
    if sighting is None:
        return "is gone" if is_gone else "does not answer"
    if sighting.broke_off:
        return f"broke off in {sighting.place}"
    if sighting.moves:
        return f"is slow: it is at work in {sighting.place}"
    return f"is stuck in {sighting.place}"


def _last(sighting: Sighting) -> str:
    """Name the collective that a rank is in, if that is known."""
    last = sighting.recent[-1] if sighting.recent else None
    return "" if last is None or last.ended else f" (collective {last.number}, {last.what})"


_Numbered = dict[int, dict[int, Collective]]
"""Collectives by rank, then by number."""


def describe_parting(recent: Mapping[int, Sequence[Collective]]) -> str:
    """Describe the first of the latest collectives that differs between ranks; empty if none does."""
    for group in dict.fromkeys(x.group for collectives in recent.values() for x in collectives):
        ranks = {rank: {x.number: x for x in recent[rank] if x.group == group} for rank in recent}
        number = _first_difference(ranks)
        if number is not None:
            return _describe_difference(ranks, number)
    return ""


def _first_difference(ranks: _Numbered) -> int | None:
    numbers = sorted(set[int]().union(*ranks.values()))
    first = next((n for n in numbers if len({x.what for x in _at(ranks, n).values()}) > 1), None)
    if first is None:
        return None
    # Equal collectives may have been called from different positions: a rank that skips one of two meets the next one
    while first - 1 in numbers and len({x.place for x in _at(ranks, first - 1).values()}) > 1:
        first -= 1
    return first


def _describe_difference(ranks: _Numbered, number: int) -> str:
    ranks_of: dict[str, list[str]] = {}
    for rank, x in _at(ranks, number).items():
        ranks_of.setdefault(f"{x.what} in {x.place}" if x.place else x.what, []).append(str(rank))
    parts = [f"{what} on rank {', '.join(those)}" for what, those in ranks_of.items()]
    skipped = _skipped(ranks, number)
    parts += [f"rank {skipped} has skipped one"] if skipped is not None else []
    return f"collective {number} is not the same on all: {'; '.join(parts)}"


def _skipped(ranks: _Numbered, number: int) -> int | None:
    """Return the rank whose collectives from there on are the later ones of another rank."""
    behind = {
        rank: max((_alike(ranks[rank], ranks[other], number) for other in ranks if other != rank), default=0)
        for rank in ranks
    }
    most = max(behind.values(), default=0)
    candidates = [rank for rank, alike in behind.items() if alike == most]
    return candidates[0] if most and len(candidates) == 1 else None


def _alike(late: dict[int, Collective], early: dict[int, Collective], number: int) -> int:
    """Count the collectives of ``late`` from a number on that equal those of ``early`` from the next number on."""
    count = 0
    while (a := late.get(number + count)) and (b := early.get(number + count + 1)):
        if (a.what, a.place) != (b.what, b.place):
            break
        count += 1
    return count


def _at(ranks: _Numbered, number: int) -> dict[int, Collective]:
    return {rank: collectives[number] for rank, collectives in ranks.items() if number in collectives}
