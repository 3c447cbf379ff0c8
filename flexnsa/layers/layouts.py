"""Where the tokens of a call stand, and which keys they read: whole sequences, packed documents, steps on a cache.

They differ in two things only: the positions of tokens (:class:`RowLayout`), and which keys and values a branch reads
besides those of the new tokens (:class:`KeySource`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexnsa.attention.seam import given
from flexnsa.cache.steps import Step
from flexnsa.checks.primitives import describe
from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed
from flexnsa.layers.rope import RopeTables, rope_tables, stored_rope_tables
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.positions import Positions


class KeySource(Protocol):
    """Which keys or values a branch reads, given those of the new tokens; ``name`` is as in :class:`Keys`."""

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Return those of all tokens, for the selected branch."""
        ...

    def of_window(self, name: str, new: Tensor) -> Tensor:
        """Return those of the last tokens."""
        ...

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the compressed ones, of which ``compress`` makes those that the new tokens complete."""
        ...


class RowKeys:
    """Whole sequences read their own keys; see :class:`KeySource`."""

    def of_tokens(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002, D102
        return new

    def of_window(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002, D102
        return new

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG002, D102
        return compress(new)


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """What a layer makes a layout of, beside the tokens: layers that have all of it in common can share one.

    Args:
        config: sizes of the branches; None of dense attention.
        head_dim: ``Dk``.
        rope_base: of the rotary frequencies.
        dtype: of the rotary tables.
        device: of everything.
    """

    config: NSAConfig | None
    head_dim: int
    rope_base: float
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor, head_dim: int, rope_base: float, config: NSAConfig | None = None) -> LayoutSizes:
        """Return those of a layer with such a weight."""
        return cls(config, head_dim, rope_base, torch.promote_types(weight.dtype, torch.float32), weight.device)


class BlockLayout(NamedTuple):
    """Positions of compressed tokens of one size: the fields of :class:`RowLayout` that depend on it."""

    blocks: RopeTables
    first_tokens: Tensor | None
    positions: Positions | None


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Positions of tokens and compressed tokens, made once a forward pass for all layers of the same sizes.

    Args:
        tokens: rotary tables of the tokens.
        blocks: rotary tables of the compressed tokens, each at its block's first token.
        first_tokens: int ``(B, N)``, where blocks begin among the raw keys; None for every ``d``.
        positions: of the queries among the keys of the selected and compressed branch; None for one whole sequence.
        window_positions: among those of the window.
        source: of the keys that whole sequences read; None where they read their own.
        sizes: of the layer that made it; None if other layers must not share it.
        index: of index keys, in a layer with an indexer.
        num_ranks: how many ranks share the tokens of a sequence.
    """

    tokens: RopeTables
    blocks: RopeTables
    first_tokens: Tensor | None = None
    positions: Positions | None = None
    window_positions: Positions | None = None
    source: KeySource | None = None
    sizes: LayoutSizes | None = None
    index: BlockLayout | None = None
    num_ranks: int = 1

    @property
    def block_starts(self) -> dict[str, Tensor]:
        """Where the blocks of packed tokens begin, by kind of buffer."""
        starts = {"cmp": self.first_tokens, "index": None if self.index is None else self.index.first_tokens}
        return {kind: first for kind, first in starts.items() if first is not None}


class Layout(Protocol):
    """What layouts of any attention have in common."""

    @property
    def tokens(self) -> RopeTables:
        """Rotary tables of the tokens."""
        ...

    @property
    def positions(self) -> Positions | None:
        """Of packed tokens in their documents, or of tokens that follow a cache."""
        ...

    @property
    def block_starts(self) -> Mapping[str, Tensor]:
        """Where the blocks of packed tokens begin, int ``(B, N)``, by kind of buffer."""
        ...

    @property
    def source(self) -> KeySource | None:
        """Of the keys that whole sequences read; see :class:`RowLayout`."""
        ...

    @property
    def sizes(self) -> LayoutSizes | None:
        """Those of the layer that made it."""
        ...


def check_layout(layout: Layout, x: Tensor, document_ids: Tensor | None, sizes: LayoutSizes) -> None:
    """Check that a layer of these sizes would make such a layout for ``x (B, T, dim)``; no values are read.

    Raises:
        ValueError: it is of other tokens or of a layer of other sizes, or ``document_ids`` come too.
    """
    if document_ids is not None:
        raise ValueError(f"document_ids: expected None with a layout, got {describe(document_ids)}")
    shape = layout.tokens.cos.shape
    rows, tokens = shape[0] if len(shape) == 4 else 1, shape[-2]
    if rows not in (1, len(x)) or tokens != x.shape[1]:
        expected = f"{x.shape[1]} tokens in {len(x)} rows, as x has"
        raise ValueError(f"layout: expected {expected}, got {tokens} tokens in {rows} rows")
    if layout.sizes == sizes:  # all at once, because this is compiled too
        return
    for field in fields(sizes):
        expected, came = getattr(sizes, field.name), getattr(layout.sizes, field.name, None)
        if came != expected:
            raise ValueError(f"layout: expected {field.name}={expected}, as the layer has it, got {came}")


def row_layout(seq_len: int, document_ids: Tensor | None, sizes: LayoutSizes) -> RowLayout:
    """Lay out sequences of ``seq_len`` tokens, or rows packed with the documents ``document_ids (B, seq_len)``."""
    config = given(sizes.config)
    made = {kind: _lay_out_blocks(seq_len, document_ids, of_kind, sizes) for kind, of_kind in config.compressed.items()}
    blocks, first, positions = made["cmp"]
    token = torch.arange(seq_len, device=sizes.device) if positions is None else positions.token - positions.start
    return RowLayout(tables_of(token, sizes), blocks, first, positions, positions, sizes=sizes, index=made.get("index"))


def _lay_out_blocks(seq_len: int, document_ids: Tensor | None, config: NSAConfig, sizes: LayoutSizes) -> BlockLayout:
    """Lay out the compressed tokens of ``config``."""
    length = num_compressed(seq_len, config)
    if document_ids is None:
        block = torch.arange(length, device=sizes.device) * config.compress_stride
        return BlockLayout(tables_of(block, sizes), None, None)
    positions = document_positions(document_ids, config)
    first = first_tokens(positions, length, config)
    block = (positions.token - positions.start).gather(1, first.to(torch.int64))
    return BlockLayout(tables_of(block, sizes), first, positions)


def tables_of(positions: Tensor, sizes: LayoutSizes) -> RopeTables:
    """Tabulate the angles at int ``(T,)`` or ``(B, T)`` positions, to be read by all layers of these sizes."""
    return stored_rope_tables(positions, sizes.head_dim, sizes.rope_base, dtype=sizes.dtype)


def step_layout(step: Step, *, head_dim: int, rope_base: float, dtype: torch.dtype) -> RowLayout:
    """Lay out the tokens that follow a cache, and the compressed ones that they complete; ``dtype`` is of the heads."""

    def tables(x: Tensor) -> RopeTables:
        return rope_tables(x, head_dim, rope_base, dtype=torch.promote_types(dtype, torch.float32))

    tokens, positions = tables(step.positions.token), step.positions
    made = {kind: BlockLayout(tables(new.token), new.first_tokens, positions) for kind, new in step.blocks.items()}
    blocks, first_tokens, _ = made["cmp"]
    return RowLayout(tokens, blocks, first_tokens, positions, step.window_positions, index=made.get("index"))
