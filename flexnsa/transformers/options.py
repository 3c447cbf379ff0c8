"""What a model's config says: how to use NSA and its sizes in ``config.flexnsa``, elsewhere those of MSA and QSA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexnsa.attention.dispatch import IMPLEMENTATIONS
from flexnsa.checks.calls import check_branches, check_recompute
from flexnsa.config import BRANCHES, INDEX_FIELDS, NSAConfig
from flexnsa.layers.config import BranchOptions
from flexnsa.primitives import check_choice, check_number, check_positive_number, check_type, describe
from flexnsa.transformers.local_layers import MSA, QSA, SELECTING, check_local, nsa_types
from flexnsa.transformers.rotary import STYLES

SIZES = tuple(field.name for field in fields(NSAConfig))


@dataclass(frozen=True, kw_only=True, slots=True)
class DropInOptions:
    """How a model with ``attn_implementation="flexnsa"`` attends: by default within the selected blocks alone.

    That is exact for a dense model up to ``num_selected_blocks * select_block_size`` tokens, and the nearest that there
    is to it beyond, without any training.

    Args:
        sizes: of the branches.
        branches: any of ``cmp``, ``slc``, ``win``; all of them read the model's own keys and values, compressed by
            their mean.
        gates: of ``cmp``, ``slc`` and ``win``, the same for every token: there is nothing to learn them from.
        impl: as in :func:`flexnsa.native_sparse_attention`.
        local: attention of sliding and chunked layers, a name as for ``attn_implementation``; by default ``sdpa``, or
            ``eager`` where the model does not support that.
    """

    sizes: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    branches: tuple[str, ...] = ("slc",)
    gates: tuple[float, ...] = (1.0, 1.0, 1.0)
    impl: str = "auto"
    local: str | None = None

    def __post_init__(self) -> None:
        check_local(self.local)
        check_choice("impl", self.impl, ("auto", *IMPLEMENTATIONS))
        object.__setattr__(self, "branches", check_branches(self.branches))
        if not isinstance(self.gates, list | tuple) or len(self.gates) != len(BRANCHES):
            raise ValueError(f"gates: expected a number for each of {BRANCHES}, got {describe(self.gates)}")
        for gate in self.gates:
            check_number("gates", gate)
        object.__setattr__(self, "gates", tuple(self.gates))

    @classmethod
    def of(cls, config: Any) -> DropInOptions:
        """Read a model's ``config.flexnsa``: fields of :class:`flexnsa.NSAConfig` and those above, all optional.

        Raises:
            TypeError: it is no dict, or a value is not of its kind.
            ValueError: a value is out of range, or there is no such option.
        """
        return cls(**_read(config, OF_DROP_IN, tuple(name for name in SIZES if name not in INDEX_FIELDS)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions(BranchOptions):
    """How the NSA layers of a converted model attend: by the options of every NSA layer, and these.

    Args:
        sizes: of the branches.
        opening: factor on the gates of all branches but the selected one; a schedule of training raises it to 1.
        local: as of :class:`DropInOptions`.
        rotary: how heads are rotated, one of :data:`flexnsa.transformers.rotary.STYLES`, or one for each layer.
        softcap: scores are kept within it of 0.
        share_index: whose index each layer reads, see :func:`flexnsa.layers.config.leaders_of`.
    """

    sizes: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    opening: float = 1.0
    local: str | None = None
    rotary: str | tuple[str, ...] = STYLES[0]
    softcap: float | None = None
    share_index: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        BranchOptions.__post_init__(self)
        check_local(self.local)
        check_number("opening", self.opening)
        if self.softcap is not None:
            check_positive_number("softcap", self.softcap)
        for style in [self.rotary] if isinstance(self.rotary, str) else self.rotary:
            check_choice("rotary", style, STYLES)
        if not isinstance(self.rotary, str):
            object.__setattr__(self, "rotary", tuple(self.rotary))
        object.__setattr__(self, "branches", check_branches(self.branches))
        object.__setattr__(self, "recompute", check_recompute(self.recompute, self.branches))

    @classmethod
    def of(cls, config: Any) -> LayerOptions:
        """Read a model's ``config.flexnsa``; see :meth:`DropInOptions.of`."""
        return cls(**_read(config, OF_LAYERS, SIZES))

    def is_like(self, other: LayerOptions) -> bool:
        """Return whether all options are equal; torch.compile cannot compare them where one is a symbol to it."""
        same = (getattr(self, name) == getattr(other, name) for name in OF_LAYERS)
        return self.sizes.to_ints() == other.sizes.to_ints() and all(same)

    def rotary_of(self, layer: int) -> str:
        """Return how heads of a layer are rotated."""
        return self.rotary if isinstance(self.rotary, str) else self.rotary[layer]


OF_DROP_IN, OF_LAYERS = (
    tuple(field.name for field in fields(options) if field.name != "sizes") for options in (DropInOptions, LayerOptions)
)


def _read(config: Any, names: Sequence[str], of_sizes: Sequence[str]) -> dict[str, Any]:
    """Return the options and the sizes of these names that ``config.flexnsa`` sets."""
    options = getattr(config, "flexnsa", None)
    options = {} if options is None else options
    check_type("config.flexnsa", options, Mapping)
    for name in options:
        if name not in (*names, *of_sizes):
            raise ValueError(f"config.flexnsa: expected some of {', '.join((*names, *of_sizes))}, got {describe(name)}")
    sizes = NSAConfig(**{name: options[name] for name in of_sizes if name in options})
    return {"sizes": sizes} | {name: options[name] for name in names if name in options}


OF_MSA = {
    "select_block_size": "index_block_size",
    "num_selected_blocks": "index_topk_blocks",
    "num_local_blocks": "index_local_blocks",
    "index_head_dim": "index_head_dim",
}
"""Sizes of :meth:`flexnsa.NSAConfig.msa`, and their names in a config of transformers."""


def selecting_sizes(config: Any) -> NSAConfig | None:
    """Return the sizes with which a model's layers select; None for a dense model.

    Raises:
        ValueError: NSA cannot select so; the message names what does not fit.
    """
    kind = nsa_types(config)[0]
    if kind not in SELECTING:
        return None
    name = "index_n_heads" if kind == MSA else "indexer_n_heads"
    heads, rest = divmod(getattr(config, name), config.num_key_value_heads)
    if rest:
        expected = f"a multiple of num_key_value_heads, {config.num_key_value_heads}, of a model to convert"
        raise ValueError(f"{name}: expected {expected}, got {getattr(config, name)}")
    if kind == MSA:
        return NSAConfig.msa(index_heads=heads, **{own: getattr(config, name) for own, name in OF_MSA.items()})
    size, dim = config.indexer_compress_ratio, config.indexer_head_dim
    selected = config.indexer_budget // size + 1
    return NSAConfig.qsa(select_block_size=size, num_selected_blocks=selected, index_heads=heads, index_head_dim=dim)


def write_sizes(config: Any, sizes: NSAConfig) -> None:
    """Write the sizes of converted layers into the config of a model that selects.

    Raises:
        ValueError: there are blocks that no such model selects.
    """
    kind, size = nsa_types(config)[0], sizes.select_block_size
    if kind == QSA:
        config.indexer_compress_ratio, config.indexer_budget = size, size * (sizes.num_selected_blocks - 1)
    if kind == MSA:
        if sizes.num_init_blocks:
            raise ValueError(f"num_init_blocks: expected 0 of layers that become MSA, got {sizes.num_init_blocks}")
        for own, name in OF_MSA.items():
            setattr(config, name, getattr(sizes, own))
