"""How tokens spell text: those that are bytes, and those of a tokenizer. Text comes out in whole characters."""

from __future__ import annotations

import codecs
from typing import Protocol

from flexnsa.training import TextTokenizer


class Spelling(Protocol):
    """A prompt as tokens, and the tokens behind it as text.

    Args:
        unit: what tokens are called.
        stop_tokens: sequences of tokens to end at.
        stop_characters: characters of the text to end at, where no sequence of tokens is sure to spell them.
    """

    unit: str
    stop_tokens: list[bytes]
    stop_characters: str

    def encode(self, prompt: bytes) -> list[int]:
        """Give the prompt's tokens; what is decoded follows it."""
        ...

    def decode(self, token: int) -> str:
        """Give the characters that a token completes."""
        ...

    def end(self) -> str:
        """Give what stands for characters that were never completed."""
        ...


class ByteSpelling:
    """Tokens that are bytes; half a character of the prompt is completed behind it."""

    unit, stop_characters = "bytes", ""

    def __init__(self, stop: list[bytes]) -> None:
        self.stop_tokens = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, prompt: bytes) -> list[int]:
        """Give the bytes."""
        self._decoder.decode(prompt)
        return list(prompt)

    def decode(self, token: int) -> str:
        """Give the characters that a byte completes."""
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        """Give a mark for half a character."""
        return self._decoder.decode(b"", True)


class TokenizerSpelling:
    """Tokens of a tokenizer, whose stops are looked for in the text: a token may hold them between other characters."""

    unit = "tokens"

    def __init__(self, tokenizer: TextTokenizer, stop: list[bytes]) -> None:
        self.stop_tokens: list[bytes] = []
        self.stop_characters = b"".join(stop).decode(errors="replace")
        self._tokenizer = tokenizer
        self._decode = tokenizer.stream([])

    def encode(self, prompt: bytes) -> list[int]:
        """Give the prompt's tokens.

        Raises:
            ValueError: it is no UTF-8, or no text of which the tokenizer knows anything.
        """
        try:
            tokens = self._tokenizer.encode(prompt.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt: expected UTF-8 for a tokenizer, got {error}") from error
        if not tokens:
            raise ValueError(f"prompt: expected text of at least one token, got {prompt.decode()!r}")
        self._decode = self._tokenizer.stream(tokens)
        return tokens

    def decode(self, token: int) -> str:
        """Give the characters that a token completes."""
        return self._decode(token)

    def end(self) -> str:
        """Give nothing: what tokens have begun and not completed stays away."""
        return ""
