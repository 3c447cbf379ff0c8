"""What a layer keeps of the tokens it has seen, so that the next one reads ``S/d + n*l' + w`` keys instead of ``S``.

Selected keys are kept for all tokens, compressed ones for all blocks, the window's for the last few, and so is the
*tail*: the raw keys and values from which the next compressed token will be made. Nothing is ever allocated after
construction. A token has a slot in each buffer: token ``p`` is in slot ``p`` of a full buffer, and in slot ``p % size``
of a ring buffer, which keeps the last tokens only. One slot more, at the end of each buffer, takes what must not be
kept: padding. A row is one sequence of the batch; rows may have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexnsa.argument_checks import check_branches
from flexnsa.config import NSAConfig
from flexnsa.decoding.read_counter import ReadCounter
from flexnsa.decoding.steps import Slots, Step, buffer_names, kind_of, locate, ring_slots_before
from flexnsa.geometry import BRANCHES
from flexnsa.validation import (
    LARGEST_SIZE,
    check_device,
    check_dtype,
    check_int,
    check_integers,
    check_positive_int,
    check_tensor,
    check_type,
    may_look,
)


class NSACache:
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
        self.batch_size, self.max_seq_len, self.max_rewind = batch_size, max_seq_len, max_rewind
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        for name in ("batch_size", "max_seq_len", "num_kv_heads", "head_dim", "v_head_dim", "max_rewind"):
            check_positive_int(name, getattr(self, name))
        self.config = config
        self.branches = check_branches(branches)
        check_dtype("dtype", dtype)
        check_device("device", device)

        self.sizes = Slots(max_seq_len=max_seq_len, max_rewind=max_rewind, config=config)
        self.buffers = {
            name: torch.zeros(
                batch_size,
                num_kv_heads,
                self.sizes.size(kind_of(name)) + 1,
                self.head_dim if name[0] == "k" else self.v_head_dim,
                dtype=dtype,
                device=device,
            )
            for name in buffer_names(self.branches)
        }
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.reached = torch.zeros_like(self.lengths)
        """Most tokens that a row has had since it was empty, those taken back included: older ones are overwritten."""
        self.reads: ReadCounter | None = None
        """Set it to count what the steps read."""
        self._rows = torch.arange(batch_size, device=device)[:, None]
        self._zero = torch.zeros_like(self.lengths)[:, None]
        for tensor in (*self._state().values(), self._rows, self._zero):
            # torch.compile makes no CUDA graph that writes to an input, unless told that its memory stays where it is.
            torch._dynamo.mark_static_address(tensor, guard=False)
        self._longest: int | None = 0
        """No row is longer, as far as is known without asking the device; None: not known."""

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

    def make_room(self, num_tokens: int, lengths: Tensor | None = None) -> None:
        """Demand what :meth:`begin` demands, where whoever writes to the cache locates the tokens by itself."""
        if not isinstance(num_tokens, torch.SymInt):
            check_positive_int("num_tokens", num_tokens)
        if lengths is not None:
            check_integers("lengths", lengths, (self.batch_size,), like=self.lengths, as_of="the cache")
        if torch.compiler.is_compiling() or (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._longest = None  # what is compiled or captured runs more often than this line
        else:
            self._check_room(num_tokens, lengths)

    def store(self, name: str, rows: Tensor, step: Step) -> None:
        """Put the step's keys or values ``rows (B, Hkv, T or E, D)`` into their slots."""
        self.buffers[name][self._rows, :, step.slots[kind_of(name)]] = rows.transpose(1, 2)

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
        return torch.cat((self.buffers[name][self._rows, :, slots].transpose(1, 2), rows), dim=2)

    def end(self, step: Step) -> None:
        """Count the step's tokens as seen."""
        for name, rows in step.recent.items():
            self.store(name, rows, step)
        self.lengths.copy_(step.after[:, 0])
        self._update_reached(step)

    def reset(self) -> None:
        """Forget everything."""
        self.lengths.zero_()
        self.reached.zero_()
        self._longest = 0
        self._clear_spare_slots()

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
        self._longest = None
        self._clear_spare_slots()

    def reorder(self, rows: Tensor) -> None:
        """Replace row ``b`` by what row ``rows[b]`` was, as beam search does; ``rows`` int ``(B,)``.

        Raises:
            TypeError: not a tensor.
            ValueError: of another shape, dtype or device; or, on a CPU, a row that there is not.
        """
        check_integers("rows", rows, (self.batch_size,), like=self.lengths, as_of="the cache")
        if may_look(rows) and not ((rows >= 0) & (rows < self.batch_size)).all():
            raise ValueError(f"rows: expected 0 .. {self.batch_size - 1}, got {rows.tolist()}")
        for tensor in (*self.buffers.values(), self.lengths, self.reached):
            tensor.copy_(tensor.index_select(0, rows))

    def state_dict(self) -> dict[str, Tensor]:
        """Copy all that distinguishes this cache from a fresh one of the same sizes."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Return to a state that :meth:`state_dict` gave, be it of another cache of the same sizes.

        Raises:
            TypeError: something that should be a tensor is not.
            ValueError: the sizes differ; the cache is then as it was.
        """
        own = self._state()
        check_type("state", state, dict)
        if state.keys() != own.keys():
            raise ValueError(f"state: expected {', '.join(sorted(own))}, got {', '.join(sorted(map(str, state)))}")
        for name, tensor in own.items():
            check_tensor(f"state[{name!r}]", state[name], tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._longest = None

    def _state(self) -> dict[str, Tensor]:
        return {**self.buffers, "lengths": self.lengths, "reached": self.reached}

    def _clear_spare_slots(self) -> None:
        """Nobody sees them, but not a number times a probability of 0 is not a number."""
        for buffer in self.buffers.values():
            buffer[:, :, -1] = 0

    def _check_room(self, num_tokens: int, lengths: Tensor | None) -> None:
        if lengths is not None:
            fits = ((lengths >= 0) & (lengths <= num_tokens)).all()
            if lengths.is_cuda:
                torch.ops.aten._assert_async.msg(fits, f"lengths: expected 0 .. {num_tokens}, the tokens of x")
            elif not fits:
                raise ValueError(f"lengths: expected 0 .. {num_tokens}, the tokens of x, got {lengths.tolist()}")
        if self._longest is not None and self._longest + num_tokens <= self.max_seq_len:
            self._longest += num_tokens
            return
        end = self.lengths + (num_tokens if lengths is None else lengths)
        longest = int(end.max())
        if longest > self.max_seq_len:
            row = int(end.argmax())
            raise ValueError(
                f"x: expected at most {self.max_seq_len - int(self.lengths[row])} tokens, for which the cache of "
                f"{self.max_seq_len} has room in row {row}, got {longest - int(self.lengths[row])}"
            )
        self._longest = longest

    def _update_reached(self, step: Step) -> None:
        self.reached.copy_(torch.maximum(self.reached, step.after[:, 0]))
