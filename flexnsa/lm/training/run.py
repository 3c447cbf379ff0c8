"""A run in a folder: it resumes from its checkpoint, logs every step, and can be killed at any time."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from flexnsa.config import num_free_blocks
from flexnsa.files import FileError
from flexnsa.lm.checkpoint.lock import locked
from flexnsa.lm.checkpoint.log import LOG_NAME, JSONLog
from flexnsa.lm.data.tokenizer import FILE_NAME
from flexnsa.lm.measure.memory import peaks_in_mib
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.lm.training.trainer import StepResult, Trainer
from flexnsa.optim import audit

Watcher = Callable[[Trainer, Path], AbstractContextManager[Callable[[], object]]]
"""A monitor: a context that every rank enters before its first step, and that yields a function to call after each.

A start without steps left to take enters none.
"""


def run(trainer: Trainer, folder: Path, *, log_ranks: bool = False, watchers: Sequence[Watcher] = ()) -> int | None:
    """Train to the last step, from the folder's checkpoint if it has one; all ranks of the trainer together.

    Writes ``log.jsonl`` and ``checkpoint.safetensors``, or ``checkpoint-<step>.dcp`` where parameters are sharded, and
    ``tokenizer.json`` where the text has a tokenizer.
    SIGINT and SIGTERM, sent to any rank any number of times, end the run with a checkpoint after the current step. A
    kill (SIGKILL, or SIGQUIT from a terminal) loses the steps since the last checkpoint, which the next start repeats
    with the same results. A run that resumes with another number of steps keeps those that are done, and takes the
    others by the schedule of the new number.

    Args:
        trainer: its state is replaced by that of the checkpoint, if there is one.
        folder: folder of the run, the same for all ranks.
        log_ranks: keep a log on every rank, ``log.rank-<r>.jsonl`` in the same folder.
        watchers: monitors, such as those of :mod:`flexnsa.lm.diagnosis`.

    Returns:
        The number of the signal that ended the run early, if one did.

    Raises:
        FileError: another process trains in the folder, a file in it does not belong to a run, the checkpoint is of
            another model, text or training, or ranks see different folders. All files are unchanged.
        OSError: a file could not be written; names it, the same on all ranks.
    """
    config, ranks = trainer.config, trainer.ranks
    with reserved(folder, ranks), stop_requests() as stop:

        def stopped() -> int:
            return ranks.largest(stop[0] if stop else int(report.error is not None))

        checkpoint = newest_checkpoint(folder)
        ranks.require_same(lambda: {"newest checkpoint": checkpoint and checkpoint.name})
        planned = config.steps if checkpoint is None else load_checkpoint(checkpoint, trainer)
        tokenized = trainer.corpus.tokenized
        if tokenized is not None:
            ranks.on_first(lambda: tokenized.tokenizer.keep(folder / FILE_NAME, is_known=checkpoint is not None))
        first = saved = trainer.step
        with closing(Report(folder, trainer, log_ranks=log_ranks)) as report, ExitStack() as watching:
            left = watchers if trainer.step < config.steps else ()
            watched = [watching.enter_context(watcher(trainer, folder)) for watcher in left]
            if planned != config.steps and first < config.steps:
                schedule = f"step {first} goes on by the schedule of {config.steps} steps in place of {planned}"
                report.say(f"{schedule}: its learning rate is {config.learning_rate(first):.3g}")
            if trainer.compiled:
                report.say("compiling one decoder layer, forward and backward, which all layers share ...")
            while trainer.step < config.steps and not stopped():
                if trainer.step in (first, *config.by_stage()):
                    _begin_stage(trainer, report)
                start = time.perf_counter()
                result = trainer.train_step()
                seconds = time.perf_counter() - start
                if trainer.compiled and result.step == first:
                    report.say(f"compiled, with the first step, in {seconds:.1f} s")
                measured = {"tokens_per_second": trainer.config.tokens_per_step / seconds}
                measured["peak_mib"] = next(iter(peaks_in_mib(trainer.device).values()))  # of the run so far
                done = trainer.step
                if done % config.eval_every == 0 or done == config.steps:
                    measured["validation_bits_per_byte"] = bits = trainer.validation_bits_per_byte()
                    how = ", attending densely" if result.dense else ""
                    report.say(f"step {done}: validation {bits:.4f} bits per byte{how}")
                report.write(result, measured)
                if done % config.checkpoint_every == 0:
                    report.check()
                    save_checkpoint(checkpoint_path(folder, trainer), trainer)
                    saved = done
                report.advance(result, measured)
                for tell in watched:
                    tell()
            report.check()
            # Here and not in the loop, because a signal may come between any two of its lines
            if saved != trainer.step:
                save_checkpoint(checkpoint_path(folder, trainer), trainer)
        return stopped() or None


def _begin_stage(trainer: Trainer, report: Report) -> None:
    """Enter a stage; say what it learns from, if there are several, and whether that teaches indexers nothing."""
    config, step = trainer.config, trainer.step
    stage, kind = config.at(step), config.kind(step)
    if config.stages:
        rows = f"{stage.sequences_per_step} sequences of {stage.seq_len:,} tokens"
        report.say(f"step {step}: {rows}{', attending densely' * (kind != 'joint')}")
    trainer.enter(step)
    if kind == "indexers":
        report.say(audit(trainer.model))
    taught = kind != "dense" and trainer.model.indexers_by_layer()
    if taught and num_free_blocks(stage.seq_len, trainer.model.config.nsa) < 2:
        why = "only one block, or none, is not forced (--num-init-blocks, --num-local-blocks)"
        report.say(f"step {step}: {stage.seq_len:,} tokens are too few to teach indexers, because {why}")


@contextmanager
def reserved(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make the folder, and keep other runs out of it.

    Raises:
        FileError: another process has it, or ranks see different folders.
    """
    with ExitStack() as stack:

        def reserve() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))

        ranks.on_first(reserve)
        if ranks.world_size > 1:
            _require_one_folder(folder, ranks)
        yield


