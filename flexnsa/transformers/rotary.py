"""The rotary embedding of a layer: the model's own angles, for whichever channels of a head it rotates together.

NSA layers rotate channel ``i`` of a head with channel ``i + D / 2``. Models have other pairs, or rotate a part of the
channels. Their heads are put in NSA's order, which changes no product of queries and keys.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.attention.interface import given
from flexnsa.layers.rope import RopeTables
from flexnsa.primitives import describe

STYLES = ("halves", "interleaved", "repeated", "none")
"""Channels that are rotated together, of the ``R`` that are rotated, and where the model's tables have their angles:

- ``halves``: ``i`` and ``i + R / 2``; the first half of a table has each angle once.
- ``interleaved``: ``2i`` and ``2i + 1``; the first half of a table has each angle once.
- ``repeated``: ``2i`` and ``2i + 1``; tables have each angle twice in a row.
- ``none``: the layer does not rotate.
"""


class Rotary(nn.Module):
    """Angles of positions, as tables for heads in NSA's order.

    Args:
        dense: the model's rotary embedding; of layers that do not rotate it has no effect.
        style: one of :data:`STYLES`.
        layer_type: of the layer; some models have other angles in other types.
        head_dim: ``D``.

    Raises:
        ValueError: the embedding has no angles by the name that all of transformers' have, or too many for a head.
    """

    def __init__(self, dense: Any, style: str, layer_type: str, head_dim: int) -> None:
        super().__init__()
        self.dense, self.style, self.head_dim = deepcopy(dense), style, head_dim
        by_type = dense is not None and "layer_type" in inspect.signature(dense.forward).parameters
        self.prefix, self.options = (f"{layer_type}_", {"layer_type": layer_type}) if by_type else ("", {})
        if style != "none" and self._frequencies is None:
            raise ValueError(f"rotary_emb: expected a module with {self.prefix}inv_freq, got {describe(dense)}")
        self.num_rotated = 0 if style == "none" else 2 * given(self._frequencies).numel()
        if self.num_rotated > head_dim or head_dim % 2:
            raise ValueError(f"rotary_emb: expected at most {head_dim} angles, an even number, got {self.num_rotated}")

    @property
    def _frequencies(self) -> Tensor | None:
        return getattr(self.dense, f"{self.prefix}inv_freq", None)

    def order(self, heads: Tensor) -> Tensor:
        """Put the channels of heads ``(..., D)`` in NSA's order."""
        if self.style == "none" or (self.style == "halves" and self.num_rotated >= heads.shape[-1]):
            return heads
        rotated, others = heads.tensor_split([self.num_rotated], -1)
        if self.style == "halves":
            first, second = rotated.chunk(2, -1)
        else:
            first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
        halves = others.chunk(2, -1) if others.shape[-1] else (others, others)
        return torch.cat((first, halves[0], second, halves[1]), -1)

    def forward(self, x: Tensor, *positions: Tensor) -> list[RopeTables]:
        """Tabulate the angles at int ``(T,)`` or ``(B, T)`` positions; see :class:`flexnsa.layers.layouts.Rotate`."""
        wide = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        rows = [torch.atleast_2d(each) for each in positions]
        counts = [each.shape[1] for each in rows]
        if self.style == "none":
            cos = wide.new_ones(*torch.cat(rows, dim=1).shape, self.head_dim // 2)
            sin = torch.zeros_like(cos)
        else:
            width = self.num_rotated // 2
            each = slice(None, None, 2) if self.style == "repeated" else slice(width)
            missing = (0, self.head_dim // 2 - width)  # channels that are not rotated have the angle 0
            cos, sin = (table[..., each] for table in self.dense(wide, torch.cat(rows, dim=1), **self.options))
            cos, sin = F.pad(cos, missing, value=1.0), F.pad(sin, missing)
        parts = (table[:, None].split(counts, dim=2) for table in (cos, sin))
        return [RopeTables(*part) for part in zip(*parts, strict=True)]

    def step_frequencies(self, x: Tensor) -> tuple[Tensor, float] | None:
        """Return the radians per position ``(D / 2,)``, and a factor on the tables; None if they are not constant."""
        if self.style == "none":
            return x.new_zeros(self.head_dim // 2, dtype=torch.float32), 1.0
        scale = getattr(self.dense, f"{self.prefix}attention_scaling", 1.0)
        looks = looks_at_positions(self.dense, self.options.get("layer_type"))
        if looks or (scale != 1 and self.num_rotated < self.head_dim):
            return None
        return F.pad(given(self._frequencies), (0, (self.head_dim - self.num_rotated) // 2)), scale


def looks_at_positions(module: Any, layer_type: str | None = None) -> bool:
    """Return whether angles of a rotary embedding, those of a type of layers or any, depend on the largest position."""
    kind = getattr(module, "rope_type", "")
    kinds = kind if isinstance(kind, dict) else {layer_type: kind}
    kinds = [of_type for name, of_type in kinds.items() if layer_type in (None, name)]
    return any("dynamic" in each or each == "longrope" for each in kinds)
