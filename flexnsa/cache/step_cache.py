"""A cache that takes steps: it locates new tokens, stores their keys and values, and counts them.

Prompts that are packed in one sequence are unpacked into an empty cache: document ``b`` becomes sequence ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexnsa.cache.rows import RowCache
from flexnsa.cache.steps import TAILS, NewBlocks, Step, count_compressed
from flexnsa.config import kind_of
from flexnsa.masks.positions import Positions
from flexnsa.primitives import check_type, describe, may_look


class StepCache(RowCache):
    """Sequences of tokens, each of which has a slot in every buffer: what a layer needs of a cache."""

    def begin(self, num_tokens: int, lengths: Tensor | None = None, *, ordered: bool = False) -> Step:
        """Locate ``num_tokens`` new tokens of each sequence, of which the first ``lengths (B,)`` are not padding.

        Until :meth:`end`, the cache stays what it was to later steps.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``, by default ``T``.
            ordered: whether a mod reads the positions of the window's keys.

        Raises:
            TypeError: ``num_tokens`` is no int, or ``lengths`` no tensor.
            ValueError: there is no token or no capacity, or ``lengths`` does not fit. A compiled or captured step
                cannot raise: it marks the tokens without capacity as ``lost``, and keeps none of them.
        """
        check_type("ordered", ordered, bool)
        longest = self.check_room(num_tokens, lengths)
        sizes, before = self.sizes, self.lengths[:, None]
        end = before + (num_tokens if lengths is None else lengths[:, None].to(torch.int32))
        after = end.clamp_max(sizes.max_seq_len)
        position = before + torch.arange(num_tokens, dtype=torch.int32, device=before.device)
        new = position < after
        blocks: dict[str, NewBlocks] = {}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for kind, config in sizes.compressed.items():
            stride, block = config.compress_stride, count_compressed(before, config)
            if num_tokens > stride:
                block = block + torch.arange(-(-num_tokens // stride), dtype=torch.int32, device=before.device)
            complete = block < count_compressed(after, config)
            first = (block * stride - before + sizes.lookback[TAILS[kind]]).clamp_max(num_tokens - 1)
            blocks[kind] = NewBlocks(block * stride, first, not may_look(before) or bool(complete.any()))
            found[kind] = block, complete

        # Padding has the position of the last token, so that positions neither decrease nor exceed the buffers.
        token = torch.minimum(position, after - 1)
        zero = self._zero.expand_as(token)  # which is in memory already, so that no step writes it
        # One token overwrites the one that leaves the window. The buffer then is the window and need not be copied: its
        # order makes no difference to attention without mods.
        in_place = num_tokens == 1 and sizes.max_rewind == 1 and not ordered
        if in_place:
            window_positions = Positions(token.clamp_max(sizes.lookback["win"]), zero, zero)
        else:
            first = sizes.lookback["win"] - before  # of the sequence's tokens, among the window's
            window_positions = Positions(token + first, first.expand_as(token), zero)
        return Step(
            before=before,
            after=after,
            positions=Positions(token, zero, zero),
            window_positions=window_positions,
            window_in_place=in_place,
            blocks=blocks,
            slots=sizes.slots(position, new, after, found),
            lost=(position >= after) & (position < end),
            longest=longest,
        )

    def begin_rows(
        self, num_tokens: int, lengths: Tensor | None, positions: Positions | None, block_starts: Mapping[str, Tensor]
    ) -> Step:
        """Locate the first tokens of all sequences, as :meth:`begin`, or those of documents packed in one sequence.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``, by default ``T``.
            positions: of the tokens ``(1, T)`` in documents, of which document ``b`` becomes sequence ``b``; or None.
            block_starts: by kind of buffer, int ``(1, N)``, the first tokens of their blocks; see
                :mod:`flexnsa.masks.document`.

        Raises:
            ValueError: as :meth:`begin`; or there is another number of documents, or one is too long, which CUDA
                reports by an assertion of the device.
        """
        if self.lengths.is_cuda:  # a graph may have added tokens that the host does not know of
            message = "cache: expected no tokens since reset(), got some by the replay of a graph"
            torch.ops.aten._assert_async.msg((self.lengths == 0).all(), message)
        return self.begin(num_tokens, lengths) if positions is None else self._begin_documents(positions, block_starts)

    def _begin_documents(self, positions: Positions, block_starts: Mapping[str, Tensor]) -> Step:
        """Locate the tokens of documents, and their compressed tokens, as those of sequences.

        As many documents as sequences become these in order. Where there are fewer, and the last has the index of the
        last sequence, each becomes the sequence of its own index: an index that no token has is that of an empty
        document.
        """
        row, token = (positions.token == positions.start).cumsum(1) - 1, positions.token - positions.start  # (1, S)
        count, number = row[0, -1] + 1, positions.document
        if number is not None:
            last = self.batch_size - 1
            some_are_empty = (count <= last) & (number[0, 0] >= 0) & (number[0, -1] == last)
            row, count = torch.where(some_are_empty, number, row), torch.where(some_are_empty, last + 1, count)
        start, end = (torch.searchsorted(row[0], self.rows, right=right) for right in (False, True))
        lengths = (end - start).to(torch.int32)
        longest = self.room.longest_document(lengths, count, token.shape[1])
        is_kept = token < lengths[row]
        rows = {"slc": row, **dict.fromkeys(self.sizes.lookback, row)}
        blocks: dict[str, NewBlocks] = {}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        kept = {kind: starts for kind, starts in block_starts.items() if kind in self.sizes.compressed}
        for kind, first_tokens in kept.items():
            config, first = self.sizes.compressed[kind], first_tokens.to(torch.int64)
            begin, rows[kind] = token.gather(1, first), row.gather(1, first)
            is_there = torch.arange(first.shape[1], device=first.device) < count_compressed(lengths, config).sum()
            found[kind] = begin // config.compress_stride, is_there
            blocks[kind] = NewBlocks(begin, first_tokens, emits=True)
        return Step(
            before=torch.zeros_like(lengths)[:, None],
            after=lengths[:, None],
            positions=positions,
            window_positions=positions,
            window_in_place=False,
            blocks=blocks,
            slots=self.sizes.slots(token, is_kept, lengths[row], found),
            rows=rows,
            lost=~is_kept,
            longest=longest,
        )

    def store(self, name: str, rows: Tensor, step: Step) -> None:
        """Write the step's keys or values ``rows (B, Hkv, T or up to E, D)`` to their slots."""
        kind, count = kind_of(name), rows.shape[2]
        self.buffers[name][step.rows.get(kind, self._column), :, step.slots[kind][:, :count]] = rows.transpose(1, 2)

    def keep(self, name: str, rows: Tensor, step: Step) -> None:
        """Write the step's keys or values to a ring buffer when the step ends."""
        step.recent[name] = rows

    def extend(self, name: str, rows: Tensor, step: Step) -> Tensor:
        """Return the last tokens before the step, followed by its own, which are written when the step ends.

        Where the step reads the window in place, return the ring buffer with its own tokens in it, in no order.
        """
        kind = kind_of(name)
        if kind == "win" and step.window_in_place:
            self.store(name, rows, step)
            self._update_reached(step)  # even if the step fails, a token is overwritten
            return self.buffers[name][:, :, :-1]
        self.keep(name, rows, step)
        back = torch.arange(-self.sizes.lookback[kind], 0, dtype=torch.int32, device=step.before.device)
        slots = (step.before + back).remainder(self.sizes.size(kind)).long()
        return torch.cat((self.buffers[name][self._column, :, slots].transpose(1, 2), rows), dim=2)

    def end(self, step: Step) -> None:
        """Add the step's tokens to the lengths."""
        for name, rows in step.recent.items():
            self.store(name, rows, step)
        self.lengths.copy_(step.after[:, 0])
        self._update_reached(step)
        self.room.longest = step.longest

    def _update_reached(self, step: Step) -> None:
        """Note what ring buffers have overwritten; full ones keep all tokens."""


def check_pack(x: Tensor, cache: RowCache, lengths: Tensor | None) -> None:
    """Check that ``x (1, S, dim)`` is one sequence of packed documents, and the cache empty.

    Raises:
        ValueError: the host does not know the cache to be empty, ``x`` has several sequences, or lengths were given.
    """
    if not cache.is_empty:
        raise ValueError("document_ids: expected None with a cache that is not known to be empty, got documents")
    if len(x) != 1:
        raise ValueError(f"x: expected one packed row with document_ids and a cache, got {len(x)}")
    if lengths is not None:
        raise ValueError(f"lengths: expected None with document_ids, got {describe(lengths)}")
