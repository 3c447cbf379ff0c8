"""Which slots of the keys hold tokens, and which of these are new: the mask that models hand to flexnsa.

transformers makes one mask a forward pass, by a function registered beside the attention, and hands it to every layer.
Ours is a tensor of *marks*, int8 ``(B, 1, 1, S)``: for each key :data:`REAL`, if it is a token and no padding, and
:data:`NEW`, if its token is a query too. It is None where no key is padding and the queries are the last keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.validation import describe, may_look

REAL, NEW = 1, 2


def mark_slots(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **_: object,
) -> Tensor | None:
    """Make the marks; what transformers calls, once a forward pass.

    Like transformers' own functions it looks at ``attention_mask``, which on a GPU waits for the device, except inside
    of a compiler.

    Args:
        batch_size: ``B``.
        q_length: ``T``.
        kv_length: ``S``.
        q_offset: slot of the first query.
        kv_offset: of the first key; only a cache that forgets has one.
        attention_mask: bool ``(B, S)``, False for padding, or without the slots of the future.
        use_vmap: whether the model adds a mask of its own.
        device: of the keys.

    Raises:
        ValueError: the model wants another mask than a causal one; or the mask is not as long as the tokens so far, or
            has padding between them.
    """
    if use_vmap or kv_offset:
        raise ValueError("attention_mask: expected a causal mask and padding, got a mask function of the model's own")
    if attention_mask is not None and isinstance(q_offset, int):
        seen, width = q_offset + q_length, attention_mask.shape[1]
        if width not in (seen, kv_length):
            raise ValueError(f"attention_mask: expected (B, {seen}), all tokens so far, got {describe(attention_mask)}")
    is_last = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if is_last and (attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))):
        return None
    slot = torch.arange(kv_length, device=device)
    seen = slot < q_offset + q_length
    new = (seen & (slot >= q_offset)).to(torch.int8) * NEW
    real = seen.expand(batch_size, -1)
    if attention_mask is not None:
        real = F.pad(attention_mask.to(torch.bool), (0, kv_length - attention_mask.shape[1]))
        _check_runs(real)
    return (real.to(torch.int8) * REAL + new)[:, None, None]


def check_marks(marks: Any, batch_size: int, num_keys: int) -> None:
    """Demand what :func:`mark_slots` made.

    Raises:
        ValueError: it is another mask.
    """
    is_ours = isinstance(marks, Tensor) and marks.dtype == torch.int8 and marks.shape == (batch_size, 1, 1, num_keys)
    if marks is not None and not is_ours:
        raise ValueError(
            f"attention_mask: expected (B, S) given to the model, 0 or False for padding, got {describe(marks)}"
        )


def check_past(marks: Tensor | None, lengths: Tensor) -> None:
    """Demand that marks tell of the tokens ``lengths (B,)`` that a cache has of each row, where looking is free.

    Raises:
        ValueError: they tell of more or fewer.
    """
    if marks is None or not may_look(marks):
        return
    marks = marks[:, 0, 0]
    before = (((marks & REAL) != 0) & ((marks & NEW) == 0)).sum(1)
    row = (before != lengths).nonzero()
    if len(row):
        b = int(row[0])
        raise ValueError(
            f"attention_mask: expected {int(lengths[b])} tokens before the new ones in row {b}, as the cache has them, "
            f"got {int(before[b])}"
        )


@dataclass(frozen=True, slots=True)
class Alignment:
    """How to lay each row's tokens so that the first stands in slot 0, and padding behind them.

    Args:
        start: int64 ``(B, 1)``, where the first token of a row stands among the keys.
        past: int64 ``(B, 1)``, where the first query stands.
        real: int32 ``(B,)``, how many of the queries are no padding.
        num_queries: ``T``.
    """

    start: Tensor
    past: Tensor
    real: Tensor
    num_queries: int

    @classmethod
    def of(cls, marks: Tensor, num_queries: int) -> Alignment:
        """Read the marks."""
        marks = marks[:, 0, 0]
        is_real, is_new = (marks & REAL) != 0, (marks & NEW) != 0
        start, past = (x.to(torch.int8).argmax(1, keepdim=True) for x in (is_real, is_new))
        return cls(start, past, (is_real & is_new).sum(1, dtype=torch.int32), num_queries)

    @property
    def token(self) -> Tensor:
        """Where the queries stand once they are aligned, int32 ``(B, T)``."""
        query = torch.arange(self.num_queries, device=self.start.device)
        return ((self.past - self.start).clamp_min(0) + query).to(torch.int32)

    def align_keys(self, x: Tensor) -> Tensor:
        """Move the tokens of ``x (B, H, S, D)`` to the front."""
        return roll_rows(x, self.start, dim=2)

    def align_queries(self, x: Tensor, *, dim: int) -> Tensor:
        """Move the tokens of ``x (B, ...)`` to the front of its dimension of queries, and padding behind them."""
        return roll_rows(x, self._padding, dim=dim)

    def restore_queries(self, x: Tensor, *, dim: int) -> Tensor:
        """Undo :meth:`align_queries`."""
        return roll_rows(x, -self._padding, dim=dim)

    @property
    def _padding(self) -> Tensor:
        """Queries in front of the first token, ``(B, 1)``."""
        return (self.start - self.past).clamp(0, self.num_queries)


def roll_rows(x: Tensor, shift: Tensor, *, dim: int) -> Tensor:
    """Move each row of ``x (B, ...)`` to the front by its own ``shift (B, 1)``; what leaves there comes in behind."""
    size = x.shape[dim]
    index = (torch.arange(size, device=x.device) + shift) % size
    shape = [size if d == dim else len(x) if d == 0 else 1 for d in range(x.dim())]
    return x.gather(dim, index.expand(len(x), -1).reshape(shape).expand_as(x))


def _check_runs(real: Tensor) -> None:
    """Demand that padding lies before or behind the tokens of a row, except inside of a compiler."""
    if torch.compiler.is_compiling():
        return
    begins = real & ~F.pad(real[:, :-1], (1, 0))
    row = (begins.sum(1) > 1).nonzero()
    if len(row):
        raise ValueError(
            "attention_mask: expected one run of tokens a row, padding before or behind it, "
            f"got holes in row {int(row[0])}"
        )
