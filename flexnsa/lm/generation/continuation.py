"""From prompts to new tokens: the host reads draws in groups and ends sequences at their stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexnsa.lm.generation.language_model import LanguageModel, check_prompts
from flexnsa.lm.generation.sampling import check_finite
from flexnsa.lm.generation.steps import GROUP, Drawn
from flexnsa.lm.generation.stopping import OnToken, Row, Stops, StopTokens, check_stops
from flexnsa.primitives import check_int, check_positive_int, check_seed, describe


class TokenSource(Protocol):
    """A source of tokens for ``B`` sequences."""

    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, *, seed: int = 0) -> Drawn:
        """Read prompts and draw the first token of each sequence."""
        ...

    def step(self, count: int = 1) -> Drawn:
        """Draw the next ``count`` tokens of each active sequence."""
        ...

    def set_active(self, active: Sequence[bool]) -> None:
        """Set which sequences continue."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts and how to continue them, checked; see :func:`flexnsa.lm.generate_tokens`."""

    prompts: Tensor
    lengths: Tensor
    max_new_tokens: int
    stops: Stops
    seed: int
    on_token: OnToken | None
    group: int

    @property
    def max_seq_len(self) -> int:
        """Largest number of tokens that a cache will hold: all but the last."""
        return self.prompts.shape[1] + self.max_new_tokens - 1


def check_request(
    model: LanguageModel,
    prompts: Tensor,
    max_new_tokens: int,
    lengths: Tensor | None,
    stop_tokens: StopTokens,
    seed: int,
    on_token: OnToken | None,
    group: int | None,
) -> Request:
    """Check the arguments of :func:`flexnsa.lm.generate_tokens`."""
    lengths = check_prompts(model, prompts, lengths)
    check_positive_int("max_new_tokens", max_new_tokens)
    check_seed("seed", seed)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token: expected a function, got {describe(on_token)}")
    if group is None:
        group = GROUP if prompts.is_cuda else 1
    check_int("group", group, 1, GROUP)
    return Request(prompts, lengths, max_new_tokens, check_stops(stop_tokens), seed, on_token, group)


def continue_prompts(source: TokenSource, request: Request) -> list[list[int]]:
    """Return the new tokens of each sequence; tokens sampled after its end are discarded.

    Raises:
        FloatingPointError: a logit of a sequence that has not ended is not finite.
    """
    rows = [Row(index, request.stops, request.on_token) for index in range(len(request.prompts))]
    drawn, left = source.prefill(request.prompts, request.lengths, seed=request.seed), request.max_new_tokens
    while True:
        for tokens, largest in zip(drawn.tokens.unbind(1), drawn.largest.unbind(1), strict=True):
            check_finite(largest[torch.tensor([not row.ended for row in rows])])
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.append(token)
        left -= drawn.tokens.shape[1]
        active = [not row.ended for row in rows]
        if not left or not any(active):
            break
        source.set_active(active)
        drawn = source.step(min(request.group, left))
    for row in rows:
        row.end()
    return [row.tokens for row in rows]
