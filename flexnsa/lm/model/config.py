"""What a decoder LM is made of, and the named sizes used across the benchmarks."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from flexnsa.checks.calls import check_branches
from flexnsa.checks.scorers import check_masses
from flexnsa.config import NSAConfig
from flexnsa.layers.config import LayerConfig, leaders_of
from flexnsa.layers.presets import PAPER, text
from flexnsa.primitives import check_choice, check_head_counts, check_int, check_positive_int, check_type, describe

_RANGE, _EVERY = re.compile(r"(\d{1,9}):(\d{1,9})"), re.compile(r"every:([1-9]\d{0,8})")


def layer_range(name: str, value: Any, num_layers: int) -> range:
    """Return the layers that ``value`` selects, counted from 0.

    Args:
        name: name of the argument, for errors.
        value: ``"all"`` or True, ``"none"`` or False, ``"0:6"`` or ``(0, 6)`` for 0 to 5, ``"every:2"`` for 0, 2, 4 ...
        num_layers: number of layers of the model.

    Raises:
        TypeError: the value is of another kind.
        ValueError: it is none of these, or exceeds the layers.
    """
    found = _read_range(value, num_layers)
    if found is None or not 0 <= found.start <= found.stop <= num_layers:
        expected = f"expected 'none', 'all', 'every:2' or a range such as '0:1', within 0..{num_layers}"
        kind = ValueError if isinstance(value, str | tuple) else TypeError
        raise kind(f"{name}: {expected}, got {describe(value)}")
    return found


def _read_range(value: Any, num_layers: int) -> range | None:
    if value in ("all", "none") or isinstance(value, bool):
        return range(num_layers if value in ("all", True) else 0)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int) for end in value):
        return range(*value)
    if isinstance(value, str) and (ends := _RANGE.fullmatch(value)):
        return range(int(ends[1]), int(ends[2]))
    if isinstance(value, str) and (every := _EVERY.fullmatch(value)):
        return range(0, num_layers, int(every[1]))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(LayerConfig):
    """Architecture of a :class:`~flexnsa.lm.DecoderLM`: the fields of its attention layers, and those of the model.

    Args:
        num_layers: decoder layers.
        vocab_size: tokens; 256 is one per byte.
        attention: ``nsa``, or ``dense`` for the baseline, which only has the sizes of the heads and ``rope_base``.
        checkpointing: recompute layers in backward: ``none`` (or False), ``all`` (or True), those of a half-open
            range, ``0:6`` (or ``(0, 6)``), or ``every:2``, the first of two.
        share_index: layers for each indexer: of ``k``, the first has it, and the others attend to the blocks that it
            chose. Or the number of the layer whose index it reads, for each layer.

    Raises:
        TypeError: a size is not an int.
        ValueError: a field is out of range, or the heads do not fit each other.
    """

    num_layers: int
    vocab_size: int = 256
    attention: Literal["nsa", "dense"] = "nsa"
    checkpointing: bool | tuple[int, int] | str = False
    share_index: int | tuple[int, ...] = field(default=1, metadata={"needs": ("slc",)})

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        check_masses(self.nsa, "of a language model")
        check_positive_int("num_layers", self.num_layers)
        check_positive_int("vocab_size", self.vocab_size)
        check_choice("attention", self.attention, ("nsa", "dense"))
        layer_range("checkpointing", self.checkpointing, self.num_layers)
        if isinstance(self.share_index, list):  # lists have no hash
            object.__setattr__(self, "share_index", tuple(self.share_index))
        leaders_of(self.share_index, self.num_layers, self.nsa)

    @property
    def leaders(self) -> tuple[int, ...]:
        """For each layer the number of the layer whose index it reads; with dense attention each its own."""
        shared = self.share_index if self.attention == "nsa" else 1
        return leaders_of(shared, self.num_layers, self.nsa)

    def is_checkpointed(self, layer: int) -> bool:
        """Return whether the layer, counted from 0, is recomputed in backward."""
        check_int("layer", layer, 0)
        return layer in layer_range("checkpointing", self.checkpointing, self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderConfig:
        """Undo :meth:`to_dict`, also after a round trip through JSON, which knows no tuples.

        Raises:
            TypeError: not a dict, or a field is not of its kind.
            ValueError: a field is missing, unknown or out of range.
        """
        _check_keys("values", values, cls)
        _check_keys("values['nsa']", values["nsa"], NSAConfig)
        read: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        read["nsa"] = NSAConfig(**values["nsa"])
        return cls(**read)


def _check_keys(name: str, values: Any, cls: type) -> None:
    """Check that the keys are the fields of a dataclass."""
    check_type(name, values, dict)
    expected = [field.name for field in fields(cls)]
    if values.keys() != {*expected}:
        raise ValueError(f"{name}: expected {', '.join(expected)}, got {', '.join(map(str, values))}")


_LARGE = DecoderConfig(dim=768, num_layers=5, num_heads=12, num_kv_heads=2, head_dim=64, **PAPER)
_M7C = replace(_LARGE, num_layers=12, checkpointing=True)
_SMALL_SIZES: dict[str, Any] = {
    "compress_block_size": 16,
    "compress_stride": 8,
    "select_block_size": 32,
    "num_selected_blocks": 8,
    "window_size": 64,
}
_SMALL = replace(
    DecoderConfig(dim=128, num_layers=5, num_heads=8, num_kv_heads=2, head_dim=16, **PAPER),
    nsa=NSAConfig(**_SMALL_SIZES),
)

# Beside each preset, its parameters with NSA and with dense attention, for a vocabulary of 256.
PRESETS: dict[str, DecoderConfig] = {
    "small": _SMALL,  # 1,201,024 and 927,104
    "large": _LARGE,  # 38,407,424 and 30,875,904
    "m7c-125m": _M7C,  # 91,626,240 and 73,550,592
    "m7c-cpu": _M7C,  # the same model; it is trained with smaller batches and shorter sequences
    "text-125m": replace(_LARGE, num_layers=12, **text(12, 2)),  # 100,369,152 and 73,550,592; learned text at 8k best
    "text-small": replace(_SMALL, **text(8, 2, **_SMALL_SIZES)),  # 1,324,544 and 927,104
    "paper": replace(_LARGE, num_layers=12),  # 91,626,240 and 73,550,592; text-125m with the paper's settings
}


def preset(name: str, **overrides: Any) -> DecoderConfig:
    """Return a named config, some of its fields changed: ``preset("large", num_layers=12)``.

    Raises:
        ValueError: there is no such preset, or a field does not fit the others.
    """
    check_choice("preset", name, tuple(PRESETS))
    return changed(PRESETS[name], **overrides)


def changed(config: DecoderConfig, **overrides: Any) -> DecoderConfig:
    """Return the config with other fields, and with what follows from them.

    Options that other branches leave without a meaning are turned off. An indexer with all heads of a group keeps all.
    """
    if "branches" in overrides:
        config = config.with_branches(check_branches(overrides["branches"]))
    old = config.num_heads, config.num_kv_heads
    new = overrides.get("num_heads", old[0]), overrides.get("num_kv_heads", old[1])
    if new != old and config.nsa.index_heads == old[0] // old[1]:
        check_head_counts(*new)
        overrides = {"nsa": replace(config.nsa, index_heads=new[0] // new[1])} | overrides
    return replace(config, **overrides)
