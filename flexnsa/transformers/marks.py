"""The mask that models pass to flexnsa: which slots of the keys hold tokens, and which of these tokens are new.

transformers creates one mask per forward pass, by a function registered with the attention, and passes it to every
layer. Ours is a tensor of *marks*, int8 ``(B, 1, 1, S)``: for each key :data:`REAL` if it is not padding, and
:data:`NEW` if its token is also a query. The mask is None where no key is padding and the queries are the last keys.
Where transformers finds packed documents, which it does only without padding and a cache, the mask is their ids, int32
``(B, 1, S, 1)``.

Models also create masks for types of layers that they do not have. A mask that NSA does not support therefore raises
only where it is used: it is empty, ``(B, 1, 0, S)``, and its dtype encodes the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from flexnsa.checks.primitives import describe, may_look
from flexnsa.transformers.mask_functions import MaskFunction, read_documents

REAL, NEW = 1, 2
REFUSED = {
    torch.bool: "is_causal: expected True where attention is NSA, got a bidirectional mask",
    torch.int8: "sliding_window: expected None where attention is NSA, got the mask of a sliding window",
    torch.int16: "attention_chunk_size: expected None where attention is NSA, got the mask of chunked attention",
    torch.uint8: "past_key_values: expected a cache that keeps every token, got one that dropped tokens",
}
NOT_CAUSAL, SLIDING, CHUNKED, DROPPED = REFUSED


def mark_slots(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    mask_function: MaskFunction = causal_mask_function,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | str | None = None,
    **_: object,
) -> Tensor | None:
    """Return marks or document ids; transformers calls this once per forward pass.

    Like transformers' own functions it reads ``attention_mask``, which synchronises on a GPU, except in
    ``torch.compile``.

    Args:
        batch_size: ``B``.
        q_length: ``T``.
        kv_length: ``S``.
        q_offset: slot of the first query.
        kv_offset: slot of the first key; above 0 only with a cache that drops old tokens.
        attention_mask: bool ``(B, S)``, False for padding; slots after the new tokens may be missing.
        mask_function: as composed by transformers, without padding.
        use_vmap: whether the model adds a mask of its own.
        local_size: of sliding windows or chunks.
        config: of the model.
        device: of the keys.

    Raises:
        ValueError: the mask is not as long as the tokens so far, or has padding between tokens.
    """
    refused = _refused_kind(mask_function, local_size, config)
    if kv_offset and refused is None:
        refused = DROPPED
    if refused is not None:  # by the layer that would use the mask: not every model has one
        return torch.empty(batch_size, 1, 0, kv_length, dtype=refused, device=device)
    documents = read_documents(mask_function, batch_size, kv_length, device, has_additions=use_vmap)
    if documents is not None:
        if attention_mask is not None or q_length != kv_length:
            raise ValueError("attention_mask: expected packed documents without padding or a cache, got them with one")
        return documents[:, None, :, None]
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


def _refused_kind(mask_function: MaskFunction, local_size: int | None, config: Any) -> torch.dtype | None:
    """Return the dtype that encodes an unsupported mask; None for a supported one."""
    if mask_function is bidirectional_mask_function:
        return NOT_CAUSAL
    if local_size is None:
        return None
    return CHUNKED if local_size == getattr(config, "attention_chunk_size", None) else SLIDING


def read_mask(mask: Any, batch_size: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask of :func:`mark_slots` into marks and document ids ``(B, S)``; at least one is None.

    Raises:
        ValueError: the mask comes from elsewhere, or NSA does not support it.
    """
    if mask is None:
        return None, None
    form = (mask.dtype, tuple(mask.shape)) if isinstance(mask, Tensor) else None
    if form == (torch.int8, (batch_size, 1, 1, num_keys)):
        return mask, None
    if form == (torch.int32, (batch_size, 1, num_keys, 1)):
        return None, mask[:, 0, :, 0]
    if form is not None and form[1] == (batch_size, 1, 0, num_keys) and form[0] in REFUSED:
        raise ValueError(REFUSED[form[0]])
    raise ValueError(
        f"attention_mask: expected (B, S) given to the model, 0 or False for padding, got {describe(mask)}"
    )


def count_real(attention_mask: Any, batch_size: int) -> Tensor | None:
    """Count the tokens of each row of a mask ``(B, S)``, int64 ``(B,)``; None of anything else."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
        return None
    return attention_mask.to(torch.bool).sum(1)


def check_past(marks: Tensor | None, lengths: Tensor) -> None:
    """Check on a CPU that marks have as many past tokens in each sequence as a cache, ``lengths (B,)``.

    Raises:
        ValueError: they have more or fewer.
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
    """The shifts that move each sequence's first token to slot 0, and padding after the tokens.

    Args:
        start: int64 ``(B, 1)``, slot of the first token of each sequence.
        past: int64 ``(B, 1)``, slot of the first query.
        real: int32 ``(B,)``, number of queries that are not padding.
        num_queries: ``T``.
    """

    start: Tensor
    past: Tensor
    real: Tensor
    num_queries: int

    @classmethod
    def of(cls, marks: Tensor, num_queries: int) -> Alignment:
        """Compute the alignment from marks."""
        marks = marks[:, 0, 0]
        is_real, is_new = (marks & REAL) != 0, (marks & NEW) != 0
        start, past = (x.to(torch.int8).argmax(1, keepdim=True) for x in (is_real, is_new))
        return cls(start, past, (is_real & is_new).sum(1, dtype=torch.int32), num_queries)

    @property
    def token(self) -> Tensor:
        """Positions of the aligned queries, int32 ``(B, T)``."""
        query = torch.arange(self.num_queries, device=self.start.device)
        return ((self.past - self.start).clamp_min(0) + query).to(torch.int32)

    def align_keys(self, x: Tensor) -> Tensor:
        """Move the tokens of ``x (B, H, S, D)`` to the front."""
        return roll_rows(x, self.start, dim=2)

    def align_queries(self, x: Tensor, *, dim: int) -> Tensor:
        """Move the tokens of ``x (B, ...)`` to the front of dimension ``dim``, and padding after them."""
        return roll_rows(x, self._padding, dim=dim)

    def restore_queries(self, x: Tensor, *, dim: int) -> Tensor:
        """Undo :meth:`align_queries`."""
        return roll_rows(x, -self._padding, dim=dim)

    @property
    def _padding(self) -> Tensor:
        """Number of padding queries before the first token, ``(B, 1)``."""
        return (self.start - self.past).clamp(0, self.num_queries)


def roll_rows(x: Tensor, shift: Tensor, *, dim: int) -> Tensor:
    """Roll each batch element of ``x (B, ...)`` towards the front of ``dim`` by its own ``shift (B, 1)``."""
    size = x.shape[dim]
    index = (torch.arange(size, device=x.device) + shift) % size
    shape = [size if d == dim else x.shape[0] if d == 0 else 1 for d in range(x.dim())]
    return x.gather(dim, index.expand(x.shape[0], -1).reshape(shape).expand_as(x))


def _check_runs(real: Tensor) -> None:
    """Check, outside ``torch.compile``, that a sequence has padding only before or after its tokens."""
    if torch.compiler.is_compiling():
        return
    starts = real & ~F.pad(real[:, :-1], (1, 0))
    row = (starts.sum(1) > 1).nonzero()
    if len(row):
        raise ValueError(
            "attention_mask: expected one run of tokens a row, padding before or after it, "
            f"got holes in row {int(row[0])}"
        )
