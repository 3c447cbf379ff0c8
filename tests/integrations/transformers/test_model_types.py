"""Types of models that take their documents, masks and positions from different places, all as their dense models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.transformers.families import tokens
from tests.integrations.transformers.model_types import differences, use_flexnsa
from tests.integrations.transformers.sweep import tiny_model

BY_MASK = ("ctrl", "fuyu", "gpt_bigcode", "moshi", "persimmon", "whisper")
"""Their layers hand no positions to the attention; packed documents saw each other, and logits differed by 1.5 to 5."""
BY_POSITIONS = ("bert", "biogpt", "opt")
"""Their masks are not told of positions, and the dense models mix documents."""
BY_BOTH = ("cohere", "deepseek_v3", "gpt2", "gpt_neox", "llama", "phi3", "qwen3_moe", "stablelm")
UNUSED = ("cohere2", "exaone4", "llama4_text")
"""They make masks of sliding windows or chunks, though none of these layers have them."""


@pytest.mark.parametrize("kind", BY_MASK + BY_POSITIONS + BY_BOTH + UNUSED)
def test_a_type_of_models_is_its_dense_model(kind: str) -> None:
    assert max(differences(kind).values()) < 1e-4, differences(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bigbird_pegasus", "is_causal: expected True"),
        ("gemma2", "softcap: expected None"),
        ("gpt_oss", "s_aux: expected None"),
        ("doge", r"attention_mask: expected \(B, S\)"),
    ],
)
def test_a_type_that_asks_for_more_is_refused(kind: str, message: str) -> None:
    model: Any = tiny_model(kind)
    use_flexnsa(model)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 40), use_cache=False)
