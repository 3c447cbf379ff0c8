"""Which keys the branches of a step read: those of the cache and its own; of whole rows, their own alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexnsa.decoding.cache import NSACache
from flexnsa.decoding.steps import Step


class CachedKeys:
    """The keys of a cache and of one step; see :class:`flexnsa.layers.core.KeySource`."""

    def __init__(self, cache: NSACache, step: Step) -> None:
        self.cache, self.step = cache, step

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Store them, and give all slots; what is in those of the future is seen by no query."""
        self.cache.store(name, new, self.step)
        return self.cache.all(name)

    def of_window(self, name: str, new: Tensor) -> Tensor:
        """Give the last tokens and the new ones; see :meth:`NSACache.extend`."""
        return self.cache.extend(name, new, self.step)

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Add to the tail, compress the blocks that are now complete, if any, and give all compressed ones."""
        tail = name.replace("cmp", "tail")
        if self.step.emits:
            self.cache.store(name, compress(self.cache.extend(tail, new, self.step)), self.step)
        else:
            self.cache.keep(tail, new, self.step)
        return self.cache.all(name)


class KeptKeys:
    """The keys of whole rows, which go into an empty cache too; see :class:`flexnsa.layers.core.KeySource`."""

    def __init__(self, cache: NSACache, step: Step) -> None:
        self.cache, self.step = cache, step

    def of_tokens(self, name: str, new: Tensor) -> Tensor:
        """Store them; nobody sees them before the step ends."""
        self.cache.store(name, new, self.step)
        return new

    of_window = of_tokens

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Store the tail and the compressed ones."""
        self.cache.store(name.replace("cmp", "tail"), new, self.step)
        return self.of_tokens(name, compress(new))
