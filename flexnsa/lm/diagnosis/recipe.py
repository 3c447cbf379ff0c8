"""A run in plain values, which processes can be given: what ``train`` and every case of ``diagnose`` train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flexnsa.config import NSAConfig
from flexnsa.lm.data.corpus import Corpus, read_corpus
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.diagnosis.cases import Outcome, run_case
from flexnsa.lm.measure.memory import peaks_in_mib
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.parallel.joining import PARALLEL, joined_ranks, rank_device
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.checks import check_training
from flexnsa.lm.training.config import TrainConfig
from flexnsa.lm.training.trainer import Trainer
from flexnsa.primitives import check_choice

_NOT_AXES = ("stages", "dense_stages", "indexer_stages", "model", "training", "nsa", "text", "device", "leave_out")
_NOT_AXES += ("reduce_dtype", "context_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A model and how it is trained.

    Args:
        model: its sizes.
        training: its hyper-parameters; a case takes its own number of steps.
        text: file or folder, for :func:`flexnsa.lm.read_corpus`.
        tokenizer: file or folder, for :class:`flexnsa.lm.TextTokenizer`; None for bytes.
        leave_out: a folder that is not text, such as that of the run.
        device: such as ``"cuda"``, of which each rank takes its own.
        compiled: run the layers through ``torch.compile``.
        parallel: one of :data:`flexnsa.lm.parallel.PARALLEL`, or None for one process.
        ranks: number of processes.
        reduce_dtype: one of :data:`flexnsa.lm.parallel.REDUCE_DTYPES`.
        context_parallel: number of ranks that share the tokens of the same sequences.
    """

    model: DecoderConfig
    training: TrainConfig
    text: Path | None = None
    tokenizer: Path | None = None
    leave_out: Path | None = None
    device: str = "cpu"
    compiled: bool = False
    parallel: str | None = None
    ranks: int = 1
    reduce_dtype: str = "fp32"
    context_parallel: int = 1

    def corpus(self) -> Corpus:
        """Read the text, once in a process."""
        return corpus(self.text, self.tokenizer, self.leave_out)

    def check(self) -> None:
        """Check the arguments of a case before any process starts.

        Raises:
            ValueError: an argument is out of range, or does not fit another.
        """
        if self.ranks < 1 or (self.ranks > 1 and self.parallel is None):
            raise ValueError(f"ranks: expected 1, or more and a way to be parallel, got {self.ranks}")
        if self.parallel is not None:
            check_choice("parallel", self.parallel, PARALLEL)
        device = torch.device(self.device)
        if self.parallel is not None and device.index is not None:
            raise ValueError(f"device: expected {device.type}, of which each rank takes its own, got {self.device!r}")
        if device.type == "cuda" and self.ranks > torch.cuda.device_count():
            raise ValueError(f"ranks: expected at most {torch.cuda.device_count()}, a GPU for each, got {self.ranks}")
        self.check_training()

    def check_training(self) -> None:
        """Check the arguments, but not how processes are started.

        Raises:
            ValueError: as of :func:`~flexnsa.lm.training.checks.check_training`.
        """
        device = torch.device(self.device)
        check_training(self.model, self.corpus(), self.training, device, self.ranks, self.context_parallel)

    def at(self, **settings: Any) -> Recipe:
        """Return the recipe with other fields, of its model, of the sizes of its branches or of its training.

        Settings that lose their meaning are adjusted: see :meth:`DecoderConfig.with_branches`. Several ranks train with
        DDP unless another way is set.
        """
        model = self.model.with_branches(settings["branches"]) if "branches" in settings else self.model
        if isinstance(model.share_index, tuple) and "num_layers" in settings:
            settings = {"share_index": model.share_index[: settings["num_layers"]]} | settings
        if settings.get("ranks", 1) > 1 and self.parallel is None:
            settings = {"parallel": "ddp"} | settings
        nsa = replace(model.nsa, **_chosen(settings, NSAConfig))
        model = replace(model, **({"nsa": nsa} | _chosen(settings, DecoderConfig)))
        training = replace(self.training, **_chosen(settings, TrainConfig))
        return replace(self, model=model, training=training, **_chosen(settings, Recipe))

    def run(
        self,
        folder: Path,
        function: Callable[..., dict[str, Any]],
        *arguments: Any,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Call ``function(recipe, *arguments)`` as :func:`~flexnsa.lm.diagnosis.cases.run_case` does."""
        preload = self.device == "cpu" and not variables
        return run_case(
            folder, function, self, *arguments, ranks=self.ranks, seconds=seconds, preload=preload, variables=variables
        )

    def record(self) -> dict[str, Any]:
        """Return plain values that JSON can hold, and fingerprints of the text and of the tokenizer."""
        values = asdict(self) | self.corpus().fingerprints()
        return values | {name: str(value) for name, value in values.items() if isinstance(value, Path)}

    def local_device(self) -> torch.device:
        """Return the device of this process."""
        device = torch.device(self.device)
        return device if self.parallel is None else rank_device(device)

    def joined(self, same: Mapping[str, Any] | None = None) -> AbstractContextManager[Ranks]:
        """Join the ranks, as :func:`~flexnsa.lm.parallel.joined_ranks` does."""
        return joined_ranks(self.parallel, self.local_device(), self.reduce_dtype, self.context_parallel, same=same)

    def build_trainer(self, ranks: Ranks, **options: Any) -> Trainer:
        """Build a trainer with these options at step 0."""
        model = ranks.build(self.make, self.local_device())
        return Trainer(model, self.corpus(), self.training, compiled=self.compiled, ranks=ranks, **options)

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """Join the ranks and build a trainer, for a process that ends afterwards."""
        with self.joined() as ranks:
            yield self.build_trainer(ranks)

    def make(self) -> DecoderLM:
        """Draw the model from its seed."""
        torch.manual_seed(self.training.seed)
        return DecoderLM(self.model)


@cache
def corpus(text: Path | None, tokenizer: Path | None, leave_out: Path | None = None) -> Corpus:
    """Read a text once in a process."""
    return read_corpus(text, None if tokenizer is None else TextTokenizer(tokenizer), leave_out=leave_out)


def default_axes(recipe: Recipe) -> dict[str, list[Any]]:
    """Return the axes along which runs fail most: branches, implementations, checkpointing, precision and ranks."""
    cuda = torch.device(recipe.device).type == "cuda"
    ranks = [1, 2] if not cuda or torch.cuda.device_count() > 1 else [1]
    model = recipe.model
    alone = [(tag,) for tag in model.branches] if model.attention == "nsa" else []
    return {
        "branches": list(dict.fromkeys([model.branches, *alone])),
        "impl": ["flex", "triton"] if cuda else ["sdpa", "reference"],
        "checkpointing": ["none", "all"],
        "precision": ["fp32", "bf16"],
        "ranks": list(dict.fromkeys([*ranks, recipe.ranks])),
    }


def axis_of(text: str) -> tuple[str, list[Any]]:
    """Read the name of an option and the values to try, such as ``seq_len=512,1024``.

    Raises:
        ValueError: there is no such option, or a value is not of its kind.
    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    classes = (Recipe, DecoderConfig, NSAConfig, TrainConfig)
    kinds = {field.name: str(field.type) for config in classes for field in fields(config)}
    if name in _NOT_AXES or name not in kinds or not values:
        raise ValueError(f"axis: expected NAME=VALUE,VALUE with the name of an option, got {text!r}")
    try:
        return name, [_value(kinds[name], value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"axis: expected values of {name}, {kinds[name]}, got {values!r}") from error


def _value(kind: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return tuple(text.split("+")) if text else ()
    if kind.startswith("bool") and text in ("true", "false"):
        return text == "true"
    if kind == "bool":
        raise ValueError(text)
    return {"int": int, "float": float}.get(kind.split(" |")[0], str)(text)


def take_steps(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Train for some steps; a case, which fails where a loss or a gradient is not finite.

    Returns:
        ``losses`` in nats, the last ``loss``, ``tokens_per_second`` of all steps but the first, and the peaks of
        :func:`~flexnsa.lm.measure.memory.peaks_in_mib`, the first of them as ``peak_mib`` too.
    """
    with recipe.trainer() as trainer:
        losses, seconds = [], []
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(trainer.train_step().loss)  # which synchronizes
            seconds.append(time.perf_counter() - start)
        peaks = peaks_in_mib(trainer.device)
    mean = sum(seconds[1:]) / (steps - 1) if steps > 1 else seconds[0]
    speed = recipe.training.tokens_per_step / mean
    first, *_ = peaks.values()
    return {"losses": losses, "loss": losses[-1], "tokens_per_second": speed, **peaks, "peak_mib": first}


def _chosen(settings: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}
