"""What a decoder LM is made of, and the named sizes used across the benchmarks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from flexnsa.checks import check_choice, check_positive_int
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES


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
        nsa: sizes of the three branches; used by ``attention="nsa"`` alone, like the four fields that follow.
        compression: ``"mean"``, ``"linear"`` or ``"mlp"``.
        gate: how the branches are weighted.
        branches: the branches to build.
        impl: implementation of the attention functions.
        rope_base: base of the rotary frequencies.
        checkpointing: recompute layers in backward: all, none, or those in the half-open range ``(first, last)``.

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
    gate: str = "sigmoid"
    branches: tuple[str, ...] = BRANCHES
    impl: str = "auto"
    rope_base: float = 10_000.0
    checkpointing: bool | tuple[int, int] = False

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
        if not isinstance(self.checkpointing, bool):
            first, last = self.checkpointing
            if not 0 <= first <= last <= self.num_layers:
                raise ValueError(
                    f"checkpointing: expected a bool or a range within 0..{self.num_layers}, got {self.checkpointing}"
                )

    def is_checkpointed(self, layer: int) -> bool:
        """Tell whether the layer is recomputed in backward."""
        if isinstance(self.checkpointing, bool):
            return self.checkpointing
        first, last = self.checkpointing
        return first <= layer < last

    def to_dict(self) -> dict[str, Any]:
        """Give plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Undo :meth:`to_dict`, also after a round trip through JSON, which knows no tuples."""
        checkpointing = values["checkpointing"]
        return cls(
            **values
            | {
                "nsa": NSAConfig(**values["nsa"]),
                "branches": tuple(values["branches"]),
                "checkpointing": checkpointing if isinstance(checkpointing, bool) else tuple(checkpointing),
            }
        )


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
}


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """Give a named config, some of its fields changed: ``preset("large", num_layers=12)``.

    Raises:
        ValueError: there is no such preset.
    """
    check_choice("preset", name, tuple(PRESETS))
    return replace(PRESETS[name], **overrides)
