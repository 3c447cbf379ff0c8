"""Which keys the sliding window shows: the last ``w`` of the document, the query itself included (section 3.3.3)."""

from __future__ import annotations

import torch

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import Intervals
from flexnsa.positions import Positions


def window_intervals(positions: Positions, config: NSAConfig) -> Intervals:
    """Give the keys ``t - w + 1 .. t``, none before the document's first token, nor before key 0."""
    lo = torch.maximum(positions.start, positions.token - (config.window_size - 1)).clamp_min(0)
    return Intervals(lo, positions.token + 1)
