"""Every field of ``LayerConfig``, and another value of each."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from flexnsa.layers.config import LayerConfig
from tests.support.inputs import SMALL, TINY

FIELDS = {field.name: field for field in fields(LayerConfig)}
SIZES: dict[str, Any] = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "nsa": SMALL}
CHANGED: dict[str, Any] = {
    "dim": 24,
    "num_heads": 6,
    "num_kv_heads": 1,
    "head_dim": 8,
    "v_head_dim": 6,
    "nsa": TINY,
    "compression": "linear",
    "gate": "softmax",
    "rope_base": 100.0,
    "branches": ("cmp", "slc"),
    "impl": "reference",
    "recompute": ("slc",),
    "index_rank": 2,
}
"""Another value of every field that is no bool."""
NEEDED: dict[str, dict[str, Any]] = {"index_rank": {"nsa": replace(SMALL, index_heads=1)}}
"""Values of other fields without which a field has no meaning."""
