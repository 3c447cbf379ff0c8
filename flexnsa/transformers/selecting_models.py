"""Released models whose layers select blocks as NSA does: MSA, of ``minimax_m3_vl``; its sizes there and here."""

from __future__ import annotations

from typing import Any

from flexnsa.config import NSAConfig
from flexnsa.primitives import describe
from flexnsa.transformers.local_layers import SELECTING, nsa_types

FIELDS = {
    "select_block_size": "index_block_size",
    "num_selected_blocks": "index_topk_blocks",
    "num_local_blocks": "index_local_blocks",
}
"""Sizes of :meth:`flexnsa.NSAConfig.msa`, and their names in a config of transformers."""


def selecting_sizes(config: Any) -> NSAConfig | None:
    """Return the sizes with which a model's layers select; None for a dense model.

    Raises:
        ValueError: NSA cannot select so; the message names what does not fit.
    """
    if nsa_types(config) is not SELECTING:
        return None
    for name, like in {"index_head_dim": "head_dim", "index_n_heads": "num_key_value_heads"}.items():
        if getattr(config, name) != getattr(config, like):
            expected = f"{like}, {getattr(config, like)}, of a model to convert"
            raise ValueError(f"{name}: expected {expected}, got {describe(getattr(config, name))}")
    return NSAConfig.msa(**{own: getattr(config, name) for own, name in FIELDS.items()})


def write_sizes(config: Any, sizes: NSAConfig) -> None:
    """Write the sizes of converted layers into the config of a model that selects.

    Raises:
        ValueError: there are blocks that no such model selects.
    """
    if nsa_types(config) is SELECTING:
        if sizes.num_init_blocks:
            raise ValueError(f"num_init_blocks: expected 0 of layers that become MSA, got {sizes.num_init_blocks}")
        for own, name in FIELDS.items():
            setattr(config, name, getattr(sizes, own))
