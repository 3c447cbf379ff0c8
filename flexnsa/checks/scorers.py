"""Checks of what scores blocks: compressed keys, or index queries and index keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexnsa.checks.calls import check_group
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.primitives import check_tensor, describe


def check_scorer(
    q: Tensor, q_index: Any, keys: Any, name: str, heads: int | str, length: int, config: NSAConfig
) -> None:
    """Check index queries and the keys called ``name``, or compressed keys alone, that score ``length`` tokens."""
    if config.index_heads is None:
        check_unused("q_index", q_index)
        check_tensor(name, keys, (q.shape[0], heads, num_compressed(length, config), q.shape[3]), like=q)
        check_group(name, q, keys)
        return
    count = f"Hkv * {config.index_heads}" if isinstance(heads, str) else heads * config.index_heads
    check_tensor("q_index", q_index, (q.shape[0], count, q.shape[2], config.index_head_dim or "Di"), like=q)
    num_keys = num_compressed(length, config.scoring)
    if config.index_score is not None:  # heads share their keys
        check_tensor(name, keys, (q.shape[0], 1, num_keys, q_index.shape[3]), like=q)
        check_group("q_index", q, q_index)
        return
    check_tensor(name, keys, (q.shape[0], heads, num_keys, q_index.shape[3]), like=q)
    if keys.shape[1] * config.index_heads != q_index.shape[1] or q.shape[1] % keys.shape[1]:
        expected = f"heads that divide the {q.shape[1]} of q, and index_heads={config.index_heads} queries for each"
        raise ValueError(f"{name}: expected {expected}, got {keys.shape[1]} and {q_index.shape[1]} queries")


def checked_scorer_keys(
    q: Tensor,
    k_cmp: Any,
    q_index: Any,
    k_index: Any,
    index_scale: Any,
    heads: int | str,
    length: int,
    config: NSAConfig,
) -> Tensor:
    """Check what scores the blocks of ``length`` tokens, and return its keys: index keys, or compressed ones."""
    if config.index_heads is None:
        check_unused("k_index", k_index)
        check_unused("index_scale", index_scale)
        check_scorer(q, q_index, k_cmp, "k_cmp", heads, length, config)
        return k_cmp
    check_scorer(q, q_index, k_index, "k_index", heads, length, config)
    if k_cmp is not None:
        check_tensor("k_cmp", k_cmp, (q.shape[0], heads, num_compressed(length, config), q.shape[3]), like=q)
    return k_index


def check_masses(config: NSAConfig, where: str) -> None:
    """Check that blocks are scored by mass, for what has no other score."""
    if config.index_score is not None:
        raise ValueError(f"index_score: expected None {where}, got {config.index_score!r}")


def check_unused(name: str, value: Any) -> None:
    """Check that an argument of an indexer is None where there is no indexer."""
    if value is not None:
        raise ValueError(f"{name}: expected None without config.index_heads, got {describe(value)}")
