"""The new tokens of a sequence up to its stop; tokens that may start a stop are held back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from flexnsa.primitives import describe

OnToken = Callable[[int, int], object]
"""Called with the index of a sequence and a token, as soon as the token is known not to be part of a stop."""
StopTokens = Iterable[int | Sequence[int]]
"""Tokens, or sequences of tokens such as the bytes of a character, that end a sequence."""
Stops = Sequence[tuple[int, ...]]
"""The same, as :func:`check_stops` returns them."""


class Row:
    """New tokens of one sequence: those that are final, and those held back because they may start a stop."""

    def __init__(self, index: int, stops: Stops, on_token: OnToken | None) -> None:
        self.index, self.stops, self.on_token = index, stops, on_token
        self.tokens: list[int] = []
        self.waiting: tuple[int, ...] = ()
        self.ended = False

    def append(self, token: int) -> None:
        """Add a drawn token, unless the sequence has ended."""
        if self.ended:
            return
        self.waiting += (token,)
        tails = [self.waiting[start:] for start in range(len(self.waiting))]
        stop = next((tail for tail in tails if tail in self.stops), None)
        begun = next((tail for tail in tails if any(each[: len(tail)] == tail for each in self.stops)), ())
        self._release(len(self.waiting) - len(stop or begun))
        self.ended = stop is not None

    def end(self) -> None:
        """Release tokens that are held back, unless they are a stop."""
        if not self.ended:
            self._release(len(self.waiting))

    def _release(self, count: int) -> None:
        for token in self.waiting[:count]:
            self.tokens.append(token)
            if self.on_token is not None:
                self.on_token(self.index, token)
        self.waiting = self.waiting[count:]


def check_stops(stop_tokens: StopTokens) -> Stops:
    """Check stops; return each as the sequence of its tokens."""
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
