"""The positions of a decoding step's tokens, the slots of a cache that they go to, and the keys that they read.

Token ``p`` is in slot ``p`` of a full buffer and in slot ``p % size`` of a ring buffer, which holds the last tokens
only. One slot more, at the end of each buffer, takes padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.interface import Call, Keys, Scorer, given
from flexnsa.config import BRANCHES, NSAConfig, num_compressed
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.positions import Positions
from flexnsa.masks.window import window_intervals

TAILS = {"cmp": "tail", "index": "index_tail"}
"""The kind of buffer that holds the raw keys or values of unfinished blocks, by that of their compressed tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSizes:
    """Sizes of the buffers of a cache.

    Args:
        max_seq_len: tokens of a full buffer.
        max_rewind: tokens that a ring buffer holds beyond those that the next step reads.
        config: sizes of the branches.
    """

    max_seq_len: int
    max_rewind: int
    config: NSAConfig

    @property
    def compressed(self) -> dict[str, NSAConfig]:
        """The configs of compressed tokens, by the buffer that holds them."""
        return self.config.compressed

    @property
    def lookback(self) -> dict[str, int]:
        """Tokens before a step that it reads, by the ring buffer that holds them."""
        tails = {TAILS[kind]: config.compress_block_size - 1 for kind, config in self.compressed.items()}
        return {**tails, "win": self.config.window_size - 1}

    def size(self, kind: str) -> int:
        """Count the slots of a kind of buffer without the spare one."""
        if kind == "slc":
            return self.max_seq_len
        if kind in self.compressed:
            return num_compressed(self.max_seq_len, self.compressed[kind])
        return self.lookback[kind] + self.max_rewind

    def slots(
        self, token: Tensor, is_kept: Tensor, after: Tensor, blocks: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the slots of new keys and values, int64, by kind of buffer; of those not kept, the spare slot.

        Args:
            token: int ``(B, T)``, positions of the new tokens in their sequences.
            is_kept: bool ``(B, T)``, False for padding and tokens without capacity.
            after: int ``(B, 1 or T)``, the lengths of these sequences after the step.
            blocks: by kind, int ``(B, E)``, the compressed tokens that the new tokens may complete, and bool ``(B, E)``
                or ``(E,)``, whether they do.
        """
        slots = {"slc": torch.where(is_kept, token, self.size("slc")).long()}
        for kind, (block, is_complete) in blocks.items():
            slots[kind] = torch.where(is_complete, block, self.size(kind)).long()
        for kind in self.lookback:
            size = self.size(kind)
            is_last = is_kept if token.shape[1] <= size else is_kept & (token >= after - size)
            slots[kind] = torch.where(is_last, token % size, size).long()
        return slots


class NewBlocks(NamedTuple):
    """The compressed tokens of one kind that ``T`` new tokens may complete, ``E = ceil(T / d)``.

    Args:
        token: int ``(B, E)``, the positions of their blocks' first tokens in the sequence.
        first_tokens: int32 ``(B, E)``, the same, counted from the start of the tail.
        emits: whether a block may have to be compressed; False only where the host knows that without waiting.
    """

    token: Tensor
    first_tokens: Tensor
    emits: bool


@dataclass(frozen=True, slots=True)
class Step:
    """``T`` new tokens of each sequence: everything that depends on the lengths and not on the tokens.

    Args:
        before: int32 ``(B, 1)``, the lengths before the step.
        after: int32 ``(B, 1)``, the lengths after it.
        positions: of the queries among all tokens of their sequence.
        window_positions: of the queries among the window's keys.
        window_in_place: whether these are the ring buffer itself with the new token in it, instead of an ordered copy.
        blocks: by kind of buffer, the compressed tokens that the tokens may complete.
        slots: by kind of buffer, int64 ``(B, T)`` or ``(B, E)``, the slots of the new keys and values.
        rows: by kind of buffer, int64 ``(1, T)`` or ``(1, E)``, the sequences of those slots where documents are
            unpacked; elsewhere row ``b`` belongs to sequence ``b``.
        lost: bool ``(B, T)``, tokens without capacity.
        longest: no sequence is longer after the step; None where the host does not know.
        recent: by name, keys and values that go into a ring buffer when the step ends, which reads the old ones.
    """

    before: Tensor
    after: Tensor
    positions: Positions
    window_positions: Positions
    window_in_place: bool
    blocks: dict[str, NewBlocks]
    slots: dict[str, Tensor]
    lost: Tensor
    longest: int | None
    rows: dict[str, Tensor] = field(default_factory=dict)
    recent: dict[str, Tensor] = field(default_factory=dict)


def count_compressed(lengths: Tensor, config: NSAConfig) -> Tensor:
    """As :func:`flexnsa.config.num_compressed`, of a tensor of lengths."""
    return (lengths + (config.compress_stride - config.compress_block_size)).clamp_min(0) // config.compress_stride


@dataclass(slots=True)
class ReadCounter:
    """Counts the keys that each branch reads by its masks and indices, while ``cache.reads`` is set to it.

    Counting waits for the device.

    Args:
        keys: by branch, the keys that queries read, each counted once for every query and kv head. Compressed keys
            that are scored for the selection count as ``cmp``, index keys as ``index``.
        bytes: by branch, of those keys and of their values, if these are read too.
    """

    keys: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BRANCHES, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BRANCHES, 0))

    def record(self, keys: Keys, call: Call, block_indices: Tensor | None, scorer: Scorer | None = None) -> None:
        """Add one call: its keys and values, its queries' positions, the blocks that they selected and the indexer."""
        counts = {}
        if keys.k_cmp is not None:
            positions = given(call.positions)
            counts["cmp"] = _width(compressed_intervals(positions, call.config)) * keys.k_cmp.shape[1]
        if keys.k_win is not None:
            window = given(call.window_positions)
            counts["win"] = _width(window_intervals(window, call.config)) * keys.k_win.shape[1]
        if block_indices is not None:
            size, positions = call.config.select_block_size, given(call.positions)
            own = (positions.token - positions.start)[:, None, :, None]
            past = (own + 1 - block_indices * size).clamp(0, size)
            counts["slc"] = int(torch.where(block_indices >= 0, past, 0).sum())
        for tag, count in counts.items():
            self._add(tag, count, *(x for name in (f"k_{tag}", f"v_{tag}") if (x := getattr(keys, name)) is not None))
        if scorer is not None:
            visible = compressed_intervals(given(call.positions), scorer.call.config)
            self._add("index", _width(visible) * scorer.k.shape[1], scorer.k)

    def _add(self, tag: str, count: int, *read: Tensor) -> None:
        self.keys[tag] = self.keys.get(tag, 0) + count
        self.bytes[tag] = self.bytes.get(tag, 0) + count * sum(x.shape[3] * x.itemsize for x in read)


def _width(intervals: Intervals) -> int:
    return int((intervals.hi - intervals.lo).clamp_min(0).sum())
