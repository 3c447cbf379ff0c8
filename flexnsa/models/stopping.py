"""The new tokens of a row, and where it ends: those behind a stop are thrown away, those that may begin one wait."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from flexnsa.validation import describe

OnToken = Callable[[int, int], object]
"""Called with the row of a token and the token, as soon as it is sure to stay."""
StopTokens = Iterable[int | Sequence[int]]
"""Tokens, or sequences of tokens such as the bytes of a character, that end a row."""
Stops = Sequence[tuple[int, ...]]
"""The same, as :func:`check_stops` gives them."""


class Row:
    """New tokens of one row: those that are sure to stay, and those that wait because they may begin a stop."""

    def __init__(self, index: int, stops: Stops, on_token: OnToken | None) -> None:
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


def check_stops(stop_tokens: StopTokens) -> Stops:
    """Demand stops, and give each as the sequence of its tokens."""
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


def check_on_token(on_token: OnToken | None) -> None:
    """Demand a function, or None."""
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token: expected a function, got {describe(on_token)}")
