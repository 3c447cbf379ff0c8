"""Native Sparse Attention (arXiv 2502.11089) as FlexAttention block masks: exact, linear in memory, compiled."""

from flexnsa.attention.interface import NSAAux
from flexnsa.cache.cache import NSACache
from flexnsa.checks.calls import check_block_indices, check_positions
from flexnsa.config import NSAConfig
from flexnsa.functional import (
    block_importance,
    block_shares,
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    selection_loss,
    selection_recall,
    sliding_window_attention,
)
from flexnsa.functional.indices import record_indices, replay_indices
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.compression import LinearCompressor, MeanCompressor, MLPCompressor
from flexnsa.layers.indexer import SelectionLoss
from flexnsa.mods import MaskMod, ScoreMod
from flexnsa.packing import (
    cu_seqlens_from_document_ids,
    document_ids_from_attention_mask,
    document_ids_from_cu_seqlens,
    document_ids_from_position_ids,
    next_token_targets,
    pack_padded,
    position_ids_from_document_ids,
    unpack_padded,
)

__all__ = [
    "LinearCompressor",
    "MLPCompressor",
    "MaskMod",
    "MeanCompressor",
    "NSAAux",
    "NSACache",
    "NSAConfig",
    "NativeSparseAttention",
    "ScoreMod",
    "SelectionLoss",
    "block_importance",
    "block_shares",
    "check_block_indices",
    "check_positions",
    "compressed_attention",
    "cu_seqlens_from_document_ids",
    "document_ids_from_attention_mask",
    "document_ids_from_cu_seqlens",
    "document_ids_from_position_ids",
    "native_sparse_attention",
    "next_token_targets",
    "pack_padded",
    "position_ids_from_document_ids",
    "record_indices",
    "replay_indices",
    "select_blocks",
    "selected_attention",
    "selection_loss",
    "selection_recall",
    "sliding_window_attention",
    "unpack_padded",
]
__version__ = "0.1.0"
