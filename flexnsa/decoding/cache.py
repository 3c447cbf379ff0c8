"""What a layer keeps of the tokens it has seen, so that the next one reads ``S/d + n*l' + w`` keys instead of ``S``.

Selected keys are kept for all tokens, compressed ones for all blocks, the window's for the last few, and so is the
*tail*: the raw keys and values from which the next compressed token will be made. Nothing is ever allocated after
construction, unless the cache is told to grow. A token has a slot in each buffer: token ``p`` is in slot ``p`` of a
full buffer, and in slot ``p % size`` of a ring buffer, which keeps the last tokens only. One slot more, at the end of
each buffer, takes what must not be kept: padding. A row is one sequence of the batch; rows may have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexnsa.argument_checks import check_branches
from flexnsa.config import NSAConfig
from flexnsa.decoding.documents import locate_documents, unpack
from flexnsa.decoding.read_counter import ReadCounter
from flexnsa.decoding.row_cache import RowCache, fix_addresses
from flexnsa.decoding.steps import Slots, Step, buffer_names, kind_of, locate, ring_slots_before
from flexnsa.geometry import BRANCHES
from flexnsa.positions import Positions
from flexnsa.validation import (
    LARGEST_SIZE,
    check_int,
    check_integers,
    check_positive_int,
    check_type,
)


class NSACache(RowCache):
    """Decoding state of one :class:`flexnsa.NativeSparseAttention`, which also makes one: ``layer.new_cache(...)``.

    On CUDA a step waits for nothing, and all that it writes to is the cache's own memory. So it can be captured, by
    ``torch.compile(layer, fullgraph=True, mode="reduce-overhead")`` or by hand in a ``torch.cuda.CUDAGraph``, and is
    replayed at any length. Only an eager step can say that a row is full: it counts how long rows may be, and looks at
    the device when that reaches the end or when steps that it did not see have been taken.

    Args:
        batch_size: rows ``B``.
        max_seq_len: tokens that a row can hold.
        num_kv_heads: ``Hkv``.
        head_dim: ``Dk``.
        v_head_dim: ``Dv``, by default ``head_dim``.
        config: sizes of the branches.
        branches: of the layer; the others take no memory.
        max_rewind: tokens that :meth:`crop` can always take back; each costs a slot of the window and of the tail.
        dtype: of the keys and values.
        device: of everything.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
    """

    SHARED = ("config", "branches", "max_rewind", *RowCache.SHARED)

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        config: NSAConfig,
        branches: Sequence[str] = BRANCHES,
        max_rewind: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_type("config", config, NSAConfig)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        given = {"batch_size": batch_size, "max_seq_len": max_seq_len, "num_kv_heads": num_kv_heads}
        given |= {"head_dim": head_dim, "v_head_dim": v_head_dim, "max_rewind": max_rewind}
        for name, size in given.items():
            check_positive_int(name, size)
        self.head_dim, self.v_head_dim, self.max_rewind = head_dim, v_head_dim, max_rewind
        self.config = config
        self.branches = check_branches(branches)
        self.sizes = Slots(max_seq_len=max_seq_len, max_rewind=max_rewind, config=config)
        dims = {name: head_dim if name[0] == "k" else v_head_dim for name in buffer_names(self.branches)}
        super().__init__(batch_size, max_seq_len, num_kv_heads, dims, dtype=dtype, device=device)
        self.reached = torch.zeros_like(self.lengths)
        """Most tokens that a row has had since it was empty, those taken back included: older ones are overwritten."""
        self.reads: ReadCounter | None = None
        """Set it to count what the steps read."""
        self._zero = torch.zeros_like(self.lengths)[:, None]
        self._column = self.rows[:, None]
        fix_addresses(self.reached, self._zero, self._column)

    def require(self, **expected: Any) -> None:
        """Demand attributes of these values.

        Raises:
            ValueError: one differs; the message names it.
        """
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ValueError(f"cache: expected {name}={value}, as the layer has it, got {getattr(self, name)}")

    def begin(self, num_tokens: int, lengths: Tensor | None = None, *, ordered: bool = False) -> Step:
        """Locate ``num_tokens`` new tokens a row, of which the first ``lengths (B,)`` are real and the others padding.

        Nothing that a later step would see changes before :meth:`end`.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``, by default ``T``.
            ordered: whether somebody will ask where the keys of the window stand.

        Raises:
            TypeError: ``num_tokens`` is no int, or ``lengths`` no tensor.
            ValueError: there is no token or no room, or ``lengths`` does not fit. A compiled or captured step cannot
                raise: it marks the tokens for which there is no room as ``lost``, and keeps none of them.
        """
        check_type("ordered", ordered, bool)
        self.make_room(num_tokens, lengths)
        before = self.lengths[:, None]
        end = before + (num_tokens if lengths is None else lengths[:, None].to(torch.int32))
        return locate(before, end, self._zero, num_tokens, self.sizes, ordered=ordered)

    def begin_rows(
        self, num_tokens: int, lengths: Tensor | None, positions: Positions | None, first_tokens: Tensor | None
    ) -> Step:
        """Locate whole rows, the first that the cache is to hold: as :meth:`begin`, or the documents of one packed row.

        Args:
            num_tokens: ``T``.
            lengths: int ``(B,)``, by default ``T``.
            positions: of the tokens ``(1, T)`` in documents, of which document ``b`` goes into row ``b``; or None.
            first_tokens: int ``(1, N)``, where their compressed tokens begin; see :mod:`flexnsa.masks.document`.

        Raises:
            ValueError: as :meth:`begin`; or there is another number of documents, or one is too long. On CUDA it is the
                device that finds out these, and then refuses all work.
        """
        self.demand_empty()
        if positions is None or first_tokens is None:
            return self.begin(num_tokens, lengths)
        documents = unpack(positions, self.rows)
        self.room.take_documents(documents.lengths, documents.count, num_tokens)
        return locate_documents(documents, positions, first_tokens, self.sizes)

    def store(self, name: str, rows: Tensor, step: Step) -> None:
        """Put the step's keys or values ``rows (B, Hkv, T or up to E, D)`` into their slots."""
        kind, count = kind_of(name), rows.shape[2]
        self.buffers[name][step.rows.get(kind, self._column), :, step.slots[kind][:, :count]] = rows.transpose(1, 2)

    def all(self, name: str) -> Tensor:
        """Give a full buffer; the slots of the future and the spare one, seen by no query, hold anything finite."""
        return self.buffers[name]

    def keep(self, name: str, rows: Tensor, step: Step) -> None:
        """Put the step's keys or values into a ring buffer when the step ends."""
        step.recent[name] = rows

    def extend(self, name: str, rows: Tensor, step: Step) -> Tensor:
        """Give the tokens that a step looks back at and its own behind them, in order; keep its own for later.

        Where the step reads the window in place, give the ring buffer with its own tokens in it, in no order.
        """
        kind = kind_of(name)
        if kind == "win" and step.window_in_place:
            self.store(name, rows, step)
            self._update_reached(step)  # even if the step fails, the buffer has forgotten a token
            return self.buffers[name][:, :, :-1]
        self.keep(name, rows, step)
        slots = ring_slots_before(step, self.sizes.lookback[kind], self.sizes.size(kind))
        return torch.cat((self.buffers[name][self._column, :, slots].transpose(1, 2), rows), dim=2)

    def end(self, step: Step) -> None:
        """Count the step's tokens as seen."""
        for name, rows in step.recent.items():
            self.store(name, rows, step)
        self.lengths.copy_(step.after[:, 0])
        self._update_reached(step)

    def crop(self, lengths: int | Tensor) -> None:
        """Go back to the first tokens of each row: ``lengths``, one for all or int ``(B,)``.

        Always possible are 0, the last ``max_rewind`` tokens, and any length while nothing has been overwritten.

        Raises:
            TypeError: neither an int nor a tensor.
            ValueError: a row is shorter than that, or the cache no longer holds what the next step would look back at.
        """
        if isinstance(lengths, Tensor):
            check_integers("lengths", lengths, (self.batch_size,), like=self.lengths, as_of="the cache")
        else:
            check_int("lengths", lengths, -LARGEST_SIZE)
        wanted = torch.as_tensor(lengths, device=self.device).expand_as(self.lengths)
        possible = (wanted >= 0) & (wanted <= self.lengths)
        for kind in {kind_of(name) for name in self.buffers} & self.sizes.lookback.keys():
            oldest = self.reached - self.sizes.size(kind)
            possible &= (wanted == 0) | ((wanted - self.sizes.lookback[kind]).clamp_min(0) >= oldest)
        if not possible.all():
            row = int(possible.logical_not().nonzero()[0])
            raise ValueError(
                f"lengths: expected 0, or up to max_rewind={self.max_rewind} less than the {int(self.lengths[row])} "
                f"tokens of row {row} (once {int(self.reached[row])}), got {int(wanted[row])}"
            )
        self.lengths.copy_(wanted)
        self.reached.masked_fill_(wanted == 0, 0)
        self.room.longest = lengths if isinstance(lengths, int) else None
        self._clear_spare_slots()

    def grow(self, max_seq_len: int) -> None:
        """As :meth:`RowCache.grow`; the window and the tail stay where they are."""
        super().grow(max_seq_len)
        self.sizes = replace(self.sizes, max_seq_len=self.max_seq_len)

    def num_slots(self, name: str, max_seq_len: int) -> int:
        """Count the slots of a buffer without the spare one."""
        return replace(self.sizes, max_seq_len=max_seq_len).size(kind_of(name))

    def counts(self) -> dict[str, Tensor]:
        """Give what is counted of each row, int32 ``(B,)``, by name."""
        return {"lengths": self.lengths, "reached": self.reached}

    def _clear_spare_slots(self) -> None:
        """Nobody sees them, but not a number times a probability of 0 is not a number."""
        for buffer in self.buffers.values():
            buffer[:, :, -1] = 0

    def _update_reached(self, step: Step) -> None:
        self.reached.copy_(torch.maximum(self.reached, step.after[:, 0]))
