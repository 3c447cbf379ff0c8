"""What config.json says of a model's attention: a model that attends by flexnsa comes back as one.

transformers saves no ``attn_implementation``: to it, that is a choice of whoever loads a model. So a model would come
back with dense attention, and nobody would be told. It reads what is saved, though.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

NAME = "flexnsa"
"""What ``attn_implementation`` has to say."""

ToDict = Callable[[Any], dict[str, Any]]


def save_choice() -> None:
    """Let each config of transformers whose attention is flexnsa say so: to save one is to make a dict of it."""
    PreTrainedConfig.to_dict = _saying(PreTrainedConfig.to_dict)  # pyright: ignore[reportAttributeAccessIssue]


def check_choice_counts(config: Any) -> None:
    """Demand a model that takes its attention from transformers' interface: others go on to use their own.

    Raises:
        ValueError: transformers says that this one does not.
    """
    if not _takes_choice(type(config)):
        raise ValueError(
            f"attn_implementation: expected {NAME!r} of a model that takes its attention from transformers' interface, "
            f"got it of one with a {type(config).__name__}"
        )


@cache
def _takes_choice(config_class: type) -> bool:
    """Tell whether models with such configs have an attention that can be chosen; of strangers it is not known."""
    model_class: Any = MODEL_MAPPING.get(config_class, None)  # pyright: ignore[reportArgumentType]
    return not isinstance(model_class, type) or model_class._can_set_attn_implementation()  # pyright: ignore


def _saying(to_dict: ToDict) -> ToDict:
    @wraps(to_dict)
    def say(config: Any) -> dict[str, Any]:
        choice = {"attn_implementation": NAME} if getattr(config, "_attn_implementation", None) == NAME else {}
        return to_dict(config) | choice

    return say
