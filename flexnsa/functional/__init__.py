"""The public functions: each checks its arguments and calls an implementation; those of ``indices`` take a model."""

from flexnsa.functional.attention import native_sparse_attention
from flexnsa.functional.branches import compressed_attention, selected_attention, sliding_window_attention
from flexnsa.functional.selection import block_importance, select_blocks
from flexnsa.functional.selection_loss import block_shares, selection_loss, selection_recall

__all__ = [
    "block_importance",
    "block_shares",
    "compressed_attention",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "selection_loss",
    "selection_recall",
    "sliding_window_attention",
]
