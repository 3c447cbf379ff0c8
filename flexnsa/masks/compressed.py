"""Which compressed tokens a query sees: those whose last token is not in its future (NSA paper, section 3.3.1)."""

from __future__ import annotations

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import Intervals
from flexnsa.positions import Positions


def compressed_intervals(positions: Positions, config: NSAConfig) -> Intervals:
    """Give the compressed tokens ``i`` with ``i * d + l - 1 <= t``, counted from the document's first."""
    complete = positions.token - positions.start - config.compress_block_size + 1
    visible = (complete.div(config.compress_stride, rounding_mode="floor") + 1).clamp_min(0)
    return Intervals(positions.cmp_start, positions.cmp_start + visible)
