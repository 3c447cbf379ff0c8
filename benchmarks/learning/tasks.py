"""Recall: pairs of a key and a value, scattered over filler; a key that comes again asks for its value.

A row consists of slots of two tokens. A pair is written twice, at random slots: the first time it is to be kept in
mind, the second time its value is to be predicted from its key. That cannot be learned by heart, because which value
goes with which key is drawn again for every row. All other slots are filler.

At each value the key right before it is asked for as well, which takes no memory and counts for nothing. It is there to
be learned from: recall takes two layers, one that notes at a value which key precedes it and one that looks for the
key, and neither has a reason to begin before the other has.

Rows are drawn on the device, and follow from the state of a random generator alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.packing import IGNORED

SLOT = 2
"""Tokens of a slot: a key and its value, or two of filler."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens, numbered from 0: so many keys, then values, then filler."""

    keys: int
    values: int
    fillers: int

    @property
    def size(self) -> int:
        """Count all tokens."""
        return self.keys + self.values + self.fillers

    def kinds(self) -> list[slice]:
        """Return the numbers of keys, of values and of filler."""
        ends = self.keys, self.keys + self.values, self.size
        return [slice(first, last) for first, last in zip((0, *ends), ends, strict=False)]


class Rows(NamedTuple):
    """Tokens ``(B, S)``; what to predict at each, or IGNORED; and at each key that comes again how far back it is."""

    tokens: Tensor
    targets: Tensor
    distances: Tensor


def training_rows(vocabulary: Vocabulary, batch: int, seq_len: int, pairs: int, generator: torch.Generator) -> Rows:
    """Draw rows of 1 to ``pairs`` pairs, the numbers of a batch evenly spread on a scale of octaves."""
    counts = torch.logspace(0, 1, batch, base=pairs, device=generator.device).round()
    slots = _random_slots(batch, seq_len // SLOT, generator)[:, : 2 * pairs].unflatten(1, (pairs, 2)).sort(2).values
    written = torch.arange(pairs, device=generator.device) < counts[:, None]
    return _write(vocabulary, seq_len, slots, written, generator)


def depth_rows(vocabulary: Vocabulary, seq_len: int, depths: Tensor, pairs: int, generator: torch.Generator) -> Rows:
    """Draw rows that ask at their end for pairs written at given depths.

    Args:
        vocabulary: tokens.
        seq_len: ``S``, even.
        depths: of the pairs that are asked for, ``(B, Q)`` from 0 (the first slot) to 1 (the last before the
            questions), no two of a row in one slot; the ``Q`` questions stand at the end in this order.
        pairs: others, each written twice anywhere before the questions. 0: needles in filler.
        generator: of random numbers; its device is that of the rows.
    """
    batch, asked = depths.shape
    before = seq_len // SLOT - asked
    written_at = (depths * (before - 1)).round().long()
    taken = torch.zeros(batch, before, device=depths.device).scatter_(1, written_at, 2.0)
    free = (torch.rand(batch, before, device=depths.device, generator=generator) + taken).argsort(1)
    distractors = free[:, : 2 * pairs].unflatten(1, (pairs, 2)).sort(2).values
    questions = torch.arange(before, before + asked, device=depths.device).expand(batch, -1)
    slots = torch.cat([torch.stack([written_at, questions], 2), distractors], 1)
    return _write(vocabulary, seq_len, slots, torch.ones_like(slots[..., 0], dtype=torch.bool), generator)


def _random_slots(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """Shuffle the slots of each row."""
    return torch.rand(batch, count, device=generator.device, generator=generator).argsort(1)


def _write(vocabulary: Vocabulary, seq_len: int, slots: Tensor, written: Tensor, generator: torch.Generator) -> Rows:
    """Write pairs at ``slots (B, P, 2)``, where they are ``written (B, P)``, over filler."""
    device, (batch, pairs, _) = generator.device, slots.shape
    keys = _random_slots(batch, vocabulary.keys, generator)[:, :pairs]
    values = vocabulary.keys + torch.randint(vocabulary.values, (batch, pairs), device=device, generator=generator)
    # What is not written goes behind the row's end, and is cut off.
    key_at = torch.where(written[..., None], slots * SLOT, seq_len)
    filler = vocabulary.keys + vocabulary.values
    shape = batch, seq_len + SLOT
    tokens = torch.randint(filler, vocabulary.size, shape, device=device, generator=generator)
    for times in range(2):
        tokens.scatter_(1, key_at[..., times], keys).scatter_(1, key_at[..., times] + 1, values)
    targets = torch.full(shape, IGNORED, device=device).scatter_(1, key_at[..., 1], values)
    targets.scatter_(1, key_at.flatten(1) + 1, keys[..., None].expand_as(key_at).flatten(1))
    distances = torch.zeros(shape, dtype=torch.long, device=device)
    distances.scatter_(1, key_at[..., 1], key_at[..., 1] - key_at[..., 0])
    return Rows(*(x[:, :seq_len] for x in (tokens, targets, distances)))
