"""Overrides of torchtitan that know the names of the nodes that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.config import Configurable
from torchtitan.config.override import _REGISTRY, Override


class NamedOverride(Override):
    """An override whose factory is called with the name of its node, and with those of all nodes, besides the options.

    A plain one is not: its author chooses names, its user cannot. torchtitan first asks of every node whether it
    matches, and then calls the factory for those that do, in the same order.
    """

    def __init__(self, factory: Callable[..., Any], target: type[Configurable.Config], description: str) -> None:
        def named(node: Any, **options: Any) -> Any:
            name = self._names[self._replaced]
            self._replaced += 1
            return factory(node, name=name, names=tuple(self._names), options=options)

        named.__name__ = factory.__name__
        super().__init__(target, named, None, description, factory.__module__)
        self._names: list[str] = []
        self._replaced = 0

    def matches(self, fqn: str) -> bool:
        """Match every node of the target class."""
        if self._replaced or fqn in self._names:  # another config, or the last one could not be replaced
            self._names, self._replaced = [], 0
        self._names.append(fqn)
        return True


def named_override(target: type[Configurable.Config], description: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a factory ``(node, *, name, names, options)``, as torchtitan's ``override`` does a plain one."""

    def register(factory: Callable[..., Any]) -> Callable[..., Any]:
        made = NamedOverride(factory, target, description)
        _REGISTRY[made.name] = made
        return factory

    return register
