"""Training on several processes: how they join, what each computes of a step, and what they communicate."""

from flexnsa.lm.parallel.joining import (
    PARALLEL,
    REDUCE_DTYPES,
    count_launched,
    joined_ranks,
    launched_world_size,
    rank_device,
    refused_together,
)
from flexnsa.lm.parallel.ranks import Ranks

__all__ = [
    "PARALLEL",
    "REDUCE_DTYPES",
    "Ranks",
    "count_launched",
    "joined_ranks",
    "launched_world_size",
    "rank_device",
    "refused_together",
]
