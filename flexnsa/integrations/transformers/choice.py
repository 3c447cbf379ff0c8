"""What config.json says of a model's attention: a model that attends by flexnsa comes back as one.

transformers saves no ``attn_implementation``: to it, that is a choice of whoever loads a model. So a model would come
back with dense attention, and nobody would be told.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

NAME = "flexnsa"
"""What ``attn_implementation`` has to say."""


class Choice(str):
    """:data:`NAME`, as an attribute of a config: saved as long as the config's attention is that, and else as None.

    To save a config, or to copy it, is to copy its attributes.
    """

    __slots__ = ("_config",)

    def __new__(cls, config: Any) -> Choice:
        """Stand for the attention of this config."""
        choice = super().__new__(cls, NAME)
        choice._config = weakref.ref(config)
        return choice

    def __deepcopy__(self, memo: dict[int, Any]) -> Choice | str | None:
        """Stand for the attention of the config's copy; without one, say what it is now."""
        config = self._config()
        if id(config) in memo:
            return Choice(memo[id(config)])
        return NAME if config is None or config._attn_implementation == NAME else None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Be pickled as what it says."""
        return str, (NAME,)


def note_choice(config: Any) -> None:
    """Let a config that attends by flexnsa be saved as one, except inside of a compiler."""
    if config is not None and not torch.compiler.is_compiling() and not hasattr(config, "attn_implementation"):
        config.attn_implementation = Choice(config)