def require_one_run(folder: Path, ranks: Ranks) -> None:
    """Check that all ranks see the same checkpoint, before they build what it describes.

    Raises:
        FileError: they see different folders.
    """
    newest = newest_checkpoint(folder) if folder.is_dir() else None
    names = ranks.gather(newest and newest.name)
    _refuse_folders(folder, [rank for rank, name in enumerate(names) if name != names[0]])


def _require_one_folder(folder: Path, ranks: Ranks) -> None:
    """Check that all ranks see a file that rank 0 makes: shards in different folders would be lost."""
    mark = folder / f".flexnsa.seen-{ranks.gather(secrets.token_hex(8))[0]}"
    ranks.on_first(mark.touch)
    blind = [rank for rank, sees in enumerate(ranks.gather(mark.exists())) if not sees]
    ranks.on_first(mark.unlink)
    _refuse_folders(folder, blind)


def _refuse_folders(folder: Path, blind: list[int]) -> None:
    if blind:
        message = f"{folder}: not the same folder on rank {', '.join(map(str, blind))} as on rank 0"
        raise FileError(f"{message}; take a folder that all machines share (--out)")


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of ending."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Report:
    """The progress bar and the log of rank 0, and a log of each other rank if ``log_ranks``.

    Args:
        folder: folder of the run.
        trainer: at the step to resume from; later records of the log are dropped.
        log_ranks: write ``log.rank-<r>.jsonl`` on every rank ``r`` but the first.

    Raises:
        FileError: there is such a file, but it is not a log.
    """

    def __init__(self, folder: Path, trainer: Trainer, *, log_ranks: bool = False) -> None:
        from tqdm import tqdm

        rank, step = trainer.ranks.rank, trainer.step
        self._log: JSONLog | None = None
        self.error: OSError | None = None
        """Why this rank could not write its log; the others do not know yet."""
        self._ranks = trainer.ranks
        name = f"log.rank-{rank}.jsonl" if rank else LOG_NAME
        trainer.ranks.on_all(lambda: self._open(folder / name, step) if log_ranks or not rank else None)
        options: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "disable": rank != 0}
        self._bar = tqdm(total=trainer.config.steps, initial=step, **options)

    def _open(self, path: Path, step: int) -> None:
        self._log = JSONLog(path, resume_step=step)

    def close(self) -> None:
        """Close the bar and the log."""
        self._bar.close()
        if self._log is not None:
            self._log.close()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line)

    def write(self, result: StepResult, measured: dict[str, float]) -> None:
        """Log a step with its measurements; :meth:`check` raises an error of this."""
        if self._log is not None and self.error is None:
            try:
                self._log.write(result.to_dict() | measured)
            except OSError as error:  # not raised here: the other ranks would wait for this one
                self.error = error

    def check(self) -> None:
        """Check that every rank has logged every step. All ranks have to call it.

        Raises:
            OSError: a log could not be written; names it.
        """
        self._ranks.on_all(self._check_own)

    def _check_own(self) -> None:
        if self.error is not None:
            raise self.error

    def advance(self, result: StepResult, measured: dict[str, float]) -> None:
        """Move the bar by a step."""
        speed, peak = f"{measured['tokens_per_second']:,.0f} tok/s", f"peak {measured['peak_mib']:,.0f} MiB"
        self._bar.set_postfix_str(f"loss {result.loss:.3f}, {speed}, {peak}")
        self._bar.update()
