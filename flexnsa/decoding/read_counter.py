"""What a step reads: keys counted one by one from the masks and indices that the branches were given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.window import window_intervals
from flexnsa.positions import Positions


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

    def record(
        self,
        kept: dict[str, Tensor],
        positions: Positions,
        window_positions: Positions,
        block_indices: Tensor | None,
        config: NSAConfig,
    ) -> None:
        """Add one call: the keys and values ``kept`` by name, where its queries stood and what they selected."""
        counts = {}
        if "k_cmp" in kept:
            counts["cmp"] = _width(compressed_intervals(positions, config)) * kept["k_cmp"].shape[1]
        if "k_win" in kept:
            counts["win"] = _width(window_intervals(window_positions, config)) * kept["k_win"].shape[1]
        if block_indices is not None:
            first = block_indices * config.select_block_size
            past = (positions.token[:, None, :, None] - positions.start[:, None, :, None] + 1 - first).clamp(
                0, config.select_block_size
            )
            counts["slc"] = int(torch.where(block_indices >= 0, past, 0).sum())
        for tag, count in counts.items():
            rows = [kept[name] for name in (f"k_{tag}", f"v_{tag}") if name in kept]
            self.keys[tag] += count
            self.bytes[tag] += count * sum(x.shape[3] * x.itemsize for x in rows)


def _width(intervals: Intervals) -> int:
    return int((intervals.hi - intervals.lo).clamp_min(0).sum())
