"""Native Sparse Attention (arXiv 2502.11089) as FlexAttention block masks: exact, linear in memory, compiled."""

from flexnsa.cache import NSACache
from flexnsa.compression import LinearCompressor, MeanCompressor, MLPCompressor
from flexnsa.config import NSAConfig
from flexnsa.functional import (
    NSAAux,
    block_importance,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from flexnsa.module import NativeSparseAttention
from flexnsa.selection import check_block_indices

__all__ = [
    "LinearCompressor",
    "MLPCompressor",
    "MeanCompressor",
    "NSAAux",
    "NSACache",
    "NSAConfig",
    "NativeSparseAttention",
    "block_importance",
    "check_block_indices",
    "compressed_attention",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
]
__version__ = "0.1.0"
