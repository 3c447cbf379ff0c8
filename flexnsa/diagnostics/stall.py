"""Who waits and who works, when ranks make no step: told by what each was seen to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flexnsa.diagnostics.flight_recorder import Collective
from flexnsa.diagnostics.parting import describe_parting


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a rank was seen to do.

    Args:
        step: that it had not ended.
        begun: collectives; who has begun fewer than another is waited for.
        moves: whether its stack changed while it was looked at.
        place: innermost, of its stack.
        recent: the last of the collectives, where PyTorch has kept them.
        broke_off: whether it was told at that place that its connection to another is lost.
    """

    step: int
    begun: int
    moves: bool
    place: str
    recent: Sequence[Collective] = ()
    broke_off: bool = False


def describe_stall(seen: Sequence[Sighting | None], seconds: float, gone: Collection[int] = ()) -> str:
    """Say in a sentence which ranks wait, and which of the others are slow, stuck or gone.

    Args:
        seen: by rank; None of one that did not answer.
        seconds: without a step.
        gone: those that did not answer because their process has ended.
    """
    there = {rank: sighting for rank, sighting in enumerate(seen) if sighting is not None}
    begun = max((sighting.begun for sighting in there.values()), default=0)
    somebody_is_late = len(there) < len(seen) or any(sighting.begun < begun for sighting in there.values())
    works = [
        f"rank {rank} {_does(sighting, rank in gone)}"
        for rank, sighting in enumerate(seen)
        if sighting is None or sighting.begun < begun or not somebody_is_late
    ]
    whom = "them" if len(works) > 1 else "it"
    waits = [
        f"rank {rank} {'lost' if sighting.broke_off else 'waits for'} {whom} in {sighting.place}{_last(sighting)}"
        for rank, sighting in there.items()
        if sighting.begun == begun and somebody_is_late
    ]
    step = max((sighting.step for sighting in there.values()), default=0)
    broke_off = any(sighting.broke_off for sighting in there.values())
    parting = describe_parting({rank: sighting.recent for rank, sighting in there.items()})
    said = "; ".join([*works, *waits, *([parting] if parting else [])])
    return f"step {step} {'has broken off' if broke_off else f'has not ended in {seconds:g} s'}: {said}"


def _does(sighting: Sighting | None, is_gone: bool) -> str:
    if sighting is None:
        return "is gone" if is_gone else "does not answer"
    if sighting.broke_off:
        return f"broke off in {sighting.place}"
    if sighting.moves:
        return f"is slow: it is at work in {sighting.place}"
    return f"is stuck in {sighting.place}"


def _last(sighting: Sighting) -> str:
    """Name the collective that a rank is in, if it is known to be in one."""
    last = sighting.recent[-1] if sighting.recent else None
    return "" if last is None or last.ended else f" (collective {last.number}, {last.what})"
