"""What the host checks of a cache without waiting for the device: capacity, lengths and indices of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexnsa.primitives import LARGEST_SIZE, check_int, check_integers, may_look

Rows = int | Sequence[int] | Tensor
"""The index of a sequence, several, or an int tensor ``(K,)`` of them on the device of the cache."""


class HostLengthBound:
    """An upper bound of the lengths of all sequences, by which the host checks capacity without asking the device.

    Args:
        max_seq_len: tokens that a sequence can hold.
    """

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.longest: int | None = 0
        """No sequence is longer; None where the host does not know."""

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that no sequence holds a token; compiled and captured code does not know."""
        return is_run_once() and self.longest == 0

    def longest_after(self, num_tokens: int, lengths: Tensor | None, before: Tensor) -> int | None:
        """Check that each sequence has capacity for ``num_tokens`` tokens, of which ``lengths (B,)`` are real.

        Reads the device only when the longest sequence may reach the end. Changes nothing.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``; None for ``T``.
            before: int ``(B,)``, the lengths of the sequences without them.

        Returns:
            What :attr:`longest` becomes once the tokens are in the cache.

        Raises:
            ValueError: ``lengths`` is out of range, or there is no capacity. Compiled and captured code cannot raise.
        """
        if not is_run_once():
            return None  # compiled and captured code runs more often than this line
        if lengths is not None:
            fits = ((lengths >= 0) & (lengths <= num_tokens)).all()
            if lengths.is_cuda:
                torch.ops.aten._assert_async.msg(fits, f"lengths: expected 0 .. {num_tokens}, the tokens of x")
            elif not fits:
                raise ValueError(f"lengths: expected 0 .. {num_tokens}, the tokens of x, got {lengths.tolist()}")
        if self.longest is not None and self.longest + num_tokens <= self.max_seq_len:
            return self.longest + num_tokens
        end = before + (num_tokens if lengths is None else lengths)
        longest = int(end.max())
        if longest > self.max_seq_len:
            row = int(end.argmax())
            raise ValueError(
                f"x: expected at most {self.max_seq_len - int(before[row])} tokens, for which the cache of "
                f"{self.max_seq_len} has room in row {row}, got {longest - int(before[row])}"
            )
        return longest

    def longest_document(self, lengths: Tensor, count: Tensor, num_tokens: int) -> int | None:
        """Check that there are as many documents as sequences, all of which are empty, and that each fits its own.

        Args:
            lengths: int ``(B,)``, of the documents.
            count: int ``()``, the number of documents.
            num_tokens: of all documents.

        Returns:
            As :meth:`longest_after`.

        Raises:
            ValueError: there is another number, or one is too long. CUDA stops by an assertion of the device instead.
        """
        expected = f"document_ids: expected {len(lengths)} documents, one for each row of the cache"
        if not lengths.is_cuda:
            if int(count) != len(lengths):
                missing = f", and none for row {int(count)}" if count < len(lengths) else ""
                raise ValueError(f"{expected}, got {int(count)}{missing}")
            return self.longest_after(int(lengths.max()), lengths, torch.zeros_like(lengths))
        torch.ops.aten._assert_async.msg(count == len(lengths), expected)
        fits = (lengths <= self.max_seq_len).all()
        torch.ops.aten._assert_async.msg(fits, f"x: expected documents of at most {self.max_seq_len} tokens")
        return min(num_tokens, self.max_seq_len)

    def include(self, other: HostLengthBound) -> None:
        """Raise the bound to that of another cache, whose sequences are copied into this one."""
        known = self.longest is not None and other.longest is not None
        self.longest = max(self.longest, other.longest) if known else None  # pyright: ignore[reportArgumentType]


def doubled(capacity: int, needed: int) -> int:
    """Double a capacity until it suffices, or up to the largest position."""
    while capacity < needed:
        capacity = min(2 * capacity, LARGEST_SIZE)
    return capacity


def is_run_once() -> bool:
    """Return whether this call runs now and once: neither compiled, nor captured in a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def row_index(name: str, rows: Any, existing: Tensor, *, distinct: bool = False) -> Tensor:
    """Return indices of sequences as int64 ``(K,)``, without waiting for the device.

    Args:
        name: of the argument.
        rows: its value.
        existing: int64 ``(B,)``, the indices of all sequences.
        distinct: whether each may appear only once.

    Raises:
        TypeError: neither an index, nor several, nor a tensor.
        ValueError: an index is out of range or appears again; the values of a tensor are checked on CPU only.
    """
    if isinstance(rows, Tensor):
        check_integers(name, rows, ("K",), like=existing, as_of="the cache")
        numbers: Sequence[int] = rows.tolist() if may_look(rows) else ()
    else:
        several = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
        numbers = cast("Sequence[int]", rows if several else (rows,))
        for row in numbers:
            check_int(name, row, -LARGEST_SIZE)
    if not all(0 <= row < len(existing) for row in numbers):
        raise ValueError(f"{name}: expected 0 .. {len(existing) - 1}, got {list(numbers)}")
    if distinct and len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}: expected each row once, got {list(numbers)}")
    if isinstance(rows, Tensor):
        return rows.to(torch.int64)
    # Slices of a tensor on the device: copying indices from the host would wait for it.
    return torch.cat([existing[:0], *(existing[row : row + 1] for row in numbers)])
