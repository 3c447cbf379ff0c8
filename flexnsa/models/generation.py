"""Tokens out of a model: the prompts in one pass, then a step for every token, each reading the cache."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flexnsa.models.sampling import Sampling
from flexnsa.validation import check_integers, check_positive_int, check_seed, check_tokens, check_type, describe

OnToken = Callable[[int, int], object]
"""Called with the row of a token and the token, as soon as it is sure to stay."""
StopTokens = Iterable[int | Sequence[int]]
"""Tokens, or sequences of tokens such as the bytes of a character, that end a row."""


class LanguageModel(Protocol):
    """What generation asks of a model, as :class:`flexnsa.models.DecoderLM` gives it."""

    @property
    def embedding(self) -> nn.Embedding:
        """Of tokens; it says how many there are and on which device."""
        ...

    def __call__(self, tokens: Tensor, *, caches: Any = None, lengths: Tensor | None = None) -> Tensor:
        """Give logits ``(B, T, vocab_size)``."""
        ...

    def new_caches(self, batch_size: int, max_seq_len: int) -> Any:
        """Make an empty cache for every layer."""
        ...


@torch.no_grad()
def generate_tokens(
    model: LanguageModel,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    sampling: Sampling | None = None,
    stop_tokens: StopTokens = (),
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
        stop_tokens: a row ends when it draws one of them, a token or a whole sequence, which is not returned.
        seed: of the draws.
        on_token: called for every token that is returned; one that may begin a stop sequence waits for its end.
        cached: False runs the whole sequence again for every token: the same tokens, slower.

    Returns:
        The new tokens of each row.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range; the message names it.
        FloatingPointError: the model predicts no finite number.
    """
    lengths = _check_prompts(model, prompts, lengths)
    check_positive_int("max_new_tokens", max_new_tokens)
    sampling = Sampling() if sampling is None else sampling
    check_type("sampling", sampling, Sampling)
    check_seed("seed", seed)
    check_type("cached", cached, bool)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token: expected a function, got {describe(on_token)}")
    draws = torch.Generator().manual_seed(seed)
    stops = _check_stops(stop_tokens)
    predict = _Cached(model, prompts, lengths, max_new_tokens) if cached else _Uncached(model, prompts, lengths)

    rows = [_Row(index, stops, on_token) for index in range(len(prompts))]
    for count in range(max_new_tokens):
        drawn = sampling.draw(predict.logits.cpu(), draws)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.append(token)
        active = [not row.ended for row in rows]
        if not any(active) or count + 1 == max_new_tokens:
            break
        predict.append(drawn.to(prompts.device), torch.tensor(active, device=prompts.device))
    for row in rows:
        row.end()
    return [row.tokens for row in rows]


class _Row:
    """New tokens of one row: those that are sure to stay, and those that wait because they may begin a stop."""

    def __init__(self, index: int, stops: Sequence[tuple[int, ...]], on_token: OnToken | None) -> None:
        self.index, self.stops, self.on_token = index, stops, on_token
        self.tokens: list[int] = []
        self.waiting: tuple[int, ...] = ()
        self.ended = False

    def append(self, token: int) -> None:
        """Take a drawn token; a row that has ended takes none."""
        if self.ended:
            return
        self.waiting += (token,)
        tails = [self.waiting[start:] for start in range(len(self.waiting))]
        stop = next((tail for tail in tails if tail in self.stops), None)
        self._release(len(self.waiting) - len(stop or next(filter(self._begins_stop, tails), ())))
        self.ended = stop is not None

    def end(self) -> None:
        """Let go of what waits, unless it is a stop."""
        if not self.ended:
            self._release(len(self.waiting))

    def _begins_stop(self, tokens: tuple[int, ...]) -> bool:
        return any(stop[: len(tokens)] == tokens for stop in self.stops)

    def _release(self, count: int) -> None:
        for token in self.waiting[:count]:
            self.tokens.append(token)
            if self.on_token is not None:
                self.on_token(self.index, token)
        self.waiting = self.waiting[count:]


def generate(model: LanguageModel, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue a prompt with a byte-level model (``vocab_size`` 256); the added bytes, without the prompt.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    _check_model(model)
    check_type("prompt", prompt, bytes)
    check_positive_int("num_bytes", num_bytes)
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    tokens = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    sampling = Sampling(temperature=temperature)
    return bytes(generate_tokens(model, tokens, num_bytes, sampling=sampling, seed=seed)[0])


class _Cached:
    """Logits ``(B, vocab_size)`` after the last token of each row, one step at a time."""

    def __init__(self, model: LanguageModel, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
        self.model = model
        self.caches = model.new_caches(len(prompts), prompts.shape[1] + max_new_tokens - 1)
        logits = model(prompts, caches=self.caches, lengths=lengths)
        self.logits = logits[torch.arange(len(prompts)), lengths.long() - 1]

    def append(self, tokens: Tensor, active: Tensor) -> None:
        """Add a token to each active row."""
        self.logits = self.model(tokens[:, None], caches=self.caches, lengths=active.to(torch.int32))[:, 0]


class _Uncached:
    """As :class:`_Cached`, from the whole sequence each time."""

    def __init__(self, model: LanguageModel, prompts: Tensor, lengths: Tensor) -> None:
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


def _check_model(model: LanguageModel) -> None:
    # Not by its class: a compiled model is of another.
    if not hasattr(model, "embedding") or not hasattr(model, "new_caches"):
        raise TypeError(f"model: expected a DecoderLM, got {describe(model)}")


def _check_prompts(model: LanguageModel, prompts: Tensor, lengths: Tensor | None) -> Tensor:
    _check_model(model)
    check_tokens("prompts", prompts, model.embedding.weight)
    if lengths is None:
        return torch.full((len(prompts),), prompts.shape[1], dtype=torch.int32, device=prompts.device)
    check_integers("lengths", lengths, (len(prompts),), like=prompts, as_of="prompts")
    if not ((lengths >= 1) & (lengths <= prompts.shape[1])).all():
        raise ValueError(f"lengths: expected 1 .. {prompts.shape[1]}, got {lengths.tolist()}")
    return lengths.to(torch.int32)


def _check_stops(stop_tokens: StopTokens) -> list[tuple[int, ...]]:
    if isinstance(stop_tokens, str | bytes) or not isinstance(stop_tokens, Iterable):
        raise TypeError(f"stop_tokens: expected tokens or sequences of them, got {describe(stop_tokens)}")
    stops = []
    for stop in stop_tokens:
        sequence = stop if isinstance(stop, Sequence) else (stop,)
        try:
            stops.append(tuple(map(operator.index, sequence)))
        except TypeError as error:
            raise TypeError(f"stop_tokens: expected tokens or sequences of them, got {describe(stop)}") from error
        if not stops[-1]:
            raise ValueError(f"stop_tokens: expected at least one token in a sequence, got {describe(stop)}")
    return stops
