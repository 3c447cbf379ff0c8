"""FlexAttention as PyTorch without a compiler: of each row of tiles, only those keys that a kernel would come to.

PyTorch's own formula knows nothing of tiles: it asks the mask function about every key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

PYTORCH: Any = import_module("torch._higher_order_ops.flex_attention")
_of_all_keys: Callable[..., tuple[Tensor, Tensor]] = PYTORCH._math_attention_inner


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace branches as often as for Inductor, and run what was traced."""
    torch._dynamo.reset()
    trace = partial(torch.compile, fullgraph=True, backend="eager")
    monkeypatch.setattr("flexnsa.attention.compilation.compile_branch", cache(trace))
    monkeypatch.setattr(PYTORCH, "_math_attention_inner", scores_of_tiles)


def scores_of_tiles(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: tuple[Any, ...], *rest: Any) -> Any:
    """Compute scores before and after the mods; full tiles ask no mask function, and the others are not seen."""
    scores, masked = _of_all_keys(q, k, v, score_mod, block_mask, *rest)
    partly = _seen(block_mask, 2, scores)
    if block_mask[4] is None:
        return scores, torch.where(partly, masked, -torch.inf)
    all_of_them = (*block_mask[:-1], lambda b, h, m, n, *_: n >= 0)  # noqa: ARG005
    _, whole = _of_all_keys(q, k, v, score_mod, all_of_them, *rest)
    full = _seen(block_mask, 4, scores)
    return scores, torch.where(full, whole, torch.where(partly, masked, -torch.inf))


def _seen(block_mask: tuple[Any, ...], place: int, scores: Tensor) -> Tensor:
    """Give the keys ``(B, H, M, N)`` in the tiles that are listed, for each row of tiles, at a place of the mask."""
    counts, indices, rows, columns = *block_mask[place : place + 2], *block_mask[-3:-1]
    tiles = -(-scores.shape[3] // columns)
    listed = torch.arange(indices.shape[3]) < counts[..., None]
    places = torch.where(listed, indices.long(), tiles)
    seen = torch.zeros(*indices.shape[:3], tiles + 1, dtype=torch.bool).scatter(3, places, value=True)[..., :-1]
    seen = seen.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, : scores.shape[2], : scores.shape[3]]
    return seen.repeat_interleave(scores.shape[1] // seen.shape[1], 1).expand_as(scores)
