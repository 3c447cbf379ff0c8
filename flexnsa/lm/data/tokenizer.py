"""Text as the ids of a tokenizer of Hugging Face ``tokenizers``, which is imported only where one is read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.files import FileError, write_whole
from flexnsa.lm.data.rows import Tokens, document_bounds

FILE_NAME = "tokenizer.json"
_DOCUMENTS_AT_ONCE = 1024


class TextTokenizer:
    """A tokenizer that sees one document at a time: no token crosses the blank lines where packing cuts a text.

    Texts get no tokens for the start or end of a sequence and are never truncated, whatever the file says.

    Args:
        path: a file of ``tokenizers``, or a folder with ``tokenizer.json`` as transformers writes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"tokenizer: expected a file, or a folder with {FILE_NAME}, got {str(path)!r}")
        self.path = file
        self.content = file.read_bytes()
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(self.content)
        except Exception as error:  # the package raises no class of its own
            raise ValueError(f"tokenizer: expected a file of `tokenizers`, got {str(file)!r} ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def sha256(self) -> str:
        """Return a fingerprint of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def keep(self, path: Path, *, is_known: bool) -> None:
        """Write the file to the folder of a run.

        Args:
            path: the file to write.
            is_known: whether the run has started with this tokenizer; then another one at ``path`` is an error.

        Raises:
            FileError: there is such a file; it stays.
            OSError: it could not be written; names the file.
        """
        if is_known and path.exists():
            require_tokenizer(path, self.sha256(), "the run")
        write_whole(path, self.content)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [id_ for _, _, encodings in self._parts(text.encode()) for encoding in encodings for id_ in encoding.ids]

    def tokens(self, data: Tensor) -> Tokens:
        """Return the tokens of UTF-8 text, uint8 ``(bytes,)``.

        Raises:
            ValueError: it is not UTF-8.
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
        """Return a function that decodes the tokens after a prompt, each into the characters that it completes."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        for token in prompt:
            stream.step(self._tokenizer, token)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def _parts(self, data: bytes) -> Iterator[tuple[bytes, list[str], list[Any]]]:
        """Return the parts of a text in order: the bytes of each, its documents and their encodings."""
        bounds = iter(document_bounds(data))
        while some := list(itertools.islice(bounds, _DOCUMENTS_AT_ONCE)):
            try:
                texts = [data[start:end].decode() for start, end in some]
            except UnicodeDecodeError as error:
                raise ValueError(f"text: expected UTF-8 for a tokenizer, got {error}") from error
            yield data[some[0][0] : some[-1][1]], texts, self._tokenizer.encode_batch(texts, add_special_tokens=False)


def require_tokenizer(path: Path, sha256: str, owner: str) -> None:
    """Check that the file of a tokenizer is the one that a model was trained with.

    Raises:
        FileError: it is another, damaged, or missing.
    """
    actual = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if actual != sha256:
        there = "there is none" if actual is None else f"that one's is {actual}"
        raise FileError(f"{path}: expected the tokenizer of {owner}, of sha256 {sha256}; {there}")


def _byte_ends(part: bytes, texts: list[str], encodings: list[Any]) -> Tensor:
    """Return the byte where each token of a part ends; the last of a document ends where the document does.

    Of several tokens of one character the first has all its bytes, and bytes that a tokenizer skips belong to the next
    token, so that every byte is counted once.
    """
    ends: list[int] = []
    num_characters = 0
    for text, encoding in zip(texts, encodings, strict=True):
        last_characters = [num_characters + end for _, end in encoding.offsets]
        num_characters += len(text)
        ends += [*last_characters[:-1], num_characters] if last_characters else []
    if not ends:
        return torch.zeros(0, dtype=torch.int64)
    leads = (torch.frombuffer(bytearray(part), dtype=torch.uint8) & 0xC0) != 0x80  # other bytes continue a character
    starts = torch.cat([leads.nonzero()[:, 0], torch.tensor([len(part)])])
    return starts[torch.tensor(ends)].cummax(0).values
