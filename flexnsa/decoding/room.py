"""What the host knows of the lengths of a cache's rows, without asking the device: whether there is room."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.validation import LARGEST_SIZE


class Room:
    """Room of rows of up to ``max_seq_len`` tokens.

    Args:
        max_seq_len: tokens that a row can hold.
    """

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.longest: int | None = 0
        """No row is longer, as far as is known; None: not known."""

    @property
    def is_empty(self) -> bool:
        """Whether no row holds a token, as far as is known; of what is compiled or captured nothing is."""
        return is_run_once() and self.longest == 0

    def take(self, num_tokens: int, lengths: Tensor | None, before: Tensor) -> None:
        """Demand room for ``num_tokens`` new tokens a row, of which the first ``lengths (B,)`` are real.

        Looks at the device only when the longest row may reach the end.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``; None for ``T``.
            before: int ``(B,)``, the lengths of the rows without them.

        Raises:
            ValueError: ``lengths`` is out of range, or there is no room. What is compiled or captured cannot raise.
        """
        if not is_run_once():
            self.longest = None  # what is compiled or captured runs more often than this line
            return
        if lengths is not None:
            fits = ((lengths >= 0) & (lengths <= num_tokens)).all()
            if lengths.is_cuda:
                torch.ops.aten._assert_async.msg(fits, f"lengths: expected 0 .. {num_tokens}, the tokens of x")
            elif not fits:
                raise ValueError(f"lengths: expected 0 .. {num_tokens}, the tokens of x, got {lengths.tolist()}")
        if self.longest is not None and self.longest + num_tokens <= self.max_seq_len:
            self.longest += num_tokens
            return
        end = before + (num_tokens if lengths is None else lengths)
        longest = int(end.max())
        if longest > self.max_seq_len:
            row = int(end.argmax())
            raise ValueError(
                f"x: expected at most {self.max_seq_len - int(before[row])} tokens, for which the cache of "
                f"{self.max_seq_len} has room in row {row}, got {longest - int(before[row])}"
            )
        self.longest = longest

    def take_documents(self, lengths: Tensor, count: Tensor, num_tokens: int) -> None:
        """Demand that as many documents as there are rows, all empty, fit these; never waits for the device.

        Args:
            lengths: int ``(B,)``, of the documents.
            count: int ``()``, how many there are.
            num_tokens: of all documents.

        Raises:
            ValueError: there is another number, or one is too long. On CUDA the device finds out, and stops.
        """
        expected = f"document_ids: expected {len(lengths)} documents, one for each row of the cache"
        if not lengths.is_cuda:
            if int(count) != len(lengths):
                raise ValueError(f"{expected}, got {int(count)}")
            self.take(int(lengths.max()), lengths, torch.zeros_like(lengths))
            return
        torch.ops.aten._assert_async.msg(count == len(lengths), expected)
        fits = (lengths <= self.max_seq_len).all()
        torch.ops.aten._assert_async.msg(fits, f"x: expected documents of at most {self.max_seq_len} tokens")
        self.longest = min(num_tokens, self.max_seq_len)

    def include(self, other: Room) -> None:
        """Count in rows of another cache."""
        known = self.longest is not None and other.longest is not None
        self.longest = max(self.longest, other.longest) if known else None  # pyright: ignore[reportArgumentType]


def doubled(capacity: int, needed: int) -> int:
    """Double a capacity until it suffices, or as far as positions can count."""
    while capacity < needed:
        capacity = min(2 * capacity, LARGEST_SIZE)
    return capacity


def is_run_once() -> bool:
    """Tell whether this runs now and once: neither is it compiled, nor captured in a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
