"""The seven sizes that define a Native Sparse Attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields

from flexnsa.checks.primitives import check_int


@dataclass(frozen=True, kw_only=True, slots=True)
class NSAConfig:
    """Sizes of the three branches, in tokens or blocks (NSA paper, section 3.3 and table 1).

    Args:
        compress_block_size: ``l``, tokens summarised by one compressed token.
        compress_stride: ``d``, tokens between the starts of two compressed tokens; divides ``l`` and ``l'``.
        select_block_size: ``l'``, tokens of one selection block.
        num_selected_blocks: ``n``, blocks that each query attends to, forced ones included.
        num_init_blocks: first blocks of the sequence, always selected.
        num_local_blocks: last blocks up to and including the query's own, always selected.
        window_size: ``w``, keys of the sliding window, the query itself included.

    Raises:
        TypeError: a field is not an int.
        ValueError: a field is out of range, or the sizes do not fit each other.
    """

    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    num_init_blocks: int = 1
    num_local_blocks: int = 2
    window_size: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("num_init_blocks", "num_local_blocks") else 1
            check_int(field.name, getattr(self, field.name), least)
        for name in ("compress_block_size", "select_block_size"):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(
                    f"{name}: expected a multiple of compress_stride={self.compress_stride}, got {getattr(self, name)}"
                )
        forced = self.num_init_blocks + self.num_local_blocks
        if forced > self.num_selected_blocks:
            raise ValueError(
                "num_selected_blocks: expected at least num_init_blocks + num_local_blocks = "
                f"{self.num_init_blocks} + {self.num_local_blocks} = {forced}, got {self.num_selected_blocks}"
            )

    def to_ints(self) -> tuple[int, ...]:
        """Return the config as integers, for operators of :mod:`torch.library`, which take no dataclass."""
        # operator.index makes them constants under torch.compile(dynamic=True). astuple would deepcopy, which
        # torch 2.11 cannot compile.
        return tuple(operator.index(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def from_ints(cls, sizes: Sequence[int]) -> NSAConfig:
        """Build a config from the integers of :meth:`to_ints`."""
        return cls(**{field.name: size for field, size in zip(fields(cls), sizes, strict=True)})
