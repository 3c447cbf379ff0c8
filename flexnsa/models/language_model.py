"""What generation asks of a model, and of the prompts that it is given."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flexnsa.validation import check_integers, check_tokens, describe


class LanguageModel(Protocol):
    """What generation asks of a model, as :class:`flexnsa.models.DecoderLM` gives it.

    A model may also have ``last_logits(tokens, lengths=..., caches=...)``, ``(B, vocab_size)``, so that its head need
    not be applied to a whole prompt. To be captured in a CUDA graph, one token a row must be read without waiting for
    the device.
    """

    @property
    def embedding(self) -> nn.Embedding:
        """Of tokens; it says how many there are and on which device."""
        ...

    def __call__(self, tokens: Tensor, *, caches: Any = None, lengths: Tensor | None = None) -> Tensor:
        """Give logits ``(B, T, vocab_size)``."""
        ...

    def new_caches(self, batch_size: int, max_seq_len: int) -> Any:
        """Make an empty cache for every layer.

        To serve more than one batch of prompts, each has ``reset()``, and ``grow(max_seq_len)`` to serve longer ones.
        """
        ...


def last_logits(model: LanguageModel, tokens: Tensor, lengths: Tensor, *, caches: Any = None, **mods: Any) -> Tensor:
    """Give the logits ``(B, vocab_size)`` behind the last real token of each row."""
    own = getattr(model, "last_logits", None)
    if own is not None:
        return own(tokens, lengths=lengths, caches=caches, **mods)
    options: dict[str, Any] = mods if caches is None else {"caches": caches, "lengths": lengths, **mods}
    return model(tokens, **options)[torch.arange(len(tokens), device=tokens.device), lengths.long() - 1]


def check_model(model: LanguageModel) -> None:
    """Demand a model that can be generated from."""
    # Not by its class: a compiled model is of another.
    if not hasattr(model, "embedding") or not hasattr(model, "new_caches"):
        raise TypeError(f"model: expected a DecoderLM, got {describe(model)}")


def check_prompts(model: LanguageModel, prompts: Tensor, lengths: Tensor | None) -> Tensor:
    """Demand prompts ``(B, S)`` of at least a token each; give the int32 lengths ``(B,)``."""
    check_tokens("prompts", prompts, model.embedding.weight)
    if lengths is None:
        return torch.full((len(prompts),), prompts.shape[1], dtype=torch.int32, device=prompts.device)
    check_integers("lengths", lengths, (len(prompts),), like=prompts, as_of="prompts")
    if not ((lengths >= 1) & (lengths <= prompts.shape[1])).all():
        raise ValueError(f"lengths: expected 1 .. {prompts.shape[1]}, got {lengths.tolist()}")
    return lengths.to(torch.int32)
