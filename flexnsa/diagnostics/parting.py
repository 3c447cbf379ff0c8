"""Where ranks part ways: the first collective that is not the same on all of them, and who has skipped one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flexnsa.diagnostics.flight_recorder import Collective

Begun = Mapping[int, Sequence[Collective]]
"""The last collectives that ranks have begun, in their order."""

_Numbered = dict[int, dict[int, Collective]]
"""By rank, then by number."""


def describe_parting(begun: Begun) -> str:
    """Say at which collective ranks have begun different ones; empty where they have not."""
    for group in dict.fromkeys(collective.group for those in begun.values() for collective in those):
        ranks = {rank: {x.number: x for x in those if x.group == group} for rank, those in begun.items()}
        number = _first_difference(ranks)
        if number is not None:
            return _in_words(ranks, number)
    return ""


def _first_difference(ranks: _Numbered) -> int | None:
    numbers = sorted(set[int]().union(*ranks.values()))
    first = next((n for n in numbers if _differ(x.what for x in _at(ranks, n).values())), None)
    if first is None:
        return None
    # What looks alike may already have been another: a rank that skips one of two in a row meets the other with it.
    while first - 1 in numbers and _differ(x.place for x in _at(ranks, first - 1).values()):
        first -= 1
    return first


def _in_words(ranks: _Numbered, number: int) -> str:
    there = _at(ranks, number)
    groups: dict[str, list[int]] = {}
    for rank, x in there.items():
        groups.setdefault(f"{x.what} in {x.place}" if x.place else x.what, []).append(rank)
    parts = [f"{what} on rank {', '.join(map(str, those))}" for what, those in groups.items()]
    skipped = _skipped(ranks, number)
    said = f"; rank {skipped} has skipped one" if skipped is not None else ""
    return f"collective {number} is not the same on all: {'; '.join(parts)}{said}"


def _skipped(ranks: _Numbered, number: int) -> int | None:
    """Give the rank whose collectives from there on are those of another one later."""
    behind = {
        rank: max((_alike(ranks[rank], ranks[other], number) for other in ranks if other != rank), default=0)
        for rank in ranks
    }
    most = max(behind.values(), default=0)
    found = [rank for rank, alike in behind.items() if alike == most]
    return found[0] if most and len(found) == 1 else None


def _alike(late: dict[int, Collective], early: dict[int, Collective], number: int) -> int:
    """Count how many of ``late`` from a number on are those of ``early`` from the next number on."""
    count = 0
    while (a := late.get(number + count)) and (b := early.get(number + count + 1)):
        if (a.what, a.place) != (b.what, b.place):
            break
        count += 1
    return count


def _at(ranks: _Numbered, number: int) -> dict[int, Collective]:
    return {rank: those[number] for rank, those in ranks.items() if number in those}


def _differ(values: Iterable[str]) -> bool:
    return len(set(values)) > 1
