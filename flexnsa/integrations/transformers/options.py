"""What a model's ``config.flexnsa`` says: the sizes of NSA, and how a model is to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexnsa.argument_checks import check_branches, check_recompute
from flexnsa.attention.implementations import IMPLEMENTATIONS
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.validation import check_choice, check_number, check_type, describe

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
    """

    sizes: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    branches: tuple[str, ...] = ("slc",)
    gates: tuple[float, ...] = (1.0, 1.0, 1.0)
    impl: str = "auto"

    @classmethod
    def of(cls, config: Any) -> DropInOptions:
        """Read a model's ``config.flexnsa``: fields of :class:`flexnsa.NSAConfig` and those above, all optional.

        Raises:
            TypeError: it is no dict, or a value is not of its kind.
            ValueError: a value is out of range, or there is no such option.
        """
        sizes, own = _read(config, ("branches", "gates", "impl"))
        if "gates" in own:
            own["gates"] = _check_gates(own["gates"])
        return cls(sizes=sizes, **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """How the NSA layers of a converted model attend.

    Args:
        sizes: of the branches.
        branches: any of ``cmp``, ``slc``, ``win``, each with keys and values of its own.
        impl: as in :func:`flexnsa.native_sparse_attention`.
        recompute: as in :func:`flexnsa.native_sparse_attention`.
        opening: factor on the gates of all branches but the selected one, which a schedule of training lets grow to 1.
    """

    sizes: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    branches: tuple[str, ...] = BRANCHES
    impl: str = "auto"
    recompute: tuple[str, ...] = ()
    opening: float = 1.0

    @classmethod
    def of(cls, config: Any) -> LayerOptions:
        """Read a model's ``config.flexnsa``; see :meth:`DropInOptions.of`."""
        sizes, own = _read(config, ("branches", "impl", "recompute", "opening"))
        check_number("opening", own.get("opening", 1.0))
        own["recompute"] = check_recompute(own.get("recompute", ()), own.get("branches", BRANCHES))
        return cls(sizes=sizes, **own)


def _read(config: Any, names: Sequence[str]) -> tuple[NSAConfig, dict[str, Any]]:
    """Split ``config.flexnsa`` into sizes and the options of these names, and check what both kinds of models have."""
    given = getattr(config, "flexnsa", None)
    given = {} if given is None else given
    check_type("config.flexnsa", given, Mapping)
    for name in given:
        if name not in (*names, *SIZES):
            raise ValueError(f"config.flexnsa: expected some of {', '.join((*names, *SIZES))}, got {describe(name)}")
    own = {name: given[name] for name in names if name in given}
    if "branches" in own:
        own["branches"] = check_branches(own["branches"])
    check_choice("impl", own.get("impl", "auto"), ("auto", *IMPLEMENTATIONS))
    return NSAConfig(**{name: given[name] for name in SIZES if name in given}), own


def _check_gates(gates: Any) -> tuple[float, ...]:
    if not isinstance(gates, list | tuple) or len(gates) != len(BRANCHES):
        raise ValueError(f"gates: expected a number for each of {BRANCHES}, got {describe(gates)}")
    for gate in gates:
        check_number("gates", gate)
    return tuple(gates)
