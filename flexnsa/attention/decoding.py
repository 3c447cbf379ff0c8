"""The contract of a whole decoding step: from what a layer's maps give to the heads' outputs, the cache written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from flexnsa.config import NSAConfig

MOST_TOKENS = 8
"""New tokens of a row in one step: several are those of a draft."""


@dataclass(frozen=True, slots=True)
class Phi:
    """A compressor as numbers: ``mean``, ``linear`` or ``mlp``, and its parameters.

    Args:
        kind: which of them.
        position: ``(l, D)``, added to a block.
        weight: ``(H, l * D)``, of the first map.
        out: ``(D, H)``, of the second.
    """

    kind: str
    position: Tensor | None = None
    weight: Tensor | None = None
    out: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """List those that there are."""
        return [x for x in (self.position, self.weight, self.out) if x is not None]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """``T`` new tokens a row, as projected, and the cache that they join.

    Args:
        q: ``(B, T, Hq * Dk)``, not yet turned.
        k: by branch, ``(B, T, Hkv * Dk)``, not yet turned.
        v: by branch, ``(B, T, Hkv * Dv)``.
        gates: ``(B, T, Hq * branches)``, what the gate's map gives.
        gate: what makes gates of that, ``sigmoid`` or ``softmax``.
        phi_k: makes compressed keys; None where no branch reads them.
        phi_v: makes compressed values; None without that branch.
        buffers: of the cache, by name; written to.
        lengths: int32 ``(B,)``, tokens of each row; written to.
        reached: int32 ``(B,)``, the most that there have been; written to.
        new_lengths: int ``(B,)``, contiguous, how many of the new tokens are real; None for all.
        max_seq_len: tokens for which a row has room.
        num_heads: ``Hq``.
        config: sizes of the branches.
        scale: factor on the scores.
        rope_base: of the rotary frequencies, where none are given.
        frequencies: ``(Dk / 2,)``, radians a token by which each pair is turned, in place of those of ``rope_base``.
        rope_scale: factor on all that is turned.
    """

    q: Tensor
    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    gates: Tensor
    gate: str
    phi_k: Phi | None
    phi_v: Phi | None
    buffers: Mapping[str, Tensor]
    lengths: Tensor
    reached: Tensor
    new_lengths: Tensor | None
    max_seq_len: int
    num_heads: int
    config: NSAConfig
    scale: float
    rope_base: float = 10_000.0
    frequencies: Tensor | None = None
    rope_scale: float = 1.0

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Give room for the heads' outputs ``(B, T, Hq * Dv)`` and for the blocks that they select, if any."""
        (batch, num_tokens), kv_heads = self.q.shape[:2], next(iter(self.buffers.values())).shape[1]
        width = next(iter(self.v.values())).shape[-1] // kv_heads * self.num_heads
        selected = self.config.num_selected_blocks if "slc" in self.k else 0
        blocks = self.lengths.new_empty(batch, kv_heads, num_tokens, selected)
        return self.q.new_empty(batch, num_tokens, width), blocks


StepFunction = Callable[[StepInputs], tuple[Tensor, Tensor | None]]
"""Put the tokens into the cache and attend from them to all of it, without waiting for the device.

Gives the heads' outputs ``(B, T, Hq * Dv)``, not a number for tokens that found no room, and the selected blocks, int32
``(B, Hkv, T, n)``, where any are selected. A call may take no more tokens than :data:`MOST_TOKENS` and
than the cache's ``max_rewind``.
"""
