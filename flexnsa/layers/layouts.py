"""Where the tokens of a call stand, and which keys they read: whole sequences, packed documents, steps on a cache.

They differ in two things only: the positions of tokens (:class:`RowLayout`), and which keys and values a branch reads
besides those of the new tokens (:class:`KeySource`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.cache.steps import Step
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.layers.rope import RopeTables, rope_tables, stored_rope_tables
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.masks.positions import Positions
from flexnsa.primitives import describe


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

    def rotate(self, *positions: Tensor) -> list[RopeTables]:
        """Tabulate the angles as :class:`Rotate` says, to be read by all layers of these sizes."""
        return [stored_rope_tables(x, self.head_dim, self.rope_base, dtype=self.dtype) for x in positions]


Rotate = Callable[..., Sequence[RopeTables]]
"""``(*positions)``: tabulate angles at several int ``(T,)`` or ``(B, T)`` positions, those of the tokens first.

All at once, because some embeddings look at the largest position.
"""


class BlockLayout(NamedTuple):
    """Positions of compressed tokens, or index keys.

    Args:
        tables: rotary tables, each at its block's first token.
        first_tokens: int ``(B, N)``, where blocks begin among the raw keys; None for every ``d``.
        positions: of the queries among them.
    """

    tables: RopeTables
    first_tokens: Tensor | None
    positions: Positions | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of tokens, made once a forward pass for all layers of the same sizes.

    Args:
        tokens: rotary tables of the tokens.
        positions: of packed tokens in their documents, or of tokens that follow a cache; None for one whole sequence.
        source: of the keys that whole sequences read; None where they read their own.
        sizes: of the layer that made it; None if other layers must not share it.
    """

    tokens: RopeTables
    _: KW_ONLY
    positions: Positions | None = None
    source: KeySource | None = None
    sizes: LayoutSizes | None = None

    @property
    def block_starts(self) -> dict[str, Tensor]:
        """Where the blocks of packed tokens begin, int ``(B, N)``, by kind of buffer; here there are none."""
        return {}


@dataclass(frozen=True, slots=True)
class RowLayout(Layout):
    """Positions of tokens and compressed tokens.

    Args:
        blocks: by kind of buffer, ``cmp`` and, in a layer with an indexer, ``index``.
        window_positions: of the queries among the keys of the window; ``positions`` are those among all others.
        num_ranks: how many ranks share the tokens of a sequence.
    """

    blocks: Mapping[str, BlockLayout]
    window_positions: Positions | None = None
    num_ranks: int = 1

    @property
    def block_starts(self) -> dict[str, Tensor]:
        """Where the blocks of packed tokens begin, by kind of buffer."""
        return {kind: x.first_tokens for kind, x in self.blocks.items() if x.first_tokens is not None}


def check_layout(layout: Layout, x: Tensor, document_ids: Tensor | None, sizes: LayoutSizes) -> None:
    """Check that a layer of these sizes would make such a layout for ``x (B, T, dim)``; no values are read.

    Raises:
        ValueError: it is of other tokens or of a layer of other sizes, or ``document_ids`` come too.
    """
    if document_ids is not None:
        raise ValueError(f"document_ids: expected None with a layout, got {describe(document_ids)}")
    shape = layout.tokens.cos.shape
    rows, tokens = shape[0] if len(shape) == 4 else 1, shape[-2]
    if rows not in (1, x.shape[0]) or tokens != x.shape[1]:
        expected = f"{x.shape[1]} tokens in {x.shape[0]} rows, as x has"
        raise ValueError(f"layout: expected {expected}, got {tokens} tokens in {rows} rows")
    if layout.sizes == sizes:  # all at once, because this is compiled too
        return
    for field in fields(sizes):
        expected, came = getattr(sizes, field.name), getattr(layout.sizes, field.name, None)
        if came != expected:
            raise ValueError(f"layout: expected {field.name}={expected}, as the layer has it, got {came}")


def row_layout(seq_len: int, document_ids: Tensor | None, sizes: LayoutSizes) -> RowLayout:
    """Lay out sequences of ``seq_len`` tokens, or rows packed with the documents ``document_ids (B, seq_len)``."""
    return lay_out_rows(seq_len, document_ids, given(sizes.config), sizes.rotate, sizes.device, sizes)


def lay_out_rows(
    seq_len: int,
    document_ids: Tensor | None,
    config: NSAConfig,
    rotate: Rotate,
    device: torch.device,
    sizes: LayoutSizes | None = None,
) -> RowLayout:
    """Lay out rows as :func:`row_layout` does, of a layer that rotates in its own way."""
    found = {kind: _locate_blocks(seq_len, document_ids, x, device) for kind, x in config.compressed.items()}
    *_, positions = found["cmp"]
    token = torch.arange(seq_len, device=device) if positions is None else positions.token - positions.start
    tokens, *tables = rotate(token, *(first for first, *_ in found.values()))
    kinds = zip(tables, found.items(), strict=True)
    blocks = {kind: BlockLayout(table, first, where) for table, (kind, (_, first, where)) in kinds}
    return RowLayout(tokens, blocks=blocks, window_positions=positions, positions=positions, sizes=sizes)


def _locate_blocks(
    seq_len: int, document_ids: Tensor | None, config: NSAConfig, device: torch.device
) -> tuple[Tensor, Tensor | None, Positions | None]:
    """Return the positions of compressed tokens in their documents, and the fields of :class:`BlockLayout`."""
    length = num_compressed(seq_len, config)
    if document_ids is None:
        return torch.arange(length, device=device) * config.compress_stride, None, None
    positions = document_positions(document_ids, config)
    first = first_tokens(positions, length, config)
    return (positions.token - positions.start).gather(1, first.to(torch.int64)), first, positions


def step_layout(step: Step, *, head_dim: int, rope_base: float, dtype: torch.dtype) -> RowLayout:
    """Lay out the tokens that follow a cache, and the compressed ones that they complete; ``dtype`` is of the heads."""

    def rotate(*positions: Tensor) -> list[RopeTables]:
        wide = torch.promote_types(dtype, torch.float32)
        return [rope_tables(x, head_dim, rope_base, dtype=wide) for x in positions]

    return lay_out_cached(step, rotate)


def lay_out_cached(step: Step, rotate: Rotate) -> RowLayout:
    """Lay out a step as :func:`step_layout` does, of a layer that rotates in its own way."""
    positions = step.positions
    tokens, *tables = rotate(positions.token, *(new.token for new in step.blocks.values()))
    kinds = zip(tables, step.blocks.items(), strict=True)
    blocks = {kind: BlockLayout(table, new.first_tokens, positions) for table, (kind, new) in kinds}
    # By keywords: Dynamo of torch 2.11 binds others to the fields of the base class first
    return RowLayout(tokens, blocks=blocks, window_positions=step.window_positions, positions=positions)
