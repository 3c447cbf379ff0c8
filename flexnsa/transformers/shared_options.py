"""``config.flexnsa`` in a model with several towers: each tower has the options of the whole model, or its own."""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from flexnsa.transformers.choice import towers

OPTIONS = "flexnsa"
"""The attribute of a config, and the key in config.json."""


def share_options() -> None:
    """Make options that are set in a config of transformers apply to its towers, as ``attn_implementation`` does."""
    PreTrainedConfig.flexnsa = property(_get, _set, _delete)  # pyright: ignore[reportAttributeAccessIssue]


def _get(config: Any) -> Any:
    try:
        return vars(config)[OPTIONS]
    except KeyError:
        raise AttributeError(f"{type(config).__name__!r} object has no attribute {OPTIONS!r}") from None


def _set(config: Any, options: Any) -> None:
    """Set the options of a model, and of all its towers that have no others."""
    before = vars(config).get(OPTIONS)
    vars(config)[OPTIONS] = options
    for tower in towers(config).values():
        if getattr(tower, OPTIONS, None) in (None, before, options):
            tower.flexnsa = options


def _delete(config: Any) -> None:
    _set(config, None)
    del vars(config)[OPTIONS]
