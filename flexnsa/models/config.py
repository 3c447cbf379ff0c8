"""What a decoder LM is made of, and the named sizes used across the benchmarks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from flexnsa.argument_checks import check_branches, check_option, check_recompute
from flexnsa.attention.implementations import IMPLEMENTATIONS
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.layers.compression import COMPRESSORS
from flexnsa.layers.gating import check_gate
from flexnsa.models.layer_ranges import layer_range
from flexnsa.validation import (
    check_choice,
    check_int,
    check_positive_int,
    check_positive_number,
    check_type,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Architecture of a :class:`~flexnsa.models.DecoderLM`.

    Args:
        dim: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk`` of queries and keys, even because RoPE turns pairs.
        v_head_dim: ``Dv``; ``None`` means ``head_dim``.
        vocab_size: tokens; 256 is one per byte.
        attention: ``"nsa"``, or ``"dense"`` for the twin that differs in nothing else.
        nsa: sizes of the three branches; used by ``attention="nsa"`` alone, like the six fields that follow.
        compression: ``"mean"``, ``"linear"`` or ``"mlp"``.
        shared_keys: the compressed branch compresses the selected one's keys, rather than keys of its own.
        begin_as_mean: compressors begin as the mean of a block, and learn from there.
        gate: how the branches are weighted.
        branches: the branches to build.
        impl: implementation of the attention functions.
        rope_base: base of the rotary frequencies; text of 8k is learned better with 1e8 (docs/language.md).
        checkpointing: recompute layers in backward: ``"none"`` (or False), ``"all"`` (or True), those of a half-open
            range, ``"0:6"`` (or ``(0, 6)``), or ``"every:2"``, the first of two.
        recompute: branches to run once more in backward instead of keeping what they give; in a layer that is
            checkpointed, after all of it has been run again. For ``attention="nsa"`` alone.

    Raises:
        TypeError: a size is not an int.
        ValueError: a field is out of range, or the heads do not fit each other.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    vocab_size: int = 256
    attention: Literal["nsa", "dense"] = "nsa"
    nsa: NSAConfig = field(default_factory=NSAConfig)
    compression: str = "mlp"
    shared_keys: bool = False
    begin_as_mean: bool = False
    gate: str = "sigmoid"
    branches: tuple[str, ...] = BRANCHES
    impl: str = "auto"
    rope_base: float = 10_000.0
    checkpointing: bool | tuple[int, int] | str = False
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "vocab_size"):
            value = getattr(self, name)
            if name == "v_head_dim" and value is None:
                continue
            check_positive_int(name, value)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, because RoPE turns pairs, got {self.head_dim}")
        check_choice("attention", self.attention, ("nsa", "dense"))
        check_type("nsa", self.nsa, NSAConfig)
        check_choice("compression", self.compression, tuple(COMPRESSORS))
        check_choice("impl", self.impl, ("auto", *IMPLEMENTATIONS))
        check_positive_number("rope_base", self.rope_base)
        branches = check_branches(self.branches)
        check_option("shared_keys", self.shared_keys, ("cmp", "slc"), branches)
        check_option("begin_as_mean", self.begin_as_mean, ("cmp",), branches)
        check_gate(self.gate, len(branches))
        check_recompute(self.recompute, branches)
        layer_range("checkpointing", self.checkpointing, self.num_layers)

    def is_checkpointed(self, layer: int) -> bool:
        """Tell whether the layer, counted from 0, is recomputed in backward."""
        check_int("layer", layer, 0)
        return layer in layer_range("checkpointing", self.checkpointing, self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Undo :meth:`to_dict`, also of an earlier version, and after a round trip through JSON, which knows no tuples.

        Raises:
            TypeError: not a dict, or a field is not of its kind.
            ValueError: a field is missing, unknown or out of range.
        """
        check_type("values", values, dict)
        values = ADDED | values
        _check_keys("values", values, cls)
        _check_keys("values['nsa']", values["nsa"], NSAConfig)
        read: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        read["nsa"] = NSAConfig(**values["nsa"])
        return cls(**read)


ADDED: dict[str, Any] = {"recompute": (), "shared_keys": False, "begin_as_mean": False}
"""Fields that the first version had not, as it would have set them."""


def _check_keys(name: str, values: Any, cls: type) -> None:
    """Demand a dict of the fields of a dataclass."""
    check_type(name, values, dict)
    expected = [field.name for field in fields(cls)]
    if values.keys() != {*expected}:
        raise ValueError(f"{name}: expected {', '.join(expected)}, got {', '.join(map(str, values))}")


_LARGE = DecoderConfig(dim=768, num_layers=5, num_heads=12, num_kv_heads=2, head_dim=64)

PRESETS: dict[str, DecoderConfig] = {
    "small": DecoderConfig(
        dim=128,
        num_layers=5,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        nsa=NSAConfig(
            compress_block_size=16, compress_stride=8, select_block_size=32, num_selected_blocks=8, window_size=64
        ),
    ),
    "large": _LARGE,
    "m7c-125m": replace(_LARGE, num_layers=12, checkpointing=True),
    "m7c-cpu": replace(_LARGE, num_layers=12, checkpointing=True),
    # What learned bytes of text at 8k better than the paper's own choices (docs/language.md).
    "text-125m": replace(_LARGE, num_layers=12, rope_base=1e8, shared_keys=True, begin_as_mean=True),
}


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """Give a named config, some of its fields changed: ``preset("large", num_layers=12)``.

    Raises:
        ValueError: there is no such preset.
    """
    check_choice("preset", name, tuple(PRESETS))
    return replace(PRESETS[name], **overrides)
