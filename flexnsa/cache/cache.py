"""The decoding cache of a layer: with it, a new token reads ``S/d + n*l' + w`` keys instead of ``S``.

Selected keys are kept for all tokens, compressed ones and index keys for all blocks, the window's for the last few
tokens, and so is the *tail*: the raw keys and values from which the next compressed token or index key will be made.
After construction the cache allocates only to grow. Token ``p`` is in slot ``p`` of a full buffer, and in slot
``p % size`` of a ring buffer, which keeps the last tokens only. One slot more, at the end of each buffer, takes
padding. Sequences of the batch may have different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from flexnsa.attention.step import buffer_names
from flexnsa.cache.bounds import Rows
from flexnsa.cache.rows import RowCache, fix_addresses
from flexnsa.cache.step_cache import StepCache
from flexnsa.cache.steps import TAILS, BufferSizes, ReadCounter, Step
from flexnsa.checks.calls import check_branches
from flexnsa.config import BRANCHES, INDEX_FIELDS, NSAConfig, kind_of
from flexnsa.primitives import LARGEST_SIZE, check_int, check_integers, check_type


class NSACache(StepCache):
    """Decoding state of one :class:`flexnsa.NativeSparseAttention`, which also makes one: ``layer.new_cache(...)``.

    On CUDA a step waits for nothing, and writes only to the cache's own memory. So it can be captured, by
    ``torch.compile(layer, fullgraph=True, mode="reduce-overhead")`` or by hand in a ``torch.cuda.CUDAGraph``, and
    replayed at any length. Only an eager step can raise an error where a sequence is full: it keeps an upper bound of
    the lengths, and reads those of the device when the bound reaches the capacity, or after the replay of a graph.

    Args:
        batch_size: sequences ``B``.
        max_seq_len: tokens that a sequence can hold.
        num_kv_heads: ``Hkv``.
        head_dim: ``Dk``.
        v_head_dim: ``Dv``, by default ``head_dim``.
        config: sizes of the branches.
        branches: of the layer; the others need no memory.
        follows: whether the layer follows another, whose blocks it attends to: it keeps no index keys.
        max_rewind: tokens that :meth:`crop` can always remove; each costs a slot of the window and of the tail.
        rope_base: of the layer.
        dtype: of the keys and values.
        device: of everything.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
    """

    OF_LAYER = ("config", "branches", "follows", *RowCache.OF_LAYER)
    SHARED = ("config", "branches", "follows", "max_rewind", *RowCache.SHARED)

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
        follows: bool = False,
        max_rewind: int = 1,
        rope_base: float = 10_000.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_type("config", config, NSAConfig)
        self.config, self.branches = config, check_branches(branches)
        self.follows, self.max_rewind = follows, max_rewind
        indexed = config.index_heads is not None and not follows
        kept = config if indexed else replace(config, **dict.fromkeys(INDEX_FIELDS))
        sizes = BufferSizes(max_seq_len=max_seq_len, max_rewind=max_rewind, config=kept)
        names = buffer_names(self.branches, indexed, follows)
        if indexed and config.index_score == "max":
            names.remove("k_index_tail")  # nothing is compressed
        heads = num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim
        super().__init__(sizes, batch_size, *heads, names, rope_base=rope_base, dtype=dtype, device=device)
        self.reached = torch.zeros_like(self.lengths)
        """The largest length of each sequence since it was empty; :meth:`crop` brings no overwritten token back."""
        self.reads: ReadCounter | None = None
        """Set it to count the keys that steps read."""
        fix_addresses(self.reached)

    def crop(self, lengths: int | Tensor) -> None:
        """Keep the first tokens of each sequence only: ``lengths``, one for all or int ``(B,)``.

        Always possible are 0, removing up to ``max_rewind`` tokens, and any length until a token has been overwritten.

        Raises:
            TypeError: neither an int nor a tensor.
            ValueError: a sequence is shorter, or tokens that the next step would read have been overwritten.
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
        for buffer in self.buffers.values():  # spare slots too must be finite: NaN times a probability of 0 is NaN
            buffer[:, :, -1] = 0

    def insert(self, rows: Rows, other: Self, other_rows: Rows | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As :meth:`RowCache.insert`, with the blocks that either cache keeps."""
        self._check_other(other)
        if "blocks" in {*self.buffers, *other.buffers}:
            _ = self.keep_blocks(), other.keep_blocks()
        super().insert(rows, other, other_rows)

    def keep_blocks(self) -> Tensor:
        """Return the buffer of the blocks that tokens chose, int32 ``(B, Hkv, C + 1, n)``, made when first called.

        It has their indices plus 1, because 0 is what a cache fills with, here where nothing was recorded.
        """
        if "blocks" not in self.buffers:
            keys = next(iter(self.buffers.values()))
            size = self.batch_size, self.num_kv_heads, self.max_seq_len + 1, self.config.num_selected_blocks
            with torch.inference_mode(False):  # so that later steps can write to it in any mode
                self.buffers["blocks"] = keys.new_zeros(size, dtype=torch.int32)
            if not torch.compiler.is_compiling():
                fix_addresses(self.buffers["blocks"])
        return self.buffers["blocks"]

    def num_heads(self, name: str) -> int:
        """Count the heads of a buffer: with an ``index_score`` all share their index keys."""
        return 1 if name.startswith("k_index") and self.config.index_score is not None else self.num_kv_heads

    def dim(self, name: str) -> int:
        """Return the size of the heads of a buffer: index keys may have one of their own."""
        return (name.startswith("k_index") and self.config.index_head_dim) or super().dim(name)

    def counts(self) -> dict[str, Tensor]:
        """Return the counters of the sequences, int32 ``(B,)``, by name."""
        return {"lengths": self.lengths, "reached": self.reached}

    def _update_reached(self, step: Step) -> None:
        self.reached.copy_(torch.maximum(self.reached, step.after[:, 0]))


class StepKeys:
    """The keys that a step reads, those of the cache and its own; see :class:`flexnsa.layers.layouts.KeySource`."""

    def __init__(self, cache: StepCache, step: Step) -> None:
        self.cache, self.step = cache, step

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Store them, and return all slots; queries mask those of future tokens."""
        self.cache.store(name, new, self.step)
        return self.cache.buffers[name]

    def of_window(self, name: str, new: Tensor) -> Tensor:
        """Return the last tokens and the new ones; see :meth:`StepCache.extend`."""
        return self.cache.extend(name, new, self.step)

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Extend the tail, compress the blocks that are now complete, if any, and return all compressed tokens."""
        kind = kind_of(name)
        tail = name.replace(kind, TAILS[kind])
        if self.step.blocks[kind].emits:
            self.cache.store(name, compress(self.cache.extend(tail, new, self.step)), self.step)
        else:
            self.cache.keep(tail, new, self.step)
        return self.cache.buffers[name]


class PrefillKeys(StepKeys):
    """The keys of whole sequences, which are also stored in an empty cache."""

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Store and return them; the cache counts them when the step ends."""
        self.cache.store(name, new, self.step)
        return new

    of_window = of_tokens

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Store the tail and the compressed tokens."""
        self.cache.store(name.replace(kind_of(name), TAILS[kind_of(name)]), new, self.step)
        return self.of_tokens(name, compress(new))
