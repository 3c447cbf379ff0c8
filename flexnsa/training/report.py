"""What a run says while it goes on: a bar on the terminal, and a log of every step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flexnsa.training.log import JSONLog

if TYPE_CHECKING:
    from flexnsa.training.trainer import StepResult, Trainer

LOG_NAME = "log.jsonl"


class Report:
    """Rank 0 has the bar and ``log.jsonl``; other ranks have a log of their own if it is asked for, or say nothing.

    Args:
        folder: of the run.
        trainer: where it goes on from; later records are dropped, for the run will write them again.
        log_ranks: write ``log.rank-<r>.jsonl`` on every rank ``r`` but the first.

    Raises:
        FileError: there is such a file, but it is no log.
    """

    def __init__(self, folder: Path, trainer: Trainer, *, log_ranks: bool = False) -> None:
        from tqdm import tqdm

        rank, step = trainer.ranks.rank, trainer.step
        self._log: JSONLog | None = None
        trainer.ranks.on_first(lambda: self._open(folder / LOG_NAME, step))
        if rank and log_ranks:
            self._open(folder / f"log.rank-{rank}.jsonl", step)
        options: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "disable": rank != 0}
        self._bar = tqdm(total=trainer.config.steps, initial=step, **options)

    def _open(self, path: Path, step: int) -> None:
        self._log = JSONLog(path, resume_step=step)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.close()
        if self._log is not None:
            self._log.close()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line)

    def write(self, result: StepResult, measured: dict[str, float]) -> None:
        """Log a step, and what was measured beside it."""
        if self._log is not None:
            self._log.write(asdict(result) | measured)

    def advance(self, result: StepResult, measured: dict[str, float]) -> None:
        """Move the bar by a step."""
        speed, peak = f"{measured['tokens_per_second']:,.0f} tok/s", f"peak {measured['peak_mib']:,.0f} MiB"
        self._bar.set_postfix_str(f"loss {result.loss:.3f}, {speed}, {peak}")
        self._bar.update()
