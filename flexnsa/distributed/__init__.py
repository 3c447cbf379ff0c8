"""Training on several processes: how they are joined, what each does of a step, and what they tell each other."""

from flexnsa.distributed.joining import PARALLEL, REDUCE_DTYPES, joined_ranks, launched_world_size, rank_device
from flexnsa.distributed.ranks import Ranks

__all__ = ["PARALLEL", "REDUCE_DTYPES", "Ranks", "joined_ranks", "launched_world_size", "rank_device"]
