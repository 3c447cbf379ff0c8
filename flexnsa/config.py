"""The sizes that define a Native Sparse Attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from flexnsa.primitives import check_choice, check_head_counts, check_int

INDEX_FIELDS = ("index_block_size", "index_stride", "index_heads", "index_head_dim", "index_score")
"""Fields of the indexer, None without one."""
INDEX_SCORES = (None, "max", "relu")

BRANCHES: tuple[str, ...] = ("cmp", "slc", "win")
"""Branch tags in the order of the gates: compressed, selected, sliding window."""
GATES = ("sigmoid", "softmax", "residual")
"""Kinds of gates, see :class:`flexnsa.layers.config.LayerConfig`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NSAConfig:
    """Sizes of the three branches, in tokens or blocks (NSA paper, section 3.3 and table 1).

    The defaults are the paper's. A layer with a config has the paper's other settings, too, unless it is given
    ``preset="text"``; :meth:`for_text` makes the sizes that go with that preset.

    Args:
        compress_block_size: ``l``, tokens summarised by one compressed token.
        compress_stride: ``d``, tokens between the starts of two compressed tokens; divides ``l`` and ``l'``.
        select_block_size: ``l'``, tokens of one selection block.
        num_selected_blocks: ``n``, blocks that each query attends to, forced ones included.
        num_init_blocks: first blocks of the sequence, always selected.
        num_local_blocks: last blocks up to and including the query's own, always selected.
        window_size: ``w``, keys of the sliding window, the query itself included.
        index_block_size: tokens summarised by one index key; ``None``: ``compress_block_size``.
        index_stride: tokens between the starts of two index keys, which divides ``index_block_size`` and ``l'``;
            ``None``: ``compress_stride``.
        index_heads: index queries for each key head, which score the blocks by index keys; ``None``: the compressed
            branch scores them, as in the paper.
        index_head_dim: of index queries and keys with an ``index_score``, even; ``None``: that of the layer's heads.
        index_score: ``"max"``: the score of a block is its largest product of the index query and a key, as in MSA
            (:meth:`msa`); ``"relu"``: the sum of the positive products of all index queries and the block's one key, as
            in QSA (:meth:`qsa`); ``None``: the mass of the softmax over index keys.

    Raises:
        TypeError: a size is not an int.
        ValueError: a field is out of range, or the sizes do not fit each other.
    """

    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    num_init_blocks: int = 1
    num_local_blocks: int = 2
    window_size: int = 512
    index_block_size: int | None = None
    index_stride: int | None = None
    index_heads: int | None = None
    index_head_dim: int | None = None
    index_score: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "index_score" and (value is not None or field.name not in INDEX_FIELDS):
                least = 0 if field.name in ("num_init_blocks", "num_local_blocks") else 1
                check_int(field.name, value, least)
        blocks = {"compress_block_size": self.compress_block_size, "select_block_size": self.select_block_size}
        _check_multiples("compress_stride", self.compress_stride, **blocks)
        if self.index_heads is None:
            for name in INDEX_FIELDS:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected None without index_heads, got {getattr(self, name)!r}")
        else:
            length, stride = self._index_sizes()
            _check_multiples("index_stride", stride, index_block_size=length, select_block_size=self.select_block_size)
        dim = self.index_head_dim
        if dim is not None and (dim % 2 or self.index_score is None):
            raise ValueError(f"index_head_dim: expected an even number with an index_score, None without, got {dim}")
        if self.index_score is not None:
            check_choice("index_score", self.index_score, INDEX_SCORES[1:])
            of_key, others = 1, {"index_heads": 1}
            if self.index_score == "relu":
                of_key, others = self.select_block_size, {"num_init_blocks": 0, "num_local_blocks": 1}
            sizes = *self._index_sizes(), *(getattr(self, name) for name in others)
            if sizes != (of_key, of_key, *others.values()):
                names = ", ".join(("index_block_size", "index_stride", *others))
                expected = ", ".join(map(str, (of_key, of_key, *others.values())))
                raise ValueError(f"{names}: expected {expected} with index_score={self.index_score!r}, got {sizes}")
        forced = self.num_init_blocks + self.num_local_blocks
        if forced > self.num_selected_blocks:
            raise ValueError(
                "num_selected_blocks: expected at least num_init_blocks + num_local_blocks = "
                f"{self.num_init_blocks} + {self.num_local_blocks} = {forced}, got {self.num_selected_blocks}"
            )

    @classmethod
    def for_text(cls, num_heads: int, num_kv_heads: int, **sizes: int) -> NSAConfig:
        """Return the sizes that learned text best: the paper's, with an indexer (docs/learning.md).

        The indexer has an index query for each query head, and a key for every 8 tokens.

        Args:
            num_heads: query heads of the layer.
            num_kv_heads: its key heads, which divide them.
            **sizes: fields that differ.

        Raises:
            TypeError: a number is not an int.
            ValueError: the numbers do not fit each other.
        """
        check_head_counts(num_heads, num_kv_heads)
        index = {"index_block_size": 8, "index_stride": 8, "index_heads": num_heads // num_kv_heads}
        return cls(**dict[str, Any](index | sizes))

    @classmethod
    def msa(cls, **sizes: int) -> NSAConfig:
        """Return the sizes of MSA (arXiv 2606.13392), MiniMax-M3's attention: a layer with the branch ``slc`` alone.

        A query attends to 16 blocks of 128 tokens, its own among them. The other 15 are those with the best keys by the
        products of an index query for each key head and an index key for each token, which all heads share.

        ``sizes`` are fields that differ; errors are those of :meth:`for_text`.
        """
        ones = dict.fromkeys(("index_block_size", "index_stride", "index_heads"), 1)
        return cls._selecting(128, {"index_score": "max"} | ones | sizes)

    @classmethod
    def qsa(cls, **sizes: int) -> NSAConfig:
        """Return the sizes of QSA, the attention of Qwen's ``qwen4_exp``: a layer with the branch ``slc`` alone.

        A query attends to 512 complete blocks of 4 tokens, and to the tokens of an incomplete one, which is counted in
        the 513 of ``num_selected_blocks``. The key of a block is the mean of its tokens' index keys, one head of which
        serves 2 index queries for each key head; all heads attend to the same blocks. A query at the end of a block has
        no incomplete one, and its own block competes like the others.

        ``sizes`` are fields that differ; errors are those of :meth:`for_text`.
        """
        size = sizes.get("select_block_size", 4)
        index = {"index_block_size": size, "index_stride": size, "index_heads": 2, "num_selected_blocks": 513}
        return cls._selecting(4, {"index_score": "relu"} | index | sizes)

    @classmethod
    def _selecting(cls, block: int, sizes: dict[str, Any]) -> NSAConfig:
        """Make sizes for the branch ``slc`` alone, with one block forced."""
        block = sizes.get("select_block_size", block)
        check_int("select_block_size", block, 1)
        blocks = dict.fromkeys(("compress_block_size", "compress_stride", "select_block_size"), block)  # not compressed
        forced = {"num_init_blocks": 0, "num_local_blocks": 1}
        return cls(**dict[str, Any](blocks | forced | sizes))

    @property
    def ahead(self) -> int:
        """Tokens from a query to the one whose block is its last candidate: 1 in QSA, where that has no score, or 0."""
        return int(self.index_score == "relu")

    @property
    def strides_per_block(self) -> int:
        """Compressed tokens that begin in a selection block, ``l' / d``."""
        return self.select_block_size // self.compress_stride

    def _index_sizes(self) -> tuple[int, int]:
        length = self.compress_block_size if self.index_block_size is None else self.index_block_size
        return length, self.compress_stride if self.index_stride is None else self.index_stride

    @property
    def scoring(self) -> NSAConfig:
        """The config whose compressed tokens are the keys that score blocks: index keys, if there are any."""
        if self.index_heads is None:
            return self
        length, stride = self._index_sizes()
        index: dict[str, Any] = dict.fromkeys(INDEX_FIELDS)
        if self.index_score is not None:
            index |= {"index_heads": self.index_heads, "index_score": self.index_score}
        return replace(self, compress_block_size=length, compress_stride=stride, **index)

    @property
    def compressed(self) -> dict[str, NSAConfig]:
        """The configs of compressed tokens, by kind: ``cmp``, and ``index`` for index keys, if there are any."""
        return {"cmp": self} | ({} if self.index_heads is None else {"index": self.scoring})

    def to_ints(self) -> tuple[int, ...]:
        """Return the config as integers, for operators of :mod:`torch.library`, which take no dataclass."""
        # operator.index makes them constants under torch.compile(dynamic=True). astuple would deepcopy, which
        # torch 2.11 cannot compile. 0 stands for None.
        sizes = (getattr(self, field.name) or 0 for field in fields(self) if field.name != "index_score")
        return *map(operator.index, sizes), INDEX_SCORES.index(self.index_score)

    @classmethod
    def from_ints(cls, sizes: Sequence[int]) -> NSAConfig:
        """Build a config from the integers of :meth:`to_ints`."""
        return _from_ints(tuple(sizes))


@cache
def _from_ints(sizes: tuple[int, ...]) -> NSAConfig:
    named: dict[str, Any] = {field.name: size for field, size in zip(fields(NSAConfig), sizes, strict=True)}
    for name in INDEX_FIELDS:
        named[name] = named[name] or None
    named["index_score"] = INDEX_SCORES[named["index_score"] or 0]
    return NSAConfig(**named)


def _check_multiples(divisor: str, value: int, **multiples: int) -> None:
    for name, size in multiples.items():
        if size % value:
            raise ValueError(f"{name}: expected a multiple of {divisor}={value}, got {size}")


def gated_branches(gate: str, branches: Sequence[str]) -> tuple[str, ...]:
    """Return the branches that a kind of gate weights; the others have weight 1."""
    return tuple(tag for tag in branches if gate != "residual" or tag != "slc")


def kind_of(name: str) -> str:
    """Return the kind of a buffer by its name: ``slc`` for ``k_slc``, and for ``k`` of a dense layer."""
    return name.partition("_")[2] or "slc"


def num_compressed(seq_len: int, config: NSAConfig) -> int:
    """Return ``N``, the number of compressed tokens: one block of ``l`` tokens starts every ``d``, if it is complete.

    The query at position ``seq_len - 1`` sees all of them.
    """
    count = (seq_len - config.compress_block_size) // config.compress_stride + 1
    return count if count > 0 else 0  # exporters put their own max in place of Python's, and know less of what it gives


def num_blocks(seq_len: int, config: NSAConfig) -> int:
    """Return ``M``, the number of selection blocks of a sequence; the last one may be incomplete."""
    return -(-seq_len // config.select_block_size)


def num_free_blocks(seq_len: int, config: NSAConfig) -> int:
    """Return how many blocks the last query of a sequence chooses from: its candidates that are not forced."""
    return max(0, num_blocks(seq_len + config.ahead, config) - config.num_init_blocks - config.num_local_blocks)


def blocks_within(num_keys: int, config: NSAConfig) -> int:
    """Return an upper bound of ``M`` for sequences with ``num_keys`` compressed tokens; at most one too many."""
    return max(1, num_blocks(num_keys * config.compress_stride + config.compress_block_size - 1, config))


def overlap_band(config: NSAConfig) -> tuple[int, tuple[int, ...]]:
    """Return the weights with which compressed tokens count for a selection block (NSA paper, Eq. 9).

    Returns ``(first, weights)``: compressed token ``j * l'/d + first + o`` shares ``weights[o] * d`` tokens with
    block ``j``, for every ``j``. For ``l, d, l'`` of 32, 16, 64 that is ``(-1, (1, 2, 2, 2, 1))``.
    """
    length = config.compress_block_size // config.compress_stride
    offsets = range(1 - length, config.strides_per_block)
    return offsets[0], tuple(min(o + length, config.strides_per_block) - max(o, 0) for o in offsets)
