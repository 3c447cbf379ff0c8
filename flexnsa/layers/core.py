"""From projected heads to their outputs: rotate, compress, attend. The one way into a layer.

Whole rows, packed documents and the tokens that follow a cache differ in two things only: where tokens stand
(:class:`RowLayout`), and which keys and values a branch reads beside those of the new tokens (:class:`KeySource`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flexnsa.attention.implementations import attend
from flexnsa.attention.seam import Call, Implementation, Keys, NSAAux
from flexnsa.config import NSAConfig
from flexnsa.decoding.steps import Step
from flexnsa.geometry import num_compressed
from flexnsa.layers.rope import RopeTables, apply_rope, rope_tables, stored_rope_tables
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.positions import Positions
from flexnsa.validation import describe


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer projects its input to, before rotation.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: by branch, ``(B, Hkv, T, Dk)``.
        v: by branch, ``(B, Hkv, T, Dv)``.
        gates: ``(B, Hq, T, 3)``.
    """

    q: Tensor
    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    gates: Tensor


class Compressors(NamedTuple):
    """Modules ``(raw (B, Hkv, S, D), first_tokens (B, N) or None)`` to ``(B, Hkv, N, D)``; None for a missing branch.

    Where there is no compressed branch, ``k`` makes what blocks are scored by.
    """

    k: nn.Module | None
    v: nn.Module | None


class KeySource(Protocol):
    """Which keys or values a branch reads, given those of the new tokens; ``name`` is as in :class:`Keys`."""

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Give those of all tokens, for the selected branch."""
        ...

    def of_window(self, name: str, new: Tensor) -> Tensor:
        """Give those of the last tokens."""
        ...

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Give the compressed ones, of which ``compress`` makes those that the new tokens complete."""
        ...


class RowKeys:
    """Whole rows read what they bring; see :class:`KeySource`."""

    def of_tokens(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002, D102
        return new

    def of_window(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002, D102
        return new

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG002, D102
        return compress(new)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where tokens and compressed tokens stand, the same in every layer: it is made once a forward pass.

    Args:
        tokens: rotary tables of the tokens.
        blocks: rotary tables of the compressed tokens, each at its block's first token.
        first_tokens: int ``(B, N)``, where blocks begin among the raw keys; None for every ``d``.
        positions: of the queries among the keys of the selected and compressed branch; None for one whole sequence.
        window_positions: among those of the window.
        source: of the keys that whole rows read; None where they read what they bring.
    """

    tokens: RopeTables
    blocks: RopeTables
    first_tokens: Tensor | None = None
    positions: Positions | None = None
    window_positions: Positions | None = None
    source: KeySource | None = None

    def require(self, x: Tensor, document_ids: Tensor | None, *, head_dim: int, cached: bool) -> None:
        """Demand to be one that a layer with heads of this size can have made for ``x (B, T, dim)``.

        Raises:
            ValueError: of other tokens or heads, or ``document_ids`` come too, or a cache that is to hold whole rows.
        """
        if document_ids is not None:
            raise ValueError(f"document_ids: expected None with a layout, got {describe(document_ids)}")
        shape = self.tokens.cos.shape
        rows, tokens, dim = shape[0] if len(shape) == 4 else 1, shape[-2], 2 * shape[-1]
        if rows not in (1, len(x)) or (tokens, dim) != (x.shape[1], head_dim):
            expected = f"{x.shape[1]} tokens in {len(x)} rows and head_dim={head_dim}, as x and the layer have"
            raise ValueError(f"layout: expected {expected}, got {tokens} tokens in {rows} rows and head_dim={dim}")
        if cached and self.source is not None:
            raise ValueError("layout: expected one of whole rows with a cache, got tokens that are spread over ranks")


def row_layout(
    seq_len: int,
    document_ids: Tensor | None,
    *,
    config: NSAConfig,
    head_dim: int,
    rope_base: float,
    dtype: torch.dtype,
    device: torch.device,
) -> RowLayout:
    """Lay out whole sequences of ``seq_len`` tokens, or rows packed with the documents ``document_ids (B, seq_len)``.

    ``dtype`` is that in which heads are turned.
    """
    length = num_compressed(seq_len, config)
    if document_ids is None:
        token = torch.arange(seq_len, device=device)
        block = torch.arange(length, device=device) * config.compress_stride
        positions = blocks = None
    else:
        positions = document_positions(document_ids, config)
        blocks = first_tokens(positions, length, config)
        token = positions.token - positions.start
        block = token.gather(1, blocks.to(torch.int64))
    tokens, block_tables = (stored_rope_tables(x, head_dim, rope_base, dtype=dtype) for x in (token, block))
    return RowLayout(tokens, block_tables, blocks, positions, positions)


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
        layout: where these stand.
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
    out, aux = attend(implementation, q, keys, heads.gates, call, branches=branches, recompute=recompute)
    return out, keys, aux
