"""The caches of a model, one for each of its layers, checked before the first layer changes its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexnsa.cache.bounds import is_run_once
from flexnsa.cache.rows import RowCache
from flexnsa.cache.step_cache import check_pack
from flexnsa.layers.projection import weight_of
from flexnsa.primitives import check_lengths, describe, may_look


def check_caches(caches: Any, layers: Sequence[Any], tokens: Tensor, lengths: Tensor | None, *, packed: bool) -> None:
    """Check that each layer has a cache of its own, and that all have capacity for the tokens.

    Args:
        caches: of the layers.
        layers: the attention of each layer.
        tokens: ``(B, T)``.
        lengths: int ``(B,)``, or None.
        packed: whether the tokens are one sequence of documents.

    Raises:
        TypeError: ``caches`` is not a list of caches, or one is of another kind of attention.
        ValueError: there are more or fewer caches than layers, one is there twice, or one does not fit its layer, the
            tokens or the others. That lengths differ is only found on CPU.
    """
    if not isinstance(caches, Sequence) or not all(isinstance(cache, RowCache) for cache in caches):
        raise TypeError(f"caches: expected a list of caches, got {describe(caches)}")
    if len(caches) != len(layers):
        raise ValueError(f"caches: expected one for each of {len(layers)} layers, got {len(caches)}")
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        same = [first for first, other in enumerate(caches[:index]) if other is cache]
        if same:
            raise ValueError(f"caches: expected one of its own for each layer, got caches[{same[0]}] again at {index}")
        layer.cache_class.check_made_for(layer, cache, f"caches[{index}]")
        if cache.device != tokens.device:  # layers may be on several devices
            cache.require(f"caches[{index}]", device=weight_of(layer).device)
    if packed:
        for cache in caches:
            check_pack(tokens, cache, lengths)
    came = [cache.batch_size for cache in caches]
    expected = came[0] if packed else len(tokens)
    if any(rows != expected for rows in came):
        raise ValueError(f"caches: expected {expected} rows, got {came}")
    dtypes = [cache.dtype for cache in caches]
    if any(dtype != dtypes[0] for dtype in dtypes):
        raise ValueError(f"caches: expected one dtype, got {dtypes}")
    if lengths is not None:
        check_lengths(lengths, tokens)
    if is_run_once():
        _check_rooms(caches, tokens.shape[1], lengths, packed=packed)
    _check_same_tokens(caches)


def _check_same_tokens(caches: Sequence[RowCache]) -> None:
    """Check on CPU that all caches hold the same lengths: each layer takes its positions from its own."""
    first = caches[0].lengths
    for index, cache in enumerate(caches):
        if may_look(first) and may_look(cache.lengths) and not torch.equal(cache.lengths, first):
            raise ValueError(
                f"caches: expected tokens of the same lengths in all, got {first.tolist()} in caches[0] "
                f"and {cache.lengths.tolist()} in caches[{index}]"
            )


def _check_rooms(caches: Sequence[RowCache], num_tokens: int, lengths: Tensor | None, *, packed: bool) -> None:
    """Check the capacity of all caches; where they are equal, the first layer checks its own."""
    rooms = {(cache.max_seq_len, cache.room.longest): cache for cache in caches}
    if len(rooms) == 1:
        return
    if packed:
        sizes = [cache.max_seq_len for cache in caches]
        raise ValueError(f"caches: expected one max_seq_len with document_ids, got {sizes}")
    for cache in rooms.values():
        cache.check_room(num_tokens, lengths)
