"""Small random models of every causal type that transformers has, and how far flexnsa is from dense attention.

``python -m tests.integrations.transformers.model_types [type ...]`` compares all of them in a few minutes, a line each:
a whole row, a row padded on the left, two documents packed in one, and positions with a gap beside a mask of ones.
A type whose layers are not all full attention, or that needs more than a few small numbers, says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import flexnsa.transformers  # noqa: F401  (registers the attention)
from tests.integrations.transformers.families import ALL, tokens
from tests.integrations.transformers.sweep import tiny_model

PACKED = torch.cat((torch.arange(25), torch.arange(15)))[None]
GAP = torch.cat((torch.arange(25), torch.arange(30, 45)))[None]


def use_flexnsa(model: Any) -> None:
    """Attend to all blocks by flexnsa from now on."""
    model.config.get_text_config().flexnsa = ALL
    model.set_attn_implementation("flexnsa")
    if model.config.get_text_config()._attn_implementation != "flexnsa":
        raise ValueError("transformers cannot exchange its attention")


def logits(model: Any, first: int = 0, last: int = 40, **how: Any) -> Tensor:
    """Predict behind the tokens from ``first`` to ``last``, always the same."""
    with torch.no_grad():
        return model(input_ids=tokens(1, 40)[:, first:last], use_cache=False, **how).logits


def alone(model: Any) -> Tensor:
    """Predict behind the tokens of two documents, each for itself."""
    return torch.cat((logits(model, 0, 25), logits(model, 25, 40)), 1)


def differences(kind: str) -> dict[str, float]:
    """Compare a type with dense attention: the largest difference of any logit, by call."""
    whole = torch.ones(1, 40, dtype=torch.int64)
    padded = torch.where(torch.arange(40) < 11, 0, whole)
    calls: dict[str, Callable[[Any], Tensor]] = {
        "whole": logits,
        "padded": lambda model: logits(model, attention_mask=padded)[:, 11:],
        "packed": lambda model: logits(model, position_ids=PACKED),
        "gap": lambda model: logits(model, position_ids=GAP, attention_mask=whole),
    }
    model = tiny_model(kind)
    want = {name: call(model) for name, call in (calls | {"packed": alone}).items()}
    use_flexnsa(model)
    return {name: float((call(model) - want[name]).abs().max()) for name, call in calls.items()}


def main(kinds: list[str]) -> None:
    """Print a line for each type."""
    logging.set_verbosity_error()
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            line = "  ".join(f"{name} {difference:.0e}" for name, difference in differences(kind).items())
        except Exception as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
        print(f"{kind:24} {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
