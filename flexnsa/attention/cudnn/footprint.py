"""What :mod:`flexnsa.attention.cudnn` saves for backward, and what backward allocates: the compressed branch."""

from __future__ import annotations

from flexnsa.attention.cudnn.compressed import DIMS, LEAST_LENGTH
from flexnsa.attention.footprint import AttentionSizes, Footprint


def fits(sizes: AttentionSizes) -> bool:
    """Tell whether a Hopper would take it for whole sequences, as :func:`flexnsa.attention.cudnn.compressed.fits`."""
    dims = sizes.head_dim == sizes.v_head_dim and sizes.head_dim in DIMS
    return dims and sizes.activation == 2 and sizes.seq_len >= LEAST_LENGTH


def _saved(tag: str, sizes: AttentionSizes) -> int:
    return sizes.inputs(tag) + sizes.outputs + sizes.lse


def _backward(tag: str, sizes: AttentionSizes) -> int:
    # Gradients, those of keys and values in fp32 too; and of one row of the batch the queries' gradient, and keys and
    # values with their gradients spread to all heads and places, each of which is as large as the queries.
    gradients = sizes.queries + sizes.keys(sizes.length(tag)) * (1 + 4 // sizes.activation)
    return gradients + 5 * sizes.queries // sizes.batch


FOOTPRINT = Footprint(_saved, _backward)
