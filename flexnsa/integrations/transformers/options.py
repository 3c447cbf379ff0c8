"""What the attention of a model that knows nothing of NSA reads from ``config.flexnsa``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flexnsa.argument_checks import check_branches
from flexnsa.attention.implementations import IMPLEMENTATIONS
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.validation import check_choice, check_number, check_type, describe

SIZES = tuple(field.name for field in fields(NSAConfig))


@dataclass(frozen=True, kw_only=True, slots=True)
class DropInOptions:
    """How a pretrained model attends: by default within the selected blocks alone.

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
        given = getattr(config, "flexnsa", None)
        if given is None:
            return cls()
        check_type("config.flexnsa", given, Mapping)
        own = {name: given[name] for name in ("branches", "gates", "impl") if name in given}
        sizes = {name: value for name, value in given.items() if name not in own}
        for name in sizes:
            if name not in SIZES:
                expected = ", ".join(["branches", "gates", "impl", *SIZES])
                raise ValueError(f"config.flexnsa: expected some of {expected}, got {describe(name)}")
        if "branches" in own:
            own["branches"] = check_branches(own["branches"])
        if "gates" in own:
            own["gates"] = _check_gates(own["gates"])
        check_choice("impl", own.get("impl", "auto"), ("auto", *IMPLEMENTATIONS))
        return cls(sizes=NSAConfig(**sizes), **own)


def _check_gates(gates: Any) -> tuple[float, ...]:
    if not isinstance(gates, list | tuple) or len(gates) != len(BRANCHES):
        raise ValueError(f"gates: expected a number for each of {BRANCHES}, got {describe(gates)}")
    for gate in gates:
        check_number("gates", gate)
    return tuple(gates)
