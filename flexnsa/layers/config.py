"""Description of an attention layer, shared by layers, models, commands and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

from flexnsa import primitives
from flexnsa.attention.dispatch import IMPLEMENTATIONS
from flexnsa.checks.calls import check_branches, check_option, check_recompute
from flexnsa.config import BRANCHES, INDEX_FIELDS, NSAConfig
from flexnsa.layers.compression import COMPRESSORS
from flexnsa.layers.gating import check_gate


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchOptions:
    """Options of every NSA layer, the library's own and those of a converted model.

    Args:
        branches: branches to build, of ``cmp``, ``slc`` and ``win``.
        impl: implementation of the attention: ``auto``, ``triton``, ``flex``, ``sdpa`` or ``reference``.
        recompute: branches to run again in backward instead of keeping their activations; in a layer that is
            checkpointed, after all of it has been run again. The results do not depend on it.
        index_rank: rank of the changes that an indexer (``index_heads``) learns to queries and keys; ``None``: full.

    Raises:
        TypeError: a field is not of its kind.
        ValueError: a field is out of range.
    """

    branches: tuple[str, ...] = BRANCHES
    impl: str = "auto"
    recompute: tuple[str, ...] = ()
    index_rank: int | None = None

    def __post_init__(self) -> None:
        check_recompute(self.recompute, check_branches(self.branches))
        primitives.check_choice("impl", self.impl, ("auto", *IMPLEMENTATIONS))
        if self.index_rank is not None:
            primitives.check_positive_int("index_rank", self.index_rank)
        for name in ("branches", "recompute"):  # lists have no hash; the order stays, because files of runs hold it
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig(BranchOptions):
    """Description of a :class:`flexnsa.NativeSparseAttention`.

    A bool field whose metadata ``needs`` branches can only be true in a layer that has them.

    Args:
        dim: width of the input and of the output.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk`` of queries and keys; even, because RoPE rotates pairs.
        v_head_dim: ``Dv``; ``None`` means ``head_dim``.
        nsa: sizes of the three branches.
        compression: how blocks are compressed: ``mean``, ``linear`` or ``mlp``.
        gate: how branches are weighted: ``sigmoid``, each on its own; ``softmax``, with a sum of 1; or ``residual``,
            the selected branch by 1, and a sigmoid for each other.
        rope_base: base of the rotary frequencies; on text of 8k tokens, 1e8 was better than 1e4 (docs/learning.md).
        shared_keys: the compressed branch compresses the selected branch's keys instead of keys of its own.
        begin_as_mean: compressors start as the mean of a block, and learn from there.

    Raises:
        TypeError: a field is not of its kind.
        ValueError: a field is out of range, or does not fit the others.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    nsa: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    compression: str = "mlp"
    gate: str = "sigmoid"
    rope_base: float = 10_000.0
    shared_keys: bool = field(default=False, metadata={"needs": ("cmp", "slc")})
    begin_as_mean: bool = field(default=False, metadata={"needs": ("cmp",)})

    def __post_init__(self) -> None:
        BranchOptions.__post_init__(self)  # not by super(), which does not know classes with slots
        primitives.check_positive_int("dim", self.dim)
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        primitives.check_heads(self.num_heads, self.num_kv_heads, self.head_dim, v_head_dim)
        primitives.check_type("nsa", self.nsa, NSAConfig)
        check_indexer(self.nsa, self.index_rank, self.branches, self.num_heads // self.num_kv_heads)
        primitives.check_choice("compression", self.compression, tuple(COMPRESSORS))
        check_gate(self.gate, self.branches)
        primitives.check_positive_number("rope_base", self.rope_base)
        for option in fields(self):
            if option.type == "bool":  # annotations are strings here
                check_option(option.name, getattr(self, option.name), option.metadata.get("needs", ()), self.branches)

    def with_branches(self, branches: tuple[str, ...]) -> Self:
        """Return the config with other branches; options that these leave without a meaning are turned off.

        A single branch has a sigmoid gate, and so have others without the selected one. A branch that is left out is
        not run again.
        """
        kept = {
            option.name: getattr(self, option.name) if {*option.metadata["needs"]} <= {*branches} else option.default
            for option in fields(self)
            if "needs" in option.metadata
        }
        recompute = tuple(tag for tag in self.recompute if tag in branches)
        gate = "sigmoid" if len(branches) == 1 or (self.gate == "residual" and "slc" not in branches) else self.gate
        if "slc" not in branches:
            kept |= {"nsa": replace(self.nsa, **dict.fromkeys(INDEX_FIELDS)), "index_rank": None}
        return replace(self, branches=branches, recompute=recompute, gate=gate, **kept)


def check_indexer(nsa: NSAConfig, index_rank: int | None, branches: Sequence[str], group: int) -> None:
    """Check that the fields of an indexer fit each other, the branches and the ``group`` query heads of a key head."""
    heads = nsa.index_heads
    if heads is None:
        if index_rank is not None:
            raise ValueError(f"index_rank: expected None without index_heads, got {primitives.describe(index_rank)}")
        return
    if "slc" not in branches:
        raise ValueError(f"index_heads: expected None without the branch slc, got {heads}")
    if nsa.index_score is not None and index_rank is not None:
        raise ValueError(f"index_rank: expected None with index_score={nsa.index_score!r}, got {index_rank}")
    if group % heads:
        raise ValueError(f"index_heads: expected a divisor of the {group} query heads of a key head, got {heads}")


def leaders_of(share_index: int | Sequence[int], num_layers: int, nsa: NSAConfig) -> tuple[int, ...]:
    """Return for each layer the number of the layer whose index it reads, its own or that of one before.

    Args:
        share_index: ``k``: layers 0, ``k``, ``2k`` ... lead, and the others read the index of the nearest leader before
            them; or the numbers to return, one for each layer, counted from 0.
        num_layers: layers that share, in their order.
        nsa: sizes of the layers.

    Raises:
        TypeError: it is neither.
        ValueError: there are more or fewer numbers than layers, one is of a later layer or of one that itself reads
            another's, or the layers have no indexer to share.
    """
    if not isinstance(share_index, Sequence):
        primitives.check_positive_int("share_index", share_index)
        leaders = tuple(number - number % share_index for number in range(num_layers))
    else:
        leaders = tuple(share_index)
        for leader in leaders:
            primitives.check_int("share_index", leader, 0)
        if len(leaders) != num_layers:
            raise ValueError(f"share_index: expected a number for each of {num_layers} layers, got {len(leaders)}")
        for number, leader in enumerate(leaders):
            if leader > number or leaders[leader] != leader:
                expected = "its own number or that of a layer before that reads its own index"
                raise ValueError(f"share_index: expected for layer {number} {expected}, got {leader}")
    if leaders != tuple(range(num_layers)) and nsa.index_heads is None:
        raise ValueError(f"share_index: expected 1 without an indexer (index_heads), got {share_index}")
    return leaders
