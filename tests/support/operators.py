"""Which operators of the package run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Keep the arguments of each call inside, by the operator's name in this package."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = defaultdict[str, list[tuple[Any, ...]]](list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flexnsa":
            self.calls[func.overloadpacket.__name__].append(args)
        return func(*args, **(kwargs or {}))
