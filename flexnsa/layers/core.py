"""From projected heads to the keys of all branches; :mod:`flexnsa.layers.forward` is the way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from flexnsa.attention.interface import Call, Implementation, Keys, Scorer, given
from flexnsa.layers.indexer import IndexHeads, SharedIndex
from flexnsa.layers.joint_compression import compress_both
from flexnsa.layers.layouts import KeySource, RowKeys, RowLayout
from flexnsa.layers.rope import RopeTables, apply_rope
from flexnsa.masks.user_mods import mod_of_index_heads


@dataclass(frozen=True, slots=True)
class Read:
    """What one call of attention read: rotated queries, keys and values, and the blocks that it selected.

    Args:
        raw_q: queries ``(B, Hq, T, Dk)``, not rotated.
        tables: rotary tables of the queries.
        q: rotated.
        keys: and values of the branches.
        call: with the positions of the queries.
        block_indices: int32 ``(B, Hkv, T, n)``; None without the selected branch.
        scorer: of the layer's indexer, or of the one that it follows and teaches.
        implementation: who computed the branches.
    """

    raw_q: Tensor
    tables: RopeTables
    q: Tensor
    keys: Keys
    call: Call
    block_indices: Tensor | None
    scorer: Scorer | None
    implementation: Implementation


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer projects its input to, before rotation.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: by branch, ``(B, Hkv, T, Dk)``.
        v: by branch, ``(B, Hkv, T, Dv)``.
        gates: by branch, ``(B, Hq, T)``; a branch that has none has weight 1.
        index: of an indexer, if the layer has one.
        signed: whether a gate may be negative.
    """

    q: Tensor
    k: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    gates: Mapping[str, Tensor]
    index: IndexHeads | None = None
    signed: bool = False


class Compressors(NamedTuple):
    """Modules ``(raw (B, Hkv, S, D), first_tokens (B, N) or None)`` to ``(B, Hkv, N, D)``; None for a missing branch.

    Blocks are scored by index keys, which ``phi_index`` compresses unless each is of one token, or else by compressed
    ones: without the compressed branch, ``k`` compresses the selected one's for that.
    """

    k: nn.Module | None
    v: nn.Module | None
    phi_index: Callable[[Tensor, Tensor | None], Tensor] | None = None


def collect_keys(
    heads: Heads,
    layout: RowLayout,
    compressors: Compressors,
    source: KeySource,
    call: Call,
    branches: Sequence[str],
    index: SharedIndex | None = None,
) -> tuple[Tensor, Keys, Scorer | None]:
    """Rotate and compress what new tokens were projected to, and get all keys that the branches read.

    Args:
        heads: of the new tokens, with keys and values of the branches.
        layout: their positions.
        compressors: of keys and values.
        source: of all keys and values.
        call: what the branches share.
        branches: of the layer.
        index: of the layer that this one follows.

    Returns:
        The rotated queries, keys and values, and the scorer of :class:`Read`.
    """
    both, blocks = None, layout.blocks["cmp"]
    if "cmp" in branches and isinstance(source, RowKeys) and blocks.first_tokens is None:
        both = compress_both(compressors.k, compressors.v, heads.k["cmp"], heads.v["cmp"])

    def compress_keys(raw: Tensor) -> Tensor:
        k_cmp = given(compressors.k)(raw, blocks.first_tokens) if both is None else both[0]
        return apply_rope(k_cmp, blocks.tables)

    def compress_values(raw: Tensor) -> Tensor:
        return given(compressors.v)(raw, blocks.first_tokens) if both is None else both[1]

    q = apply_rope(heads.q, layout.tokens)
    read: dict[str, Tensor] = {}
    if "cmp" in branches:
        read["v_cmp"] = source.of_blocks("v_cmp", heads.v["cmp"], compress_values)
    scorer = None
    if heads.index is not None:
        index_keys = _index_keys(heads.index, layout, compressors, source)
        scorer = _scorer(apply_rope(heads.index.q, layout.tokens), index_keys, heads.q, layout, call)
    elif index is not None and index.q is not None:
        scorer = _scorer(index.q, given(index.k), heads.q, layout, call)
    chooses = "slc" in branches and scorer is None and index is None  # by means of the selected branch's own keys
    if "cmp" in branches or chooses:
        raw = heads.k["cmp" if "cmp" in branches else "slc"]
        read["k_cmp"] = source.of_blocks("k_cmp", raw, compress_keys)
    if "slc" in branches:
        read["k_slc"] = source.of_tokens("k_slc", apply_rope(heads.k["slc"], layout.tokens))
        read["v_slc"] = source.of_tokens("v_slc", heads.v["slc"])
    if "win" in branches:
        read["k_win"] = source.of_window("k_win", apply_rope(heads.k["win"], layout.tokens))
        read["v_win"] = source.of_window("v_win", heads.v["win"])
    return q, Keys(**read), scorer


def _index_keys(index: IndexHeads, layout: RowLayout, compressors: Compressors, source: KeySource) -> Tensor:
    """Compress and rotate index keys, or rotate those of single tokens."""
    blocks, phi = layout.blocks["index"], compressors.phi_index
    if phi is None:
        return source.of_tokens("k_index", apply_rope(index.k, layout.tokens))

    def compress(raw: Tensor) -> Tensor:
        return apply_rope(phi(raw, blocks.first_tokens), blocks.tables)

    return source.of_blocks("k_index", index.k, compress)


def _scorer(q: Tensor, k: Tensor, of_layer: Tensor, layout: RowLayout, call: Call) -> Scorer:
    """Locate index queries among index keys, with a scale for their dims."""
    positions, mod = layout.blocks["index"].positions, mod_of_index_heads(call.score_mod, of_layer.shape[1], q.shape[1])
    dim = call.config.index_head_dim
    scale = call.scale if dim is None else call.scale * (of_layer.shape[3] / dim) ** 0.5
    return Scorer(q, k, Call(call.config.scoring, scale, mod, positions, positions))
