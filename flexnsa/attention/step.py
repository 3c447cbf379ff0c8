"""The contract of a whole decoding step: from projected tokens and a cache to the heads' outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.config import BRANCHES, GATES, NSAConfig, num_compressed
from flexnsa.masks.user_mods import ScoreMod, SoftCap, cap_of

COMPRESSORS = {"mean": 0, "linear": 2, "mlp": 3}
"""Kinds of compressors, and how many parameters each has."""


class StepArguments(NamedTuple):
    """A step as an operator takes it; ``tensors`` are all others."""

    lengths: Tensor
    reached: Tensor
    buffers: Sequence[Tensor]
    new_lengths: Tensor | None
    tensors: Sequence[Tensor]
    sizes: Sequence[int]
    factors: Sequence[float]


def buffer_names(branches: Sequence[str], indexed: bool = False, follows: bool = False) -> list[str]:
    """List the buffers that a layer needs.

    Selection needs index keys, or compressed ones even without their branch, or nothing in a layer that ``follows``.
    """
    names = ["k_index", "k_index_tail"] if indexed else []
    if "cmp" in branches or ("slc" in branches and not indexed and not follows):
        names += ["k_cmp", "k_tail"]
    if "cmp" in branches:
        names += ["v_cmp", "v_tail"]
    for tag in ("slc", "win"):
        if tag in branches:
            names += [f"k_{tag}", f"v_{tag}"]
    return names


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """The parameters of a compressor.

    Args:
        kind: one of :data:`COMPRESSORS`.
        position: ``(l, D)``, added to a block.
        weight: ``(H, l * D)``, of the first projection.
        out: ``(D, H)``, of the second.
    """

    kind: str
    position: Tensor | None = None
    weight: Tensor | None = None
    out: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """List those that this kind has."""
        return [x for x in (self.position, self.weight, self.out) if x is not None]


@dataclass(frozen=True, slots=True)
class IndexInputs:
    """What an indexer makes of the new tokens, before rotation.

    Args:
        q: ``(B, T, Hkv * H * Dk)``.
        k: ``(B, T, Hkv * Dk)``.
        phi: the compressor of index keys.
    """

    q: Tensor
    k: Tensor
    phi: CompressorWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """``T`` new tokens of each sequence after projection, and the cache that they are added to.

    Args:
        q: ``(B, T, Hq * Dk)``, before rotation.
        k: by branch, ``(B, T, Hkv * Dk)``, before rotation.
        v: by branch, ``(B, T, Hkv * Dv)``.
        gates: ``(B, T, Hq * gated branches)``, before their activation.
        gate: the activation, one of :data:`flexnsa.config.GATES`, or ``none``, with ``tables``.
        phi_k: the compressor of keys; None where no branch reads compressed keys.
        phi_v: the compressor of values; None without the compressed branch.
        buffers: of the cache, by name; written to.
        lengths: int32 ``(B,)``, tokens of each sequence; written to.
        reached: int32 ``(B,)``, the largest lengths so far; written to.
        new_lengths: int ``(B,)``, contiguous, how many of the new tokens are not padding; None for all.
        max_seq_len: tokens that a sequence can hold.
        num_heads: ``Hq``.
        config: sizes of the branches.
        scale: factor on the scores.
        rope_base: of the rotary frequencies, without ``frequencies``.
        frequencies: ``(Dk / 2,)``, radians by which each rotary pair turns in a token.
        rope_scale: factor on everything that is rotated.
        index: of an indexer, which then scores the blocks; None where compressed keys do.
        block_indices: int32 ``(B, Hkv, T, n)``, of the layer that this one follows; None where blocks are scored.
        tables: of a step made by :meth:`in_pages`; None for a cache, in which each sequence has one page.
        score_mod: None or a soft cap.
    """

    q: Tensor
    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    gates: Tensor
    gate: str
    phi_k: CompressorWeights | None = None
    phi_v: CompressorWeights | None = None
    buffers: Mapping[str, Tensor]
    lengths: Tensor
    reached: Tensor
    new_lengths: Tensor | None = None
    max_seq_len: int
    num_heads: int
    config: NSAConfig
    scale: float
    rope_base: float = 10_000.0
    frequencies: Tensor | None = None
    rope_scale: float = 1.0
    index: IndexInputs | None = None
    block_indices: Tensor | None = None
    tables: Mapping[str, Tensor] | None = None
    score_mod: ScoreMod | None = None

    @classmethod
    def in_pages(
        cls,
        q: Tensor,
        q_index: Tensor | None,
        gates: Tensor,
        buffers: Mapping[str, Tensor],
        tables: Mapping[str, Tensor],
        *,
        max_seq_len: int,
        config: NSAConfig,
        scale: float,
        block_indices: Tensor | None = None,
    ) -> StepInputs:
        """Describe a step that attends to pages, which hold its new tokens already.

        Args:
            q: rotated, ``(B, T, Hq, Dk)``.
            q_index: of an indexer, rotated, ``(B, T, Hkv * H, Dk)``.
            gates: the weights of all branches, ``(B, T, Hq, branches)``.
            buffers: by name, ``(pages, Hkv, states, D)``; keys and values of a state may share a row. A compressed
                token is state ``(its last token) // d`` of a sequence.
            tables: by kind of buffer, int32 ``(B, pages of a sequence)``.
            max_seq_len: tokens of the longest sequence, or more.
            config: sizes of the branches.
            scale: factor on the scores.
            block_indices: as above.
        """
        unread, no_lengths = q.new_empty(0), q.new_empty(0, dtype=torch.int32)
        index = None if q_index is None else IndexInputs(q_index.flatten(2), unread, CompressorWeights("mean"))
        return cls(
            q=q.flatten(2),
            k={},
            v={},
            gates=gates.flatten(2),
            gate="none",
            buffers=buffers,
            lengths=no_lengths,
            reached=no_lengths,
            max_seq_len=max_seq_len,
            num_heads=q.shape[2],
            config=config,
            scale=scale,
            index=index,
            block_indices=block_indices,
            tables=tables,
        )

    @property
    def branches(self) -> list[str]:
        """List the branches of the layer; a scorer has none."""
        return [tag for tag in BRANCHES if f"v_{tag}" in self.buffers]

    @property
    def dims(self) -> tuple[int, int]:
        """The sizes ``(Dk, Dv)`` of a head's keys and values."""
        sizes = {name[0]: buffer.shape[-1] for name, buffer in self.buffers.items()}
        return sizes["k"], sizes.get("v", sizes["k"])

    @property
    def chooses(self) -> bool:
        """Whether blocks are scored and selected."""
        return self.block_indices is None and ("slc" in self.branches or not self.branches)

    @property
    def slots(self) -> dict[str, int]:
        """The tokens or compressed tokens that a step may read, by kind of buffer."""
        if self.tables is None:
            return {name.partition("_")[2]: buffer.shape[2] - 1 for name, buffer in self.buffers.items()}
        longest, window = self.max_seq_len, self.config.window_size + self.q.shape[1] - 1
        sizes = {"cmp": num_compressed(longest, self.config), "slc": longest, "win": window}
        return {tag: size for tag, size in sizes.items() if f"k_{tag}" in self.buffers}

    @property
    def scorer(self) -> StepInputs:
        """The step of a layer whose compressed keys are the index keys: its scores select the blocks."""
        if self.index is None:
            return self
        index, tables = self.index, self.tables
        names = {"k_index": "k_cmp", "k_index_tail": "k_tail"}
        buffers = {names[name]: buffer for name, buffer in self.buffers.items() if name in names}
        return replace(
            self,
            q=index.q,
            k={"slc": index.k},
            v={"slc": index.k},
            phi_k=index.phi,
            phi_v=None,
            buffers=buffers,
            num_heads=index.q.shape[-1] // buffers["k_cmp"].shape[-1],
            config=self.config.scoring,
            index=None,
            tables=None if tables is None else {"cmp": tables["index"]},
        )

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Allocate the heads' outputs ``(B, T, Hq * Dv)`` and the blocks that are selected, if any."""
        (batch, num_tokens), kv_heads = self.q.shape[:2], next(iter(self.buffers.values())).shape[1]
        width = self.dims[1] * self.num_heads
        selected = self.config.num_selected_blocks if self.chooses else 0
        blocks = self.lengths.new_empty(batch, kv_heads, num_tokens, selected)
        return self.q.new_empty(batch, num_tokens, width), blocks

    def to_args(self) -> StepArguments:
        """Write the inputs as an operator takes them; buffers are those of the branches, in their order."""
        branches = [tag for tag in BRANCHES if tag in self.k]
        index, blocks = self.index, self.block_indices
        phis = self.phi_k, self.phi_v, None if index is None else index.phi
        return StepArguments(
            self.lengths,
            self.reached,
            [self.buffers[name] for name in buffer_names(branches, index is not None, blocks is not None)],
            self.new_lengths,
            [
                self.q,
                self.gates,
                *(x[tag] for tag in branches for x in (self.k, self.v)),
                *([] if index is None else [index.q, index.k]),
                *([] if blocks is None else [blocks]),
                *(x for phi in phis if phi is not None for x in phi.parameters),
                *([] if self.frequencies is None else [self.frequencies]),
            ],
            [
                *(int(tag in branches) for tag in BRANCHES),
                *(-1 if phi is None else list(COMPRESSORS).index(phi.kind) for phi in phis),
                int(blocks is not None),
                GATES.index(self.gate),
                self.num_heads,
                self.max_seq_len,
                *self.config.to_ints(),
            ],
            [self.scale, self.rope_base, self.rope_scale, cap_of(self.score_mod) or 0.0],
        )

    @classmethod
    def from_args(cls, arguments: StepArguments) -> StepInputs:
        """Undo :meth:`to_args`."""
        lengths, reached, buffers, new_lengths, tensors, sizes, factors = arguments
        has_branches, kinds, (follows, gate, num_heads, max_seq_len, *config) = sizes[:3], sizes[3:6], sizes[6:]
        branches = [tag for tag, has in zip(BRANCHES, has_branches, strict=True) if has]
        scale, rope_base, rope_scale, cap = factors
        left = iter(tensors)

        def compressor(number: int) -> CompressorWeights | None:
            if number < 0:
                return None
            kind, count = list(COMPRESSORS.items())[number]
            return CompressorWeights(kind, *(next(left) for _ in range(count)))

        q, gates = next(left), next(left)
        pairs = {tag: (next(left), next(left)) for tag in branches}
        of_index = [next(left) for _ in "qk" if kinds[2] >= 0]
        block_indices = next(left) if follows else None
        phi_k, phi_v, phi_index = map(compressor, kinds)
        return cls(
            q=q,
            k={tag: k for tag, (k, _) in pairs.items()},
            v={tag: v for tag, (_, v) in pairs.items()},
            gates=gates,
            gate=GATES[gate],
            phi_k=phi_k,
            phi_v=phi_v,
            buffers=dict(zip(buffer_names(branches, phi_index is not None, bool(follows)), buffers, strict=True)),
            lengths=lengths,
            reached=reached,
            new_lengths=new_lengths,
            max_seq_len=max_seq_len,
            num_heads=num_heads,
            config=NSAConfig.from_ints(config),
            scale=scale,
            rope_base=rope_base,
            frequencies=next(left, None),
            rope_scale=rope_scale,
            index=None if phi_index is None else IndexInputs(of_index[0], of_index[1], phi_index),
            block_indices=block_indices,
            score_mod=SoftCap(cap) if cap else None,
        )


StepFunction = Callable[[StepInputs], tuple[Tensor, Tensor | None]]
"""Add the tokens to the cache and attend from them to all of it, without waiting for the device.

Returns the heads' outputs ``(B, T, Hq * Dv)``, NaN for tokens without capacity, and the selected blocks, int32
``(B, Hkv, T, n)``, with the selected branch. A call may take no more tokens than the cache's ``max_rewind`` and
:data:`flexnsa.attention.plan.STEP_TOKENS`.
"""
