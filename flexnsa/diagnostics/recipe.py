"""What a case of ``python -m flexnsa diagnose`` trains: plain values, of which each process makes its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flexnsa.config import NSAConfig
from flexnsa.diagnostics.cases import Outcome, run_case
from flexnsa.distributed import PARALLEL, joined_ranks, rank_device
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import Corpus, TextTokenizer, TrainConfig, Trainer, read_corpus
from flexnsa.training.trainer import check_training
from flexnsa.validation import check_choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A model and how it is trained.

    Args:
        model: its sizes.
        training: its hyper-parameters; the number of steps is that of who asks.
        text: of :func:`flexnsa.training.read_corpus`.
        tokenizer: of :class:`flexnsa.training.TextTokenizer`; None for bytes.
        device: such as ``"cuda"``, of which each rank takes its own.
        compiled: run the layers through ``torch.compile``.
        parallel: of :data:`flexnsa.distributed.PARALLEL`, or None for one process.
        ranks: processes.
    """

    model: DecoderConfig
    training: TrainConfig
    text: Path | None = None
    tokenizer: Path | None = None
    device: str = "cpu"
    compiled: bool = False
    parallel: str | None = None
    ranks: int = 1

    def check(self) -> None:
        """Demand what can be known before any process starts.

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
        check_training(self.model, corpus(self.text, self.tokenizer), self.training, device, self.ranks)

    def at(self, **settings: Any) -> Recipe:
        """Change fields of the recipe, of its model, of the sizes of its branches or of its training, by their names.

        What another setting leaves without a meaning follows it: branches that are left out are not recomputed, a
        single branch has no softmax to share, and several ranks are parallel in some way.
        """
        model, training = self.model, self.training
        if "branches" in settings:
            kept = tuple(tag for tag in model.recompute if tag in settings["branches"])
            gate = "sigmoid" if len(settings["branches"]) == 1 else model.gate
            settings = {"recompute": kept, "gate": gate} | settings
        if settings.get("ranks", 1) > 1 and self.parallel is None:
            settings = {"parallel": "ddp"} | settings
        nsa = replace(model.nsa, **_chosen(settings, NSAConfig))
        model = replace(model, **({"nsa": nsa} | _chosen(settings, DecoderConfig)))
        own = {"model": model, "training": replace(training, **_chosen(settings, TrainConfig))}
        return replace(self, **own, **_chosen(settings, Recipe))

    def run(
        self,
        folder: Path,
        function: Callable[..., dict[str, Any]],
        *arguments: Any,
        seconds: float,
        variables: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Call ``function(recipe, *arguments)`` as :func:`~flexnsa.diagnostics.cases.run_case` does."""
        preload = self.device == "cpu" and not variables
        options: dict[str, Any] = {"ranks": self.ranks, "seconds": seconds, "preload": preload, "variables": variables}
        return run_case(folder, function, self, *arguments, **options)

    def record(self) -> dict[str, Any]:
        """Give plain values that JSON can hold."""
        values = asdict(self)
        return values | {name: str(value) for name, value in values.items() if isinstance(value, Path)}

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """Join the ranks of this case, and give a trainer of fresh values."""
        device = torch.device(self.device) if self.parallel is None else rank_device(torch.device(self.device))
        with joined_ranks(self.parallel, device) as ranks:
            model = ranks.build(self.make, device)
            yield Trainer(model, corpus(self.text, self.tokenizer), self.training, compiled=self.compiled, ranks=ranks)

    def make(self) -> DecoderLM:
        """Draw the model."""
        torch.manual_seed(self.training.seed)
        return DecoderLM(self.model)


@cache
def corpus(text: Path | None, tokenizer: Path | None) -> Corpus:
    """Read a text once in a process."""
    return read_corpus(text, None if tokenizer is None else TextTokenizer(tokenizer))


def _chosen(settings: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}
