"""Options of the override, as its JSON names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexnsa.checks.calls import check_branches, check_option, check_recompute
from flexnsa.checks.scorers import check_masses
from flexnsa.config import NSAConfig
from flexnsa.layers.compression import COMPRESSORS
from flexnsa.layers.config import BranchOptions, LayerConfig
from flexnsa.layers.indexer import SAMPLED_QUERIES
from flexnsa.optim import COMPRESSOR_LR, INDEXER_LR
from flexnsa.primitives import check_choice, check_int, check_number, check_positive_int, check_type, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(BranchOptions):
    """How the NSA layers of a model of torchtitan attend and learn: by the options of every NSA layer, and these.

    Args:
        sizes: of the branches; the override takes its fields by their own names.
        compression: how blocks are compressed: ``mean``, ``linear`` or ``mlp``; learned ones start as the mean.
        shared_keys: the compressed branch compresses the selected branch's keys instead of keys of its own.
        layers: ``all``, or patterns of the layers to replace, such as ``layers.[0-3].*``; the others stay dense.
        share_index: whose index each NSA layer reads, see :func:`flexnsa.layers.config.leaders_of`.
        packed: rows may hold several documents, which positions that restart at 0 separate; False: each row is one.
        warmup: the selected branch attends to all past tokens, and indexers alone learn, from the shares of all blocks.
        selection_loss_weight: factor on the loss that teaches indexers.
        num_queries: queries of each sequence that teach indexers in a step.
        seed: chooses these queries, with the step.
        compressor_lr: learning rate of compressors, relative to that of the parameters around them.
        indexer_lr: learning rate of indexers, likewise.

    Raises:
        TypeError: an option is not of its kind.
        ValueError: an option is out of range, or does not fit the others.
    """

    sizes: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    compression: str = "linear"
    shared_keys: bool = False
    layers: str | tuple[str, ...] = "all"
    share_index: int | Sequence[int] = 1
    packed: bool = True
    warmup: bool = False
    selection_loss_weight: float = 1.0
    num_queries: int = SAMPLED_QUERIES
    seed: int = 0
    compressor_lr: float = COMPRESSOR_LR
    indexer_lr: float = INDEXER_LR

    def __post_init__(self) -> None:
        BranchOptions.__post_init__(self)
        branches = check_branches(self.branches)
        if "slc" not in branches:
            raise ValueError(f"branches: expected slc among them, which has the dense layer's keys, got {branches}")
        object.__setattr__(self, "branches", branches)
        object.__setattr__(self, "recompute", check_recompute(self.recompute, branches))
        check_masses(self.sizes, "of layers in torchtitan")
        check_choice("compression", self.compression, tuple(COMPRESSORS))
        check_option("shared_keys", self.shared_keys, ("cmp", "slc"), branches)
        if not isinstance(self.layers, str):
            check_type("layers", self.layers, Sequence)
            for pattern in self.layers:
                check_type("layers", pattern, str)
            object.__setattr__(self, "layers", tuple(self.layers))
        check_type("packed", self.packed, bool)
        check_type("warmup", self.warmup, bool)
        if self.warmup and not (self.has_indexer and self.indexer_lr):
            raise ValueError("warmup: expected False without indexers that learn, got True")
        check_positive_int("num_queries", self.num_queries)
        check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("selection_loss_weight", "compressor_lr", "indexer_lr"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {describe(getattr(self, name))}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Read the options that JSON gives: the fields of this class but ``sizes``, and those of the sizes.

        Raises:
            TypeError: an option is not of its kind.
            ValueError: there is no such option, or it is out of range.
        """
        sizes, own = ({field.name for field in fields(kind)} for kind in (NSAConfig, cls))
        own -= {"sizes"}
        of_model = {field.name for field in fields(LayerConfig)} - own - sizes
        for name, value in given.items():
            if name in of_model:
                raise ValueError(f"{name}: expected none of a layer that starts as a dense one, got {describe(value)}")
            if name not in own | sizes:
                raise ValueError(f"options: expected some of {', '.join(sorted(own | sizes))}, got {describe(name)}")
        config = NSAConfig(**{name: value for name, value in given.items() if name in sizes})
        return cls(sizes=config, **{name: value for name, value in given.items() if name in own})

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer scores the blocks."""
        return self.sizes.index_heads is not None
