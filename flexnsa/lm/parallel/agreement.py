"""The check that values are the same on all ranks, before they are used.

Otherwise ranks that were started differently would train as one model, or wait for each other forever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class RanksDifferError(ValueError):
    """The ranks of a training run were given different values; the message names the first, with each rank's value."""


REFUSED = "refused"
"""Name under which a rank sends the reason why it cannot take part, in place of its values."""


def require_same(values_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have the same values.

    Args:
        values_by_rank: by rank, its values by their names. A name that a rank lacks counts as None.

    Raises:
        RanksDifferError: values differ; names the first of them, and the ranks that have each value.
    """
    difference = _difference(values_by_rank)
    if difference:
        raise RanksDifferError(difference)


def require_same_in_store(store: Store, rank: int, world_size: int, values: Mapping[str, Any]) -> None:
    """Check that all ranks that share a store have the same values, before they join a group.

    Args:
        store: keys of this check are removed from it.
        rank: rank of this process.
        world_size: number of ranks.
        values: values that JSON can hold, by name.

    Raises:
        RanksDifferError: as of :func:`require_same`, the same on all ranks.
    """
    store.set(f"values/{rank}", json.dumps(dict(values)))
    if rank == 0:
        values_by_rank = [json.loads(store.get(f"values/{other}")) for other in range(world_size)]
        store.set("difference", _difference(values_by_rank))
    difference = store.get("difference").decode()
    store.set(f"read/{rank}", "")
    if rank == 0:  # its process may hold the store, so it leaves last
        names = [f"{name}/{other}" for name in ("read", "values") for other in range(world_size)]
        store.wait(names)
        for name in (*names, "difference"):
            store.delete_key(name)
    if difference:
        raise RanksDifferError(difference)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings into one, by the names of their values."""
    merged: dict[str, Any] = {}
    for name, value in values.items():
        merged |= flat(value) if isinstance(value, Mapping) else {name: value}
    return merged


def _difference(by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first value that differs, or why ranks cannot take part; empty where all agree."""
    names = dict.fromkeys(name for values in by_rank for name in values)
    refusals = [values[REFUSED] for values in by_rank if REFUSED in values]
    if refusals:  # a rank that cannot take part does not have all values
        names = dict.fromkeys(name for name in names if all(name in values for values in by_rank) and name != REFUSED)
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(repr(values.get(name)), []).append(rank)
        if len(ranks) > 1:
            got = "; ".join(f"{value} on rank {', '.join(map(str, those))}" for value, those in ranks.items())
            return f"{name}: expected the same on all ranks, got {got}"
    if len(refusals) == len(by_rank) and len(set(refusals)) == 1:
        return refusals[0]
    return "; ".join(f"{values[REFUSED]} on rank {rank}" for rank, values in enumerate(by_rank) if REFUSED in values)
