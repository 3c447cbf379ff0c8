"""From projected heads to their outputs: rotate, compress, attend; :mod:`flexnsa.layers.forward` is the way in.

Whole sequences, packed documents and the tokens that follow a cache differ in two things only: the positions of tokens
(:class:`RowLayout`), and which keys and values a branch reads besides those of the new tokens (:class:`KeySource`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flexnsa.attention.seam import Call, Implementation, Keys, NSAAux, given
from flexnsa.attention.table import attend
from flexnsa.cache.steps import Step
from flexnsa.checks.primitives import describe
from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed
from flexnsa.layers.rope import RopeTables, apply_rope, rope_tables, stored_rope_tables
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.positions import Positions


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer projects its input to, before rotation.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: by branch, ``(B, Hkv, T, Dk)``.
        v: by branch, ``(B, Hkv, T, Dv)``.
        gates: ``(B, Hq, T, 3)``; None of a layer that has no gates.
    """

    q: Tensor
    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    gates: Tensor | None


class Compressors(NamedTuple):
    """Modules ``(raw (B, Hkv, S, D), first_tokens (B, N) or None)`` to ``(B, Hkv, N, D)``; None for a missing branch.

    Blocks are scored by compressed keys: without the compressed branch, ``k`` compresses the selected one's for that.
    """

    k: nn.Module | None
    v: nn.Module | None


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
    """

    tokens: RopeTables
    blocks: RopeTables
    first_tokens: Tensor | None = None
    positions: Positions | None = None
    window_positions: Positions | None = None
    source: KeySource | None = None
    sizes: LayoutSizes | None = None


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
    def first_tokens(self) -> Tensor | None:
        """Where blocks begin; see :class:`RowLayout`."""
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
    length = num_compressed(seq_len, config)
    if document_ids is None:
        token = torch.arange(seq_len, device=sizes.device)
        block = torch.arange(length, device=sizes.device) * config.compress_stride
        positions = blocks = None
    else:
        positions = document_positions(document_ids, config)
        blocks = first_tokens(positions, length, config)
        token = positions.token - positions.start
        block = token.gather(1, blocks.to(torch.int64))
    tokens, block_tables = (tables_of(x, sizes) for x in (token, block))
    return RowLayout(tokens, block_tables, blocks, positions, positions, sizes=sizes)


def tables_of(positions: Tensor, sizes: LayoutSizes) -> RopeTables:
    """Tabulate the angles at int ``(T,)`` or ``(B, T)`` positions, to be read by all layers of these sizes."""
    return stored_rope_tables(positions, sizes.head_dim, sizes.rope_base, dtype=sizes.dtype)


def step_layout(step: Step, *, config: NSAConfig, head_dim: int, rope_base: float, dtype: torch.dtype) -> RowLayout:
    """Lay out the tokens that follow a cache, and the compressed ones that they complete; ``dtype`` is of the heads."""
    tokens, blocks = (
        rope_tables(x, head_dim, rope_base, dtype=torch.promote_types(dtype, torch.float32))
        for x in (step.positions.token, step.block * config.compress_stride)
    )
    return RowLayout(tokens, blocks, step.first_tokens, step.positions, step.window_positions)


def attend_heads(
    heads: Heads,
    layout: RowLayout,
    compressors: Compressors,
    source: KeySource,
    implementation: Implementation,
    call: Call,
    branches: Sequence[str],
    recompute: Sequence[str] = (),
) -> tuple[Tensor, Keys, NSAAux]:
    """Attend from projected heads.

    Args:
        heads: of the new tokens.
        layout: their positions.
        compressors: of keys and values.
        source: of all keys and values.
        implementation: who computes the branches.
        call: what these share.
        branches: those to compute; heads has their keys and values.
        recompute: those to run again in backward instead of keeping what they give.

    Returns:
        The heads' outputs ``(B, Hq, T, Dv)``, the keys and values that were read, and what the branches gave.
    """

    def compress_keys(raw: Tensor) -> Tensor:
        assert compressors.k is not None
        return apply_rope(compressors.k(raw, layout.first_tokens), layout.blocks)

    def compress_values(raw: Tensor) -> Tensor:
        assert compressors.v is not None
        return compressors.v(raw, layout.first_tokens)

    implementation.check(q=heads.q)  # before anything is stored
    for tag in branches:
        implementation.check(**{f"k_{tag}": heads.k[tag], f"v_{tag}": heads.v[tag]})
    q = apply_rope(heads.q, layout.tokens)
    read: dict[str, Tensor] = {}
    if "cmp" in branches:
        read["v_cmp"] = source.of_blocks("v_cmp", heads.v["cmp"], compress_values)
    if "cmp" in branches or "slc" in branches:  # blocks are scored by compressed keys, be they of the selected branch
        raw = heads.k["cmp" if "cmp" in branches else "slc"]
        read["k_cmp"] = source.of_blocks("k_cmp", raw, compress_keys)
    if "slc" in branches:
        read["k_slc"] = source.of_tokens("k_slc", apply_rope(heads.k["slc"], layout.tokens))
        read["v_slc"] = source.of_tokens("v_slc", heads.v["slc"])
    if "win" in branches:
        read["k_win"] = source.of_window("k_win", apply_rope(heads.k["win"], layout.tokens))
        read["v_win"] = source.of_window("v_win", heads.v["win"])
    keys = Keys(**read)
    out, aux = attend(implementation, q, keys, given(heads.gates), call, branches=branches, recompute=recompute)
    return out, keys, aux
