"""A run in a folder: goes on from its checkpoint, logs every step, and can be killed at any time."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from flexnsa.distributed import Ranks
from flexnsa.errors import FileError
from flexnsa.files import write_whole
from flexnsa.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.training.lock import locked
from flexnsa.training.report import Report
from flexnsa.training.tokenizer import FILE_NAME
from flexnsa.training.trainer import Trainer

Watcher = Callable[[Trainer, Path], AbstractContextManager[Callable[[], object]]]
"""What looks on: entered by every rank before the first step of a start, it gives what is called after each step.

A start that finds nothing left to do has none.
"""


def run(trainer: Trainer, folder: Path, *, log_ranks: bool = False, watchers: Sequence[Watcher] = ()) -> int | None:
    """Train to the last step, from the folder's checkpoint if it has one; all ranks of the trainer together.

    Writes ``log.jsonl`` and ``checkpoint.safetensors``, or ``checkpoint-<step>.dcp`` where parameters are sharded, and
    ``tokenizer.json`` where the text has a tokenizer.
    SIGINT and SIGTERM, sent to any rank, end the run after the step under way, with a checkpoint, however often they
    come; a kill (SIGKILL, or SIGQUIT from a terminal) loses the steps since the last checkpoint, which the next start
    repeats to the same numbers.

    Args:
        trainer: what is trained.
        folder: of the run, the same for all ranks.
        log_ranks: keep a log on every rank, ``log.rank-<r>.jsonl`` beside that of rank 0.
        watchers: such as those of :mod:`flexnsa.diagnostics`.

    Returns:
        The number of the signal that ended the run early, if one did.

    Raises:
        FileError: another process trains in the folder, a file in it is none of a run, or the checkpoint is of another
            model, another text or another way of training. All files are as they were.
    """
    config, ranks = trainer.config, trainer.ranks
    with reserved(folder, ranks), stop_requests() as stop:

        def stopped() -> int:
            return ranks.largest(stop[0] if stop else 0)

        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None:
            load_checkpoint(checkpoint, trainer)
        _require_one_start(trainer, folder)
        tokenized = trainer.corpus.tokenized
        if tokenized is not None:
            ranks.on_first(lambda: write_whole(folder / FILE_NAME, tokenized.tokenizer.content))
        first = saved = trainer.step
        with Report(folder, trainer, log_ranks=log_ranks) as report, ExitStack() as watching:
            left = watchers if trainer.step < config.steps else ()
            told = [watching.enter_context(watcher(trainer, folder)) for watcher in left]
            if trainer.compiled:
                report.say("compiling one decoder layer, forward and backward, which all layers share ...")
            while trainer.step < config.steps and not stopped():
                start = time.perf_counter()
                result = trainer.train_step()
                seconds = time.perf_counter() - start
                if trainer.compiled and result.step == first:
                    report.say(f"compiled, with the first step, in {seconds:.1f} s")
                measured = throughput(trainer, seconds)
                done = trainer.step
                if done % config.eval_every == 0 or done == config.steps:
                    measured["validation_bits_per_byte"] = bits = trainer.validation_bits_per_byte()
                    report.say(f"step {done}: validation {bits:.4f} bits per byte")
                report.write(result, measured)
                if done % config.checkpoint_every == 0:
                    save_checkpoint(checkpoint_path(folder, trainer), trainer)
                    saved = done
                report.advance(result, measured)
                for tell in told:
                    tell()
            # Here and not in the loop: a signal may come between any two of its lines
            if saved != trainer.step:
                save_checkpoint(checkpoint_path(folder, trainer), trainer)
        return stopped() or None


@contextmanager
def reserved(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make the folder, and keep other runs out of it.

    Raises:
        FileError: another process has it.
    """
    with ExitStack() as stack:

        def reserve() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))

        ranks.on_first(reserve)
        yield


def _require_one_start(trainer: Trainer, folder: Path) -> None:
    """Demand that all ranks have found the same checkpoint: their disk has to be the same."""
    last, first = trainer.ranks.largest(trainer.step), -trainer.ranks.largest(-trainer.step)
    if first != last:
        message = f"{folder}: some processes found a checkpoint of step {first}, others of step {last}"
        raise FileError(f"{message}; take a folder that all machines share")


def throughput(trainer: Trainer, seconds: float) -> dict[str, float]:
    """Give the speed of a step and the most memory that the process has held."""
    config = trainer.config
    tokens = config.batch_size * config.grad_accumulation * config.seq_len
    return {"tokens_per_second": tokens / seconds, "peak_mib": peak_bytes(trainer.device) / 2**20}


def peak_bytes(device: torch.device) -> int:
    """Give the peak of allocated CUDA memory, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying of them."""
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
