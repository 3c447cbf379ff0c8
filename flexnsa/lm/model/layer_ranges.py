"""Which layers: all, none, a range or every n-th, in words that a command line can hold; and which one each follows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flexnsa.config import NSAConfig
from flexnsa.primitives import check_int, check_positive_int, check_type, describe

_RANGE, _EVERY = re.compile(r"(\d{1,9}):(\d{1,9})"), re.compile(r"every:([1-9]\d{0,8})")


def layer_range(name: str, value: Any, num_layers: int) -> range:
    """Return the layers that ``value`` selects, counted from 0.

    Args:
        name: name of the argument, for errors.
        value: ``"all"`` or True, ``"none"`` or False, ``"0:6"`` or ``(0, 6)`` for 0 to 5, ``"every:2"`` for 0, 2, 4 ...
        num_layers: number of layers of the model.

    Raises:
        TypeError: the value is of another kind.
        ValueError: it is none of these, or exceeds the layers.
    """
    found = _read(value, num_layers)
    if found is None or not 0 <= found.start <= found.stop <= num_layers:
        expected = f"expected 'none', 'all', 'every:2' or a range such as '0:1', within 0..{num_layers}"
        kind = ValueError if isinstance(value, str | tuple) else TypeError
        raise kind(f"{name}: {expected}, got {describe(value)}")
    return found


def _read(value: Any, num_layers: int) -> range | None:
    if value in ("all", "none") or isinstance(value, bool):
        return range(num_layers if value in ("all", True) else 0)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int) for end in value):
        return range(*value)
    if isinstance(value, str) and (ends := _RANGE.fullmatch(value)):
        return range(int(ends[1]), int(ends[2]))
    if isinstance(value, str) and (every := _EVERY.fullmatch(value)):
        return range(0, num_layers, int(every[1]))
    return None


def leaders_of(share_index: int | Sequence[int], num_layers: int, nsa: NSAConfig) -> tuple[int, ...]:
    """Return for each layer the number of the layer whose index it reads, its own or that of one before.

    Args:
        share_index: ``k``: layers 0, ``k``, ``2k`` ... lead, and the others read the index of the nearest leader before
            them; or the numbers to return, one for each layer, counted from 0.
        num_layers: layers that share, in their order.
        nsa: sizes of the layers.

    Raises:
        TypeError: it is neither.
        ValueError: there are more or fewer numbers than layers, one is of a later layer or of one that itself reads
            another's, or the layers have no indexer to share.
    """
    if isinstance(share_index, int):
        check_positive_int("share_index", share_index)
        leaders = tuple(number - number % share_index for number in range(num_layers))
    else:
        check_type("share_index", share_index, Sequence)
        leaders = tuple(share_index)
        for leader in leaders:
            check_int("share_index", leader, 0)
        if len(leaders) != num_layers:
            raise ValueError(f"share_index: expected a number for each of {num_layers} layers, got {len(leaders)}")
        for number, leader in enumerate(leaders):
            if leader > number or leaders[leader] != leader:
                expected = "its own number or that of a layer before that reads its own index"
                raise ValueError(f"share_index: expected for layer {number} {expected}, got {leader}")
    if leaders != tuple(range(num_layers)) and nsa.index_heads is None:
        raise ValueError(f"share_index: expected 1 without an indexer (index_heads), got {share_index}")
    return leaders
