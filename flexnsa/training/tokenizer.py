"""Text as the ids of a tokenizer of Hugging Face ``tokenizers``, which is imported only where one is read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.training.rows import document_bounds
from flexnsa.training.tokens import Tokens

FILE_NAME = "tokenizer.json"
_DOCUMENTS_AT_ONCE = 1024


class TextTokenizer:
    """A tokenizer that sees one document at a time: no token crosses the blank lines where packing cuts a text.

    Nothing is added to a text (no begin or end of a sequence), and nothing cut off, whatever the file says of either.

    Args:
        path: a file of ``tokenizers``, or a folder with ``tokenizer.json`` as transformers writes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"tokenizer: expected a file, or a folder with {FILE_NAME}, got {str(path)!r}")
        self.content = file.read_bytes()
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(self.content)
        except Exception as error:  # the package has no class of its own for what it raises
            raise ValueError(f"tokenizer: expected a file of `tokenizers`, got {str(file)!r} ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def sha256(self) -> str:
        """Give a fingerprint of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Give the ids of a text."""
        return [id_ for _, _, encodings in self._parts(text.encode()) for encoding in encodings for id_ in encoding.ids]

    def tokens(self, data: Tensor) -> Tokens:
        """Give the tokens of UTF-8 text, uint8 ``(bytes,)``.

        Raises:
            ValueError: it is no UTF-8.
        """
        dtype = torch.uint16 if self.vocab_size <= 2**16 else torch.int32
        ids, ends, bounds = [torch.empty(0, dtype=dtype)], [torch.zeros(1, dtype=torch.int64)], [0]
        num_bytes = 0
        for part, texts, encodings in self._parts(data.numpy().tobytes()):
            ids.append(torch.tensor([id_ for encoding in encodings for id_ in encoding.ids], dtype=dtype))
            ends.append(num_bytes + _byte_ends(part, texts, encodings))
            bounds += itertools.accumulate((len(encoding.ids) for encoding in encodings), initial=bounds.pop())
            num_bytes += len(part)
        documents = [bound for bound in itertools.pairwise(bounds) if bound[0] < bound[1]]
        return Tokens(torch.cat(ids), torch.cat(ends).diff().to(torch.int32), documents)

    def stream(self, prompt: list[int]) -> Callable[[int], str]:
        """Give what turns one token after the other, behind a prompt, into text: whole characters, when they are."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        for token in prompt:
            stream.step(self._tokenizer, token)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def _parts(self, data: bytes) -> Iterator[tuple[bytes, list[str], list[Any]]]:
        """Give one part of a text after the other: its bytes, its documents and their encodings."""
        bounds = iter(document_bounds(data))
        while some := list(itertools.islice(bounds, _DOCUMENTS_AT_ONCE)):
            try:
                texts = [data[start:end].decode() for start, end in some]
            except UnicodeDecodeError as error:
                raise ValueError(f"text: expected UTF-8 for a tokenizer, got {error}") from error
            yield data[some[0][0] : some[-1][1]], texts, self._tokenizer.encode_batch(texts, add_special_tokens=False)


def _byte_ends(part: bytes, texts: list[str], encodings: list[Any]) -> Tensor:
    """Give the byte where each token of a part ends; the last of a document ends where the document does.

    Of several tokens of one character the first has all of it, and what a tokenizer skips goes to the next token: so
    all bytes are counted, and each once.
    """
    ends: list[int] = []
    num_characters = 0
    for text, encoding in zip(texts, encodings, strict=True):
        own = [num_characters + end for _, end in encoding.offsets]
        num_characters += len(text)
        ends += [*own[:-1], num_characters] if own else []
    if not ends:
        return torch.zeros(0, dtype=torch.int64)
    leads = (torch.frombuffer(bytearray(part), dtype=torch.uint8) & 0xC0) != 0x80  # others go on with a character
    begins = torch.cat([leads.nonzero()[:, 0], torch.tensor([len(part)])])
    return begins[torch.tensor(ends)].cummax(0).values
