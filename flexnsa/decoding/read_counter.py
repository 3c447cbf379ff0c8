"""What a step reads: keys counted one by one from the masks and indices that the branches were given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexnsa.attention.seam import Call, Keys, given
from flexnsa.geometry import BRANCHES
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.window import window_intervals


@dataclass(slots=True)
class ReadCounter:
    """Counts what each branch reads while ``cache.reads`` is set to it; counting waits for the device.

    Args:
        keys: by branch, the keys that queries met, each counted once for every query and kv head. Compressed keys
            that are scored for the selection count as ``cmp``.
        bytes: by branch, those keys and their values, where these are read too.
    """

    keys: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BRANCHES, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BRANCHES, 0))

    def record(self, keys: Keys, call: Call, block_indices: Tensor | None) -> None:
        """Add one call: the keys and values that were given, where its queries stood and what they selected."""
        counts = {}
        if keys.k_cmp is not None:
            positions = given(call.positions)
            counts["cmp"] = _width(compressed_intervals(positions, call.config)) * keys.k_cmp.shape[1]
        if keys.k_win is not None:
            window = given(call.window_positions)
            counts["win"] = _width(window_intervals(window, call.config)) * keys.k_win.shape[1]
        if block_indices is not None:
            size, positions = call.config.select_block_size, given(call.positions)
            own = (positions.token - positions.start)[:, None, :, None]
            past = (own + 1 - block_indices * size).clamp(0, size)
            counts["slc"] = int(torch.where(block_indices >= 0, past, 0).sum())
        for tag, count in counts.items():
            read = [x for name in (f"k_{tag}", f"v_{tag}") if (x := getattr(keys, name)) is not None]
            self.keys[tag] += count
            self.bytes[tag] += count * sum(x.shape[3] * x.itemsize for x in read)


def _width(intervals: Intervals) -> int:
    return int((intervals.hi - intervals.lo).clamp_min(0).sum())
