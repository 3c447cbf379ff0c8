"""Who waits and who works, when ranks make no step: told by what each was seen to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a rank was seen to do.

    Args:
        step: that it had not ended.
        collectives: that it had begun; who has begun fewer than another is waited for.
        moves: whether its stack changed while it was looked at.
        place: innermost, of its stack.
    """

    step: int
    collectives: int
    moves: bool
    place: str


def describe_stall(seen: Sequence[Sighting | None], seconds: float) -> str:
    """Say in a sentence which ranks wait, and which of the others are slow, stuck or gone.

    Args:
        seen: by rank; None of one that did not answer.
        seconds: without a step.
    """
    there = [sighting for sighting in seen if sighting is not None]
    begun = max((sighting.collectives for sighting in there), default=0)
    somebody_is_late = len(there) < len(seen) or any(sighting.collectives < begun for sighting in there)
    works: list[str] = []
    waits: list[str] = []
    for rank, sighting in enumerate(seen):
        if sighting is None:
            works.append(f"rank {rank} does not answer")
        elif sighting.collectives == begun and somebody_is_late:
            waits.append(f"rank {rank} waits for it in {sighting.place}")
        elif sighting.moves:
            works.append(f"rank {rank} is slow: it is at work in {sighting.place}")
        else:
            works.append(f"rank {rank} is stuck in {sighting.place}")
    step = max((sighting.step for sighting in there), default=0)
    if len(works) > 1:
        waits = [words.replace("waits for it", "waits for them") for words in waits]
    return f"step {step} has not ended in {seconds:g} s: {'; '.join(works + waits)}"
