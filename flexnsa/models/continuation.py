"""From prompts to new tokens: groups of draws are looked at on the host, and rows end at their stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexnsa.models.language_model import LanguageModel, check_prompts
from flexnsa.models.sampling import check_finite
from flexnsa.models.steps import GROUP, Drawn
from flexnsa.models.stopping import OnToken, Row, Stops, StopTokens, check_on_token, check_stops
from flexnsa.validation import check_int, check_positive_int, check_seed


class TokenSource(Protocol):
    """What draws tokens for ``B`` rows."""

    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, *, seed: int = 0) -> Drawn:
        """Read prompts and draw the first token of each row."""
        ...

    def step(self, count: int = 1) -> Drawn:
        """Draw the next ``count`` tokens of each active row."""
        ...

    def set_active(self, active: Sequence[bool]) -> None:
        """Say which rows go on."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """Prompts and how far to continue them, checked; see :func:`flexnsa.models.generate_tokens`."""

    prompts: Tensor
    lengths: Tensor
    max_new_tokens: int
    stops: Stops
    seed: int
    on_token: OnToken | None
    group: int

    @property
    def max_seq_len(self) -> int:
        """Most tokens that a cache will hold: all but the last."""
        return self.prompts.shape[1] + self.max_new_tokens - 1


def check_request(
    model: LanguageModel,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None,
    stop_tokens: StopTokens,
    seed: int,
    on_token: OnToken | None,
    group: int | None,
) -> Request:
    """Demand what :func:`flexnsa.models.generate_tokens` asks for."""
    lengths = check_prompts(model, prompts, lengths)
    check_positive_int("max_new_tokens", max_new_tokens)
    check_seed("seed", seed)
    check_on_token(on_token)
    if group is None:
        group = GROUP if prompts.is_cuda else 1
    check_int("group", group, 1, GROUP)
    return Request(prompts, lengths, max_new_tokens, check_stops(stop_tokens), seed, on_token, group)


def continue_prompts(source: TokenSource, request: Request) -> list[list[int]]:
    """Give the new tokens of each row; what was drawn behind the end of a row is thrown away.

    Raises:
        FloatingPointError: the model predicts no finite number for a row that has not ended.
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
