"""Keys and values of a batch of sequences that can be reset, copied, reordered and grown: the base of all caches.

Row ``b`` of each buffer belongs to sequence ``b``; sequences may have different lengths. Each buffer has one slot more
than it holds tokens, at its end, which takes padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flexnsa import primitives
from flexnsa.attention.plan import STEP_TOKENS
from flexnsa.cache.bounds import HostLengthBound, Rows, doubled, row_index
from flexnsa.cache.steps import BufferSizes
from flexnsa.config import kind_of


class RowCache:
    """Buffers of keys and values for ``B`` sequences.

    Args:
        sizes: of the buffers.
        batch_size: sequences ``B``.
        num_kv_heads: ``Hkv``.
        head_dim: ``Dk``.
        v_head_dim: ``Dv``.
        names: of the buffers; those of keys begin with ``k``.
        rope_base: of the rotary frequencies of the keys.
        dtype: of the keys and values.
        device: of everything.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
    """

    OF_LAYER: ClassVar[tuple[str, ...]] = ("num_kv_heads", "head_dim", "v_head_dim", "rope_base")
    """What a cache must have in common with a layer that uses it."""
    SHARED: ClassVar[tuple[str, ...]] = (*OF_LAYER, "dtype", "device")
    """What two caches must have in common for sequences to be copied between them."""

    def __init__(
        self,
        sizes: BufferSizes,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        names: Sequence[str],
        *,
        rope_base: float,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        given = {"batch_size": batch_size, "max_seq_len": sizes.max_seq_len, "num_kv_heads": num_kv_heads}
        given |= {"head_dim": head_dim, "v_head_dim": v_head_dim, "max_rewind": sizes.max_rewind}
        for name, size in given.items():
            primitives.check_positive_int(name, size)
        primitives.check_dtype("dtype", dtype)
        primitives.check_device("device", device)
        primitives.check_positive_number("rope_base", rope_base)
        self.sizes, self.batch_size, self.num_kv_heads, self.rope_base = sizes, batch_size, num_kv_heads, rope_base
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.room = HostLengthBound(sizes.max_seq_len)
        shapes = {name: (self.num_heads(name), sizes.size(kind_of(name)) + 1, self.dim(name)) for name in names}
        self.buffers = {name: torch.zeros(batch_size, *x, dtype=dtype, device=device) for name, x in shapes.items()}
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch_size, device=device)
        """Indices of the sequences."""
        self._zero, self._column = torch.zeros_like(self.lengths)[:, None], self.rows[:, None]
        fix_addresses(*self.buffers.values(), self.lengths, self.rows, self._zero, self._column)

    def num_heads(self, name: str) -> int:
        """Count the heads of a buffer."""
        del name
        return self.num_kv_heads

    def dim(self, name: str) -> int:
        """Return the size of the heads of a buffer."""
        return self.head_dim if name.startswith("k") else self.v_head_dim

    def num_slots(self, name: str, max_seq_len: int) -> int:
        """Count the slots of a buffer without the spare one."""
        return replace(self.sizes, max_seq_len=max_seq_len).size(kind_of(name))

    @property
    def max_seq_len(self) -> int:
        """Tokens that a sequence can hold."""
        return self.room.max_seq_len

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that all sequences are empty, because none has taken a token since the last reset.

        The host does not see the tokens that the replay of a CUDA graph adds.
        """
        return self.room.is_empty

    def takes_rows(self, num_tokens: int) -> bool:
        """Return whether so many tokens are computed as whole sequences: the first ones, and more than a step has.

        Fewer are a step even in an empty cache, so that such a step compiles all that a captured one will run.
        """
        return num_tokens > STEP_TOKENS and self.is_empty

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

    @classmethod
    def check_made_for(cls, layer: object, cache: object, argument: str = "cache") -> None:
        """Check that a cache is of this class and fits the sizes of the layer; errors call it ``argument``."""
        primitives.check_type(argument, cache, cls)
        assert isinstance(cache, cls)
        cache.require(argument, **{name: getattr(layer, name) for name in cls.OF_LAYER})

    def require(self, argument: str = "cache", /, **expected: object) -> None:
        """Check attributes of this cache; a ValueError names the one that differs."""
        for name, value in expected.items():
            if getattr(self, name) != value:
                came = getattr(self, name)
                raise ValueError(f"{argument}: expected {name}={value}, as the layer has it, got {came}")

    def check_dtypes(self, *heads: Tensor) -> None:
        """Check that heads have the dtype of this cache, before any of them is stored."""
        for x in heads:
            self.require(dtype=x.dtype)

    def check_room(self, num_tokens: int, lengths: Tensor | None = None) -> int | None:
        """Check that each sequence has capacity for ``num_tokens`` tokens, the first ``lengths (B,)`` or all real.

        Returns:
            What ``room.longest`` becomes once they are in the cache; until then it is unchanged.

        Raises:
            TypeError: ``num_tokens`` is no int, or ``lengths`` no tensor.
            ValueError: there is no token or no capacity, or ``lengths`` does not fit. Compiled and captured code cannot
                raise.
        """
        if not isinstance(num_tokens, torch.SymInt):
            primitives.check_positive_int("num_tokens", num_tokens)
        if lengths is not None:
            primitives.check_integers("lengths", lengths, (self.batch_size,), like=self.lengths, as_of="the cache")
        return self.room.longest_after(num_tokens, lengths, self.lengths)

    def reset(self, rows: Rows | None = None) -> None:
        """Empty some sequences, by default all, for new ones to start there. Nothing waits for the device.

        Args:
            rows: an index, several, an int tensor ``(K,)`` or a bool mask ``(B,)``.

        Raises:
            TypeError: something else.
            ValueError: a tensor of another shape, dtype or device, or an index out of range (in a tensor, this is
                checked on CPU).
        """
        # Zeros, because even masked keys must be finite: NaN times a probability of 0 is NaN.
        tensors = (*self.buffers.values(), *self.counts().values())
        if rows is None:
            for tensor in tensors:
                tensor.zero_()
            self.room.longest = 0
        elif isinstance(rows, Tensor) and rows.dtype == torch.bool:
            primitives.check_tensor(
                "rows", rows, (self.batch_size,), like=self.lengths, as_of="the cache", dtype=torch.bool
            )
            for tensor in tensors:
                tensor.masked_fill_(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
        else:
            index = row_index("rows", rows, self.rows)
            for tensor in tensors:
                tensor.index_fill_(0, index, 0)

    def insert(self, rows: Rows, other: Self, other_rows: Rows | None = None) -> None:
        """Replace sequences by copies of those of another cache; nothing waits for the device.

        So a new prompt can be prefilled alone while other sequences decode, and one prefix can start many sequences:
        ``cache.insert([0, 3], prefix, 0)``. No memory moves: a captured step continues with the new sequences.

        Args:
            rows: indices of the ``K`` different sequences to replace.
            other: of the same sizes, but for the batch size and ``max_seq_len``, which may be less.
            other_rows: indices of those to copy, ``K`` or one for all; by default all of ``other``.

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
        """Replace sequence ``b`` by a copy of sequence ``rows[b]``, as beam search does; ``rows`` int ``(B,)``.

        Raises:
            TypeError: not a tensor.
            ValueError: of another shape, dtype or device; or, on CPU, an index out of range.
        """
        primitives.check_integers("rows", rows, (self.batch_size,), like=self.lengths, as_of="the cache")
        index = row_index("rows", rows, self.rows)
        for tensor in self.state().values():
            tensor.copy_(tensor.index_select(0, index))

    def grow(self, max_seq_len: int) -> None:
        """Double the capacity until each sequence can hold so many tokens; all keep those that they have.

        Buffers that grow move in memory: a captured step must be captured again, and a compiled one is recompiled.
        Ring buffers do not. While a buffer is copied, it is in memory twice.

        Raises:
            TypeError: no int.
            ValueError: out of range.
        """
        primitives.check_positive_int("max_seq_len", max_seq_len)
        capacity = doubled(self.max_seq_len, max_seq_len)
        for name, buffer in self.buffers.items():
            before, after = (self.num_slots(name, size) for size in (self.max_seq_len, capacity))
            if after > before:
                # Outside inference mode, no tensor that was made in it is writable: a grown one must be as the old one.
                with torch.inference_mode(buffer.is_inference()):
                    grown = buffer.new_zeros(*buffer.shape[:2], after + 1, buffer.shape[3])
                    grown[:, :, :before] = buffer[:, :, :before]
                fix_addresses(grown)
                self.buffers[name] = grown
        self.room.max_seq_len, self.sizes = capacity, replace(self.sizes, max_seq_len=capacity)

    def state_dict(self) -> dict[str, Tensor]:
        """Copy all tensors that distinguish this cache from a new one of the same sizes."""
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict`, of this or another cache of the same sizes.

        Raises:
            TypeError: a value is not a tensor.
            ValueError: the sizes differ; the cache is then as it was.
        """
        own = self.state()
        primitives.check_type("state", state, dict)
        if state.keys() != own.keys():
            raise ValueError(f"state: expected {', '.join(sorted(own))}, got {', '.join(sorted(map(str, state)))}")
        for name, tensor in own.items():
            primitives.check_tensor(f"state[{name!r}]", state[name], tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.room.longest = None

    def counts(self) -> dict[str, Tensor]:
        """Return the counters of the sequences, int32 ``(B,)``, by name."""
        return {"lengths": self.lengths}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that :meth:`state_dict` copies."""
        return {**self.buffers, **self.counts()}

    def _check_other(self, other: Any) -> None:
        primitives.check_type("other", other, type(self))
        for name in self.SHARED:
            expected, came = getattr(self, name), getattr(other, name)
            if came != expected:
                raise ValueError(f"other: expected {name}={expected}, as this cache has it, got {came}")
        if other.max_seq_len > self.max_seq_len:
            raise ValueError(f"other: expected max_seq_len of at most {self.max_seq_len}, got {other.max_seq_len}")


def fix_addresses(*tensors: Tensor) -> None:
    """Tell ``torch.compile`` that memory on a GPU never moves; otherwise no CUDA graph may write to an input."""
    # A cache made by compiled code has no address yet. A CPU has no CUDA graphs, and Dynamo takes seconds to import.
    if tensors[0].is_cuda and not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)
