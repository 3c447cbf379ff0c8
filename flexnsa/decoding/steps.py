"""Where the tokens of a decoding step stand, and in which slots of a cache their keys and values go.

Token ``p`` is in slot ``p`` of a full buffer and in slot ``p % size`` of a ring buffer, which holds the last tokens
only. One slot more, at the end of each buffer, takes what must not be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed
from flexnsa.positions import Positions


def buffer_names(branches: tuple[str, ...]) -> list[str]:
    """List the buffers that a layer needs; without the compressed branch, selection still wants compressed keys."""
    names = []
    if "cmp" in branches or "slc" in branches:
        names += ["k_cmp", "k_tail"]
    if "cmp" in branches:
        names += ["v_cmp", "v_tail"]
    for tag in ("slc", "win"):
        if tag in branches:
            names += [f"k_{tag}", f"v_{tag}"]
    return names


def kind_of(name: str) -> str:
    """Give ``slc`` for ``k_slc``."""
    return name.partition("_")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Sizes of the buffers of a cache.

    Args:
        max_seq_len: tokens of a full buffer.
        max_rewind: tokens that a ring buffer holds beyond those that the next step looks back at.
        config: of the branches.
    """

    max_seq_len: int
    max_rewind: int
    config: NSAConfig

    @property
    def lookback(self) -> dict[str, int]:
        """Tokens before a step that it looks back at, by the ring buffer that holds them."""
        return {"tail": self.config.compress_block_size - 1, "win": self.config.window_size - 1}

    def size(self, kind: str) -> int:
        """Count the slots of a kind of buffer without the spare one."""
        if kind == "slc":
            return self.max_seq_len
        if kind == "cmp":
            return num_compressed(self.max_seq_len, self.config)
        return self.lookback[kind] + self.max_rewind


@dataclass(frozen=True, slots=True)
class Step:
    """``T`` new tokens a row; everything that depends on the lengths and not on the tokens.

    Args:
        before: int32 ``(B, 1)``, the lengths before the step.
        after: int32 ``(B, 1)``, the lengths after it.
        positions: of the queries among all tokens of their row.
        window_positions: of the queries among the window's keys.
        window_in_place: whether these are the ring buffer itself, the new token in it, and not a copy of both in order.
        block: int32 ``(B, E)``, the compressed tokens that ``T`` tokens can complete, ``E = ceil(T / d)``.
        first_tokens: int32 ``(B, E)``, where their blocks begin among the tokens of the tail and the step's.
        slots: by kind of buffer, int64 ``(B, T)`` or ``(B, E)``: where the new keys and values go.
        rows: by kind of buffer, int64 ``(1, T)`` or ``(1, E)``: in which rows those slots are, where the step's tokens
            are not in one row for each of the cache.
        lost: bool ``(B, T)``, tokens for which there was no room.
        emits: whether there may be a block to compress; False only where that can be told without waiting.
        recent: by name, what goes into a ring buffer when the step ends; until then it is needed as it is.
    """

    before: Tensor
    after: Tensor
    positions: Positions
    window_positions: Positions
    window_in_place: bool
    block: Tensor
    first_tokens: Tensor
    slots: dict[str, Tensor]
    lost: Tensor
    emits: bool
    rows: dict[str, Tensor] = field(default_factory=dict)
    recent: dict[str, Tensor] = field(default_factory=dict)


def locate(before: Tensor, end: Tensor, zero: Tensor, num_tokens: int, sizes: Slots, *, ordered: bool) -> Step:
    """Locate ``num_tokens`` new tokens a row.

    Args:
        before: int32 ``(B, 1)``, the lengths of the rows.
        end: int32 ``(B, 1)``, the lengths with the new tokens that are no padding.
        zero: int32 ``(B, 1)``, zeros; where they lie in memory already, no step need write them there.
        num_tokens: ``T``.
        sizes: of the buffers.
        ordered: whether somebody will ask where the keys of the window stand.
    """
    config, lookback = sizes.config, sizes.lookback
    stride = config.compress_stride
    after = end.clamp_max(sizes.max_seq_len)
    position = before + torch.arange(num_tokens, dtype=torch.int32, device=before.device)
    new = position < after
    block = count_compressed(before, config)
    if num_tokens > stride:
        block = block + torch.arange(-(-num_tokens // stride), dtype=torch.int32, device=before.device)
    complete = block < count_compressed(after, config)

    # Padding stands where the last token does, so that positions never decrease nor run out of the buffers.
    token = torch.minimum(position, after - 1)
    zero = zero.expand_as(token)
    # One token overwrites the one that leaves the window. The buffer then is the window, in an order that attention
    # does not see, and need not be copied.
    in_place = num_tokens == 1 and sizes.max_rewind == 1 and not ordered
    if in_place:
        window_positions = Positions(token.clamp_max(lookback["win"]), zero, zero)
    else:
        first = lookback["win"] - before  # of the row's tokens, among the window's
        window_positions = Positions(token + first, first.expand_as(token), zero)
    return Step(
        before=before,
        after=after,
        positions=Positions(token, zero, zero),
        window_positions=window_positions,
        window_in_place=in_place,
        block=block,
        first_tokens=(block * stride - before + lookback["tail"]).clamp_max(num_tokens - 1),
        slots={
            "slc": torch.where(new, position, sizes.size("slc")).long(),
            "cmp": torch.where(complete, block, sizes.size("cmp")).long(),
            **{kind: ring_slots(position, new, after, sizes.size(kind)) for kind in lookback},
        },
        lost=(position >= after) & (position < end),
        emits=torch.compiler.is_compiling() or before.device.type != "cpu" or bool(complete.any()),
    )


def ring_slots_before(step: Step, lookback: int, size: int) -> Tensor:
    """Find the last ``lookback`` tokens before a step in a ring buffer of ``size`` slots, int64 ``(B, lookback)``."""
    back = torch.arange(-lookback, 0, dtype=torch.int32, device=step.before.device)
    return (step.before + back).remainder(size).long()


def ring_slots(position: Tensor, new: Tensor, after: Tensor, size: int) -> Tensor:
    """Give the slots of new tokens; of more than a ring buffer holds, the last ones get one."""
    if position.shape[1] > size:
        new = new & (position >= after - size)
    return torch.where(new, position % size, size).long()


def count_compressed(lengths: Tensor, config: NSAConfig) -> Tensor:
    """As :func:`flexnsa.geometry.num_compressed`, of a tensor of lengths."""
    return (lengths + (config.compress_stride - config.compress_block_size)).clamp_min(0) // config.compress_stride
