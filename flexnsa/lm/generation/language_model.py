"""The interface of models that generate, and the checks of their prompts."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flexnsa.primitives import check_integers, check_tokens, describe


class LanguageModel(Protocol):
    """The interface of a model that generates, such as :class:`flexnsa.lm.DecoderLM`.

    A model may also have ``last_logits(tokens, lengths=..., caches=...)``, ``(B, vocab_size)``, so that its head need
    not be applied to a whole prompt. To be captured in a CUDA graph, a step of one token per sequence must not
    synchronize.
    """

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens, which also has the size of the vocabulary and the device."""
        ...

    def __call__(self, tokens: Tensor, *, caches: Any = None, lengths: Tensor | None = None) -> Tensor:
        """Return logits ``(B, T, vocab_size)``."""
        ...

    def new_caches(self, batch_size: int, max_seq_len: int) -> Any:
        """Make an empty cache for every layer.

        To serve several batches of prompts, each cache needs ``reset()``, and to serve longer ones
        ``grow(max_seq_len)``.
        """
        ...


def last_logits(model: LanguageModel, tokens: Tensor, lengths: Tensor, *, caches: Any = None, **mods: Any) -> Tensor:
    """Return the logits ``(B, vocab_size)`` of the last token of each sequence, padding aside."""
    own = getattr(model, "last_logits", None)
    if own is not None and not hasattr(model, "unshard"):  # FSDP2 gathers parameters for forward alone
        return own(tokens, lengths=lengths, caches=caches, **mods)
    options: dict[str, Any] = mods if caches is None else {"caches": caches, "lengths": lengths, **mods}
    return model(tokens, **options)[torch.arange(len(tokens), device=tokens.device), lengths.long() - 1]


def check_model(model: LanguageModel) -> None:
    """Check that a model can generate."""
    # Not by its class: a compiled model has another.
    if not hasattr(model, "embedding") or not hasattr(model, "new_caches"):
        raise TypeError(f"model: expected a DecoderLM, got {describe(model)}")


def check_prompts(model: LanguageModel, prompts: Tensor, lengths: Tensor | None) -> Tensor:
    """Check that prompts ``(B, S)`` have at least one token each; return their int32 lengths ``(B,)``."""
    check_tokens("prompts", prompts, model.embedding.weight)
    if lengths is None:
        return torch.full((len(prompts),), prompts.shape[1], dtype=torch.int32, device=prompts.device)
    check_integers("lengths", lengths, (len(prompts),), like=prompts, as_of="prompts")
    if not ((lengths >= 1) & (lengths <= prompts.shape[1])).all():
        raise ValueError(f"lengths: expected 1 .. {prompts.shape[1]}, got {lengths.tolist()}")
    return lengths.to(torch.int32)
