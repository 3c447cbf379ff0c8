"""The model of a checkpoint without its run, to generate from or to use elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from flexnsa.files import FileError, write_whole
from flexnsa.lm.checkpoint import whole_file
from flexnsa.lm.checkpoint.shards import SUFFIX
from flexnsa.lm.data.tokenizer import FILE_NAME, TextTokenizer, require_tokenizer
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.training.checkpoint import check_tensors, newest_checkpoint, read_checkpoint


def read_model(checkpoint: Path) -> DecoderLM:
    """Build the model of a training checkpoint, on the CPU, as :func:`read_model_and_tokenizer` does."""
    return read_model_and_tokenizer(checkpoint)[0]


def read_model_and_tokenizer(checkpoint: Path) -> tuple[DecoderLM, Path | None]:
    """Build the model of a training checkpoint, on the CPU, and find the file of its tokenizer.

    Args:
        checkpoint: a file, a folder of shards, or the folder of a run.

    Raises:
        FileNotFoundError: there is no such file or folder.
        FileError: the file is not a whole checkpoint of a model, or its tokenizer is not in the same folder.
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
    except (KeyError, ValueError, TypeError, RuntimeError) as error:  # the model is built from the file alone
        raise FileError(f"{file}: its header describes no model ({error!r}); take another checkpoint") from error
    check_tensors(file, tensors, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    model.load_state_dict(weights, assign=True)
    corpus = header.get("corpus")
    sha256 = corpus.get("tokenizer_sha256") if isinstance(corpus, dict) else None
    if sha256 is None:
        return model.eval(), None
    tokenizer = file.with_name(FILE_NAME)
    require_tokenizer(tokenizer, sha256, file.name)
    return model.eval(), tokenizer


def save_model(path: Path, model: DecoderLM, tokenizer: TextTokenizer | None = None) -> None:
    """Write a file that :func:`read_model_and_tokenizer` reads, and its tokenizer to the same folder.

    No run can resume from it.

    Raises:
        FileExistsError: the folder has another tokenizer, which may belong to another checkpoint.
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
