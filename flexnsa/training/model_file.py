"""The model of a checkpoint without the run: to generate from, or to take elsewhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from flexnsa.errors import FileError
from flexnsa.files import write_whole
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import whole_file
from flexnsa.training.checkpoint import check_tensors, newest_checkpoint, read_checkpoint
from flexnsa.training.shards import SUFFIX
from flexnsa.training.tokenizer import FILE_NAME, TextTokenizer


def read_model(checkpoint: Path) -> DecoderLM:
    """Build the model of a training checkpoint, on the CPU; as :func:`read_model_and_tokenizer`."""
    return read_model_and_tokenizer(checkpoint)[0]


def read_model_and_tokenizer(checkpoint: Path) -> tuple[DecoderLM, Path | None]:
    """Build the model of a training checkpoint, on the CPU, and find the file of the tokenizer that it learned with.

    Args:
        checkpoint: a file, a folder of shards, or the folder of a run.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileError: the file is no checkpoint of a model, or not a whole one, or its tokenizer is not beside it.
    """
    is_run = checkpoint.is_dir() and checkpoint.suffix != SUFFIX
    file = newest_checkpoint(checkpoint) if is_run else checkpoint
    if file is None or not file.exists():
        raise FileNotFoundError(f"checkpoint: expected a checkpoint of `flexnsa train`, got {str(checkpoint)!r}")
    header, tensors = read_checkpoint(file, ("model",))
    weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    dtype = next(iter(weights.values()), torch.empty(0)).dtype
    try:
        with torch.device("meta"):
            model = DecoderLM(DecoderConfig.from_dict(header["model"])).to(dtype)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:  # all that it is built from is in the file
        raise FileError(f"{file}: its header describes no model ({error!r}); take another checkpoint") from error
    check_tensors(file, tensors, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    model.load_state_dict(weights, assign=True)
    return model.eval(), _tokenizer_of(file, header)


def _tokenizer_of(file: Path, header: dict[str, Any]) -> Path | None:
    corpus = header.get("corpus")
    wanted = corpus.get("tokenizer_sha256") if isinstance(corpus, dict) else None
    if wanted is None:
        return None
    tokenizer = file.with_name(FILE_NAME)
    found = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None
    if found != wanted:
        there = "there is none" if found is None else f"that one's is {found}"
        raise FileError(f"{tokenizer}: expected the tokenizer of {file.name}, of sha256 {wanted}; {there}")
    return tokenizer


def save_model(path: Path, model: DecoderLM, tokenizer: TextTokenizer | None = None) -> None:
    """Write what :func:`read_model_and_tokenizer` reads, the tokenizer beside it; no run can go on from there.

    Raises:
        FileExistsError: another tokenizer is there, which may be that of another checkpoint.
        OSError: it could not be written; names the path.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    header = {"model": json.dumps(model.config.to_dict())}
    if tokenizer is not None:
        file = path.with_name(FILE_NAME)
        if file.exists() and file.read_bytes() != tokenizer.content:
            raise FileExistsError(f"{file}: expected the tokenizer of {path.name} or none, got another")
        write_whole(file, tokenizer.content)
        header["corpus"] = json.dumps({"tokenizer_sha256": tokenizer.sha256()})
    whole_file.save(path, tensors, header)
