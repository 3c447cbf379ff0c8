"""Rows of keys and values that come, grow and go: what caches of any attention have in common.

A row is one sequence of the batch; rows may have different lengths. Each buffer has one slot more than it holds tokens,
at its end, which takes what must not be kept: padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flexnsa.attention.decoding import MOST_TOKENS
from flexnsa.decoding.room import Room, doubled
from flexnsa.decoding.row_index import Rows, row_index
from flexnsa.validation import (
    check_device,
    check_dtype,
    check_integers,
    check_positive_int,
    check_tensor,
    check_type,
)


class RowCache:
    """Buffers of keys and values for ``B`` rows; a subclass says how many slots each has.

    Args:
        batch_size: rows ``B``.
        max_seq_len: tokens that a row can hold.
        num_kv_heads: ``Hkv``.
        dims: by name of a buffer, ``Dk`` or ``Dv``.
        dtype: of the keys and values.
        device: of everything.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("num_kv_heads", "head_dim", "v_head_dim", "dtype", "device")
    """What rows must have in common to go from one cache to another."""

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        dims: Mapping[str, int],
        *,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        check_dtype("dtype", dtype)
        check_device("device", device)
        self.batch_size, self.num_kv_heads = batch_size, num_kv_heads
        self.room = Room(max_seq_len)
        self.buffers = {
            name: torch.zeros(
                batch_size, num_kv_heads, self.num_slots(name, max_seq_len) + 1, dim, dtype=dtype, device=device
            )
            for name, dim in dims.items()
        }
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch_size, device=device)
        """Their numbers."""
        fix_addresses(*self.buffers.values(), self.lengths, self.rows)

    def num_slots(self, name: str, max_seq_len: int) -> int:
        """Count the slots of a buffer without the spare one; here one for each token."""
        del name
        return max_seq_len

    @property
    def max_seq_len(self) -> int:
        """Tokens that a row can hold."""
        return self.room.max_seq_len

    @property
    def is_empty(self) -> bool:
        """Whether all rows are known to be empty without asking the device: no token has come since they were.

        What a CUDA graph that was captured by hand adds when it is replayed, nobody knows but the device.
        """
        return self.room.is_empty

    def takes_rows(self, num_tokens: int) -> bool:
        """Tell whether so many tokens are best computed as whole rows: the first, and more than a step has.

        Fewer are a step even then, so that one into a new cache prepares all that a captured step will run.
        """
        return num_tokens > MOST_TOKENS and self.is_empty

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return next(iter(self.buffers.values())).dtype

    @property
    def device(self) -> torch.device:
        """Of everything."""
        return self.lengths.device

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values, spare slots included."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def make_room(self, num_tokens: int, lengths: Tensor | None = None) -> None:
        """Demand room for ``num_tokens`` new tokens a row, of which the first ``lengths (B,)`` are real, or all are.

        Raises:
            TypeError: ``num_tokens`` is no int, or ``lengths`` no tensor.
            ValueError: there is no token or no room, or ``lengths`` does not fit. What is compiled or captured cannot
                raise.
        """
        if not isinstance(num_tokens, torch.SymInt):
            check_positive_int("num_tokens", num_tokens)
        if lengths is not None:
            check_integers("lengths", lengths, (self.batch_size,), like=self.lengths, as_of="the cache")
        self.room.take(num_tokens, lengths, self.lengths)

    def demand_empty(self) -> None:
        """Have the device stop if a graph has added tokens that the host does not know of."""
        if self.lengths.is_cuda:
            message = "cache: expected no tokens since reset(), got some by the replay of a graph"
            torch.ops.aten._assert_async.msg((self.lengths == 0).all(), message)

    def reset(self, rows: Rows | None = None) -> None:
        """Forget some rows, by default all; new sequences can then begin there. Nothing waits for the device.

        Args:
            rows: a row, several, an int tensor ``(K,)`` or a bool mask ``(B,)``.

        Raises:
            TypeError: something else.
            ValueError: a tensor of another shape, dtype or device, or a row that there is not (in a tensor, this is
                seen on a CPU).
        """
        # Zeros, because what no query sees must be finite all the same: NaN times a probability of 0 is NaN.
        tensors = (*self.buffers.values(), *self.counts().values())
        if rows is None:
            for tensor in tensors:
                tensor.zero_()
            self.room.longest = 0
        elif isinstance(rows, Tensor) and rows.dtype == torch.bool:
            check_tensor("rows", rows, (self.batch_size,), like=self.lengths, as_of="the cache", dtype=torch.bool)
            for tensor in tensors:
                tensor.masked_fill_(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
        else:
            index = row_index("rows", rows, self.rows)
            for tensor in tensors:
                tensor.index_fill_(0, index, 0)

    def insert(self, rows: Rows, other: Self, other_rows: Rows | None = None) -> None:
        """Replace rows by rows of another cache, for all that a later step can tell; nothing waits for the device.

        So a prompt can be taken in on its own while the rows go on, and a prefix computed once start many rows:
        ``cache.insert([0, 3], prefix, 0)``. No memory moves: a captured step goes on with the new rows.

        Args:
            rows: the rows to replace, ``K`` different ones.
            other: of the same sizes, but for its rows and for ``max_seq_len``, which may be less.
            other_rows: the rows to copy, ``K`` or one for all; by default all that ``other`` has.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit; the message names it. The cache is then as it was.
        """
        self._check_other(other)
        targets = row_index("rows", rows, self.rows, distinct=True)
        sources = row_index("other_rows", range(other.batch_size) if other_rows is None else other_rows, other.rows)
        if len(sources) not in (1, len(targets)):
            raise ValueError(f"other_rows: expected one row or {len(targets)}, as many as rows, got {len(sources)}")

        def copy(to: Tensor, of: Tensor) -> None:
            taken = of.index_select(0, sources)
            to.index_copy_(0, targets, taken.expand(len(targets), *taken.shape[1:]))

        for name, buffer in self.buffers.items():
            filled = other.num_slots(name, other.max_seq_len)
            copy(buffer[:, :, :filled], other.buffers[name][:, :, :filled])
            buffer[:, :, filled:].index_fill_(0, targets, 0)
        for name, count in self.counts().items():
            copy(count, other.counts()[name])
        self.room.include(other.room)

    def reorder(self, rows: Tensor) -> None:
        """Replace row ``b`` by what row ``rows[b]`` was, as beam search does; ``rows`` int ``(B,)``.

        Raises:
            TypeError: not a tensor.
            ValueError: of another shape, dtype or device; or, on a CPU, a row that there is not.
        """
        check_integers("rows", rows, (self.batch_size,), like=self.lengths, as_of="the cache")
        index = row_index("rows", rows, self.rows)
        for tensor in self.state().values():
            tensor.copy_(tensor.index_select(0, index))

    def grow(self, max_seq_len: int) -> None:
        """Make room for rows of at least so many tokens, by doubling; rows keep what they hold.

        Buffers that grow move in memory, so that a captured step must be captured anew, and a compiled one compiles
        once more. Each is for a moment there twice.

        Raises:
            TypeError: no int.
            ValueError: out of range.
        """
        check_positive_int("max_seq_len", max_seq_len)
        capacity = doubled(self.max_seq_len, max_seq_len)
        for name, buffer in self.buffers.items():
            before, after = (self.num_slots(name, size) for size in (self.max_seq_len, capacity))
            if after > before:
                # A tensor made in inference mode could be written to in no other, which the cache could be so far.
                with torch.inference_mode(buffer.is_inference()):
                    grown = buffer.new_zeros(*buffer.shape[:2], after + 1, buffer.shape[3])
                    grown[:, :, :before] = buffer[:, :, :before]
                fix_addresses(grown)
                self.buffers[name] = grown
        self.room.max_seq_len = capacity

    def state_dict(self) -> dict[str, Tensor]:
        """Copy all that distinguishes this cache from a fresh one of the same sizes."""
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Return to a state that :meth:`state_dict` gave, be it of another cache of the same sizes.

        Raises:
            TypeError: something that should be a tensor is not.
            ValueError: the sizes differ; the cache is then as it was.
        """
        own = self.state()
        check_type("state", state, dict)
        if state.keys() != own.keys():
            raise ValueError(f"state: expected {', '.join(sorted(own))}, got {', '.join(sorted(map(str, state)))}")
        for name, tensor in own.items():
            check_tensor(f"state[{name!r}]", state[name], tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.room.longest = None

    def counts(self) -> dict[str, Tensor]:
        """Give what is counted of each row, int32 ``(B,)``, by name."""
        return {"lengths": self.lengths}

    def state(self) -> dict[str, Tensor]:
        """Give what :meth:`state_dict` copies."""
        return {**self.buffers, **self.counts()}

    def _check_other(self, other: Any) -> None:
        check_type("other", other, type(self))
        for name in self.SHARED:
            expected, came = getattr(self, name), getattr(other, name)
            if came != expected:
                raise ValueError(f"other: expected {name}={expected}, as this cache has it, got {came}")
        if other.max_seq_len > self.max_seq_len:
            raise ValueError(f"other: expected max_seq_len of at most {self.max_seq_len}, got {other.max_seq_len}")


def fix_addresses(*tensors: Tensor) -> None:
    """Tell ``torch.compile`` that the memory stays where it is: else no CUDA graph may write to an input."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
