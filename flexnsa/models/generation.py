"""Tokens out of a model: the prompts in one pass, then a step for every token, each reading the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexnsa.checks import check_positive_int, check_tensor
from flexnsa.models.sampling import Sampling

if TYPE_CHECKING:
    from flexnsa.models.decoder import DecoderLM

OnToken = Callable[[int, int], object]
"""Called with the row of a token and the token, as soon as it is drawn."""


@torch.no_grad()
def generate_tokens(
    model: DecoderLM,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    sampling: Sampling | None = None,
    stop_tokens: Collection[int] = (),
    seed: int = 0,
    on_token: OnToken | None = None,
    cached: bool = True,
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: predicts the next token.
        prompts: int ``(B, S)``, padded on the right.
        max_new_tokens: at most so many tokens a row.
        lengths: int ``(B,)``, tokens of each prompt, at least 1; by default ``S``.
        sampling: how to draw; by default from the model's own probabilities.
        stop_tokens: a row ends when it draws one of them, which is not returned.
        seed: of the draws.
        on_token: called for every new token.
        cached: False runs the whole sequence again for every token: the same tokens, slower.

    Returns:
        The new tokens of each row.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
    """
    lengths = _check_prompts(prompts, lengths)
    check_positive_int("max_new_tokens", max_new_tokens)
    sampling = Sampling() if sampling is None else sampling
    draws = torch.Generator().manual_seed(seed)
    predict = _Cached(model, prompts, lengths, max_new_tokens) if cached else _Uncached(model, prompts, lengths)

    rows: list[list[int]] = [[] for _ in prompts]
    active = [True] * len(rows)
    for count in range(max_new_tokens):
        drawn = sampling.draw(predict.logits.cpu(), draws)
        for row, token in enumerate(drawn.tolist()):
            active[row] = active[row] and token not in stop_tokens
            if active[row]:
                rows[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if not any(active) or count + 1 == max_new_tokens:
            break
        predict.append(drawn.to(prompts.device), torch.tensor(active, device=prompts.device))
    return rows


def generate(model: DecoderLM, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue a prompt with a byte-level model (``vocab_size`` 256); the added bytes, without the prompt.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    tokens = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    sampling = Sampling(temperature=temperature)
    return bytes(generate_tokens(model, tokens, num_bytes, sampling=sampling, seed=seed)[0])


class _Cached:
    """Logits ``(B, vocab_size)`` after the last token of each row, one step at a time."""

    def __init__(self, model: DecoderLM, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
        self.model = model
        self.caches = model.new_caches(len(prompts), prompts.shape[1] + max_new_tokens - 1)
        logits = model(prompts, caches=self.caches, lengths=lengths)
        self.logits = logits[torch.arange(len(prompts)), lengths.long() - 1]

    def append(self, tokens: Tensor, active: Tensor) -> None:
        """Add a token to each active row."""
        self.logits = self.model(tokens[:, None], caches=self.caches, lengths=active.to(torch.int32))[:, 0]


class _Uncached:
    """As :class:`_Cached`, from the whole sequence each time."""

    def __init__(self, model: DecoderLM, prompts: Tensor, lengths: Tensor) -> None:
        self.model, self.tokens, self.lengths = model, prompts.long(), lengths.long()
        self.rows = torch.arange(len(prompts), device=prompts.device)
        self.logits = model(self.tokens)[self.rows, self.lengths - 1]

    def append(self, tokens: Tensor, active: Tensor) -> None:
        """Add a token to each active row."""
        if self.lengths.max() == self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, 1))
        self.tokens[self.rows[active], self.lengths[active]] = tokens[active]
        self.lengths = self.lengths + active.long()
        self.logits = self.model(self.tokens)[self.rows, self.lengths - 1]


def _check_prompts(prompts: Tensor, lengths: Tensor | None) -> Tensor:
    check_tensor("prompts", prompts, ("B", "S"), dtype=getattr(prompts, "dtype", None))
    if prompts.dtype not in (torch.int32, torch.int64) or prompts.numel() == 0:
        raise ValueError(f"prompts: expected int tokens, got {tuple(prompts.shape)} of {prompts.dtype}")
    if lengths is None:
        return torch.full((len(prompts),), prompts.shape[1], dtype=torch.int32, device=prompts.device)
    check_tensor("lengths", lengths, (len(prompts),), dtype=getattr(lengths, "dtype", None))
    if not ((lengths >= 1) & (lengths <= prompts.shape[1])).all():
        raise ValueError(f"lengths: expected 1 .. {prompts.shape[1]}, got {lengths.tolist()}")
    return lengths.to(torch.int32)
