"""Memory that :mod:`flexnsa.attention.sdpa` saves for backward, and that backward allocates."""

from __future__ import annotations

from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.attention.sdpa.branches import COMPRESSED_CHUNK, WINDOW_CHUNK
from flexnsa.attention.sdpa.selected import MAX_ROWS
from flexnsa.attention.threads import ROWS


def _saved(tag: str, sizes: AttentionSizes) -> int:
    blocks = sizes.indices if tag == "slc" else 0
    return sizes.keys(sizes.length(tag)) + sizes.outputs + sizes.lse + 8 * sizes.seq_len + blocks


def _backward(tag: str, sizes: AttentionSizes) -> int:
    config, length, wider = sizes.config, sizes.length(tag), 4 // sizes.activation  # sums are in fp32
    gradients, share = sizes.queries + sizes.keys(length), _heads_at_once(tag, sizes)
    if tag == "slc":  # rows and keys in fp32 with one extra column, and the sorted (block, query) pairs
        workspace = 4 * MAX_ROWS * sizes.group * (2 * config.select_block_size + 3 * sizes.head_dim)
        pairs = 12 * sizes.seq_len * config.num_selected_blocks
        rows = wider * (2 * sizes.queries + sizes.outputs + 2 * sizes.keys(length))
        return gradients + int(share * rows) + pairs + workspace
    chunk = _chunk(tag, sizes)
    seen = length if tag == "cmp" else min(sizes.seq_len, config.window_size + chunk - 1)
    scores = 4 * sizes.batch * sizes.num_heads * chunk * (2 * seen + 5 * sizes.head_dim)
    return gradients + int(share * (2 * wider * sizes.keys(length) + scores))


def _heads_at_once(tag: str, sizes: AttentionSizes) -> float:
    """Return the fraction of kv heads that are processed at once, on one thread."""
    heads = sizes.batch * sizes.num_kv_heads
    if tag == "slc":
        return 1 / heads
    return min(1, max(1, ROWS // (sizes.group * _chunk(tag, sizes))) / heads)


def _chunk(tag: str, sizes: AttentionSizes) -> int:
    return min(COMPRESSED_CHUNK if tag == "cmp" else WINDOW_CHUNK, sizes.seq_len)


FOOTPRINT = Footprint(_saved, _backward)
