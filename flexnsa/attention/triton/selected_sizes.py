"""How much the lists of the selected branch may hold; :mod:`selected_lists` says what bins and copies are."""

from __future__ import annotations


def num_bins(num_keys: int, block_size: int, *, has_positions: bool) -> int:
    """Count the bins that ``num_keys`` keys may need; documents may begin before the first key."""
    runs = (num_keys + block_size - 1) // block_size
    return 2 * (runs + 1) if has_positions else runs


def max_copies(bins: int, num_pairs: int, capacity: int) -> int:
    """Bound the copies of a chunk: at most one short one a bin, and as many full ones as the pairs fill."""
    return bins + num_pairs // capacity


def max_shared(num_pairs: int, capacity: int) -> int:
    """Bound the copies of bins that have several: each such bin fills all but one, at least half of them."""
    return max(1, 2 * (num_pairs // capacity))
