"""The text: files to train on and files to validate on, as bytes or as the ids of a tokenizer."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexnsa.lm.checkpoint.lock import is_of_a_run
from flexnsa.lm.data.rows import Tokens
from flexnsa.lm.data.tokenizer import TextTokenizer

VALIDATION_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to train on and text to validate on, each uint8 ``(bytes,)``; a zero byte ends every file.

    ``tokenized`` has the tokens of both parts; by default each byte is a token.
    """

    train: Tensor
    validation: Tensor
    tokenized: Tokenized | None = None

    def tokens(self, part: Literal["train", "validation"]) -> Tokens:
        """Return the tokens of a part."""
        return Tokens.of_bytes(getattr(self, part)) if self.tokenized is None else getattr(self.tokenized, part)

    def sha256(self) -> str:
        """Return a fingerprint of the text, so that a run resumes with the text that it started with."""
        return hashlib.sha256(self.train.numpy().tobytes() + self.validation.numpy().tobytes()).hexdigest()

    def fingerprints(self) -> dict[str, Any]:
        """Return the fingerprints of the text and of the tokenizer, if there is one."""
        tokenizer = {} if self.tokenized is None else {"tokenizer_sha256": self.tokenized.tokenizer.sha256()}
        return tokenizer | {"text_sha256": self.sha256()}

    def require_rows(self, seq_len: int) -> None:
        """Check that both parts have a sequence and the token after it.

        Raises:
            ValueError: one is shorter.
        """
        unit = "bytes" if self.tokenized is None else "tokens"
        for part, tokens in (("training", self.tokens("train")), ("validation", self.tokens("validation"))):
            count = len(tokens.ids)
            if count <= seq_len:
                raise ValueError(f"seq_len: expected less than the {count} {unit} of {part} text, got {seq_len}")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Both parts of a text as tokens of a tokenizer."""

    tokenizer: TextTokenizer
    train: Tokens
    validation: Tokens


def read_corpus(
    path: Path | None = None, tokenizer: TextTokenizer | None = None, *, leave_out: Path | None = None
) -> Corpus:
    """Read a text file or a folder of them; by default the source of the running Python's standard library.

    Validation takes whole files of a folder, chosen by :func:`split_files`, and the last tenth of a single file.

    Args:
        path: the text.
        tokenizer: by default each byte is a token.
        leave_out: a folder that is not text, such as that of the run. Folders of other runs are always left out.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: a run writes to the folder, or it holds fewer than two text files, or a file that a tokenizer cannot
            read.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = standard_library_files(root)
    elif path.is_file():
        data = path.read_bytes()
        cut = len(data) - math.ceil(len(data) * VALIDATION_FRACTION)
        while tokenizer is not None and cut and data[cut] & 0xC0 == 0x80:
            cut -= 1  # the first byte of a character
        return _corpus([data[:cut]], [data[cut:]], tokenizer)
    elif path.is_dir():
        root = path
        files = text_files(root, leave_out)
    else:
        raise FileNotFoundError(f"text: expected a file or a folder, got {str(path)!r}, which does not exist")
    if len(files) < 2:
        raise ValueError(f"text: expected at least two text files below {str(root)!r}, got {len(files)}")
    train, validation = ([file.read_bytes() for file in part] for part in split_files(files, root))
    return _corpus(train, validation, tokenizer)


def split_files(files: list[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Set aside a tenth of the files, at least one, by the hash of their path below the root.

    Returns:
        ``(train, validation)``, each in the order of the hashes, which is the same wherever the files are.
    """
    ordered = sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())
    count = math.ceil(len(ordered) * VALIDATION_FRACTION)
    return ordered[count:], ordered[:count]


def standard_library_files(root: Path) -> list[Path]:
    """List the library's own modules: no tests, no installed packages, no tables of characters."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
    return [file for file in sorted(root.rglob("*.py")) if skipped.isdisjoint(file.relative_to(root).parts)]


def text_files(root: Path, leave_out: Path | None = None) -> list[Path]:
    """List the files below a folder that are UTF-8 without a zero byte; without hidden files and files of runs.

    Raises:
        ValueError: a run writes to the folder itself, or it is the one to leave out.
    """
    place, left_out_folder = root.resolve(), None if leave_out is None else leave_out.resolve()

    @cache
    def is_left_out(folder: Path) -> bool:
        return folder == left_out_folder or is_of_a_run(folder)

    def is_kept(file: Path) -> bool:
        below = file.relative_to(root)
        folders = (*(place / folder for folder in below.parents), file.resolve().parent)  # the target of a link
        is_hidden = any(part.startswith(".") for part in below.parts)
        return not is_hidden and not any(map(is_left_out, folders)) and _is_text(file.read_bytes())

    if is_left_out(place):
        remedy = "give the run a folder below it, or elsewhere"
        raise ValueError(f"text: expected a folder to which no run writes, got {str(root)!r}; {remedy}")
    return [file for file in sorted(root.rglob("*")) if file.is_file() and is_kept(file)]


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _corpus(train: list[bytes], validation: list[bytes], tokenizer: TextTokenizer | None) -> Corpus:
    texts = [bytearray().join(file + b"\0" for file in files) for files in (train, validation)]
    parts = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
    tokenized = None if tokenizer is None else Tokenized(tokenizer, *map(tokenizer.tokens, parts))
    return Corpus(*parts, tokenized=tokenized)
