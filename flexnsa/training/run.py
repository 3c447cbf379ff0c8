"""A run in a folder: goes on from its checkpoint, logs every step, and can be killed at any time."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from flexnsa.training.checkpoint import load_checkpoint, save_checkpoint
from flexnsa.training.lock import locked
from flexnsa.training.log import JSONLog
from flexnsa.training.trainer import Trainer

CHECKPOINT_NAME = "checkpoint.safetensors"
LOG_NAME = "log.jsonl"


def run(trainer: Trainer, folder: Path) -> int | None:
    """Train to the last step, from the folder's checkpoint if it has one.

    Writes ``checkpoint.safetensors`` and ``log.jsonl``. SIGINT and SIGTERM end the run after the step under way, with
    a checkpoint, however often they come; a kill (SIGKILL, or SIGQUIT from a terminal) loses the steps since the last
    checkpoint, which the next start repeats to the same numbers.

    Returns:
        The number of the signal that ended the run early, if one did.

    Raises:
        FileError: another process trains in the folder, a file in it is none of a run, or the checkpoint is of another
            model, another text or another way of training. All files are as they were.
    """
    from tqdm import tqdm

    config = trainer.config
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / CHECKPOINT_NAME
    with locked(folder), stop_requests() as stop:
        if checkpoint.exists():
            load_checkpoint(checkpoint, trainer)
        first = saved = trainer.step
        log = JSONLog(folder / LOG_NAME, resume_step=trainer.step)
        bar = tqdm(total=config.steps, initial=trainer.step, unit="step", dynamic_ncols=True)
        with closing(log), bar:
            if trainer.compiled:
                bar.write("compiling one decoder layer, forward and backward, which all layers share ...")
            while trainer.step < config.steps and not stop:
                start = time.perf_counter()
                result = trainer.train_step()
                seconds = time.perf_counter() - start
                if trainer.compiled and result.step == first:
                    bar.write(f"compiled, with the first step, in {seconds:.1f} s")
                record = asdict(result) | throughput(trainer, seconds)
                done = trainer.step
                if done % config.eval_every == 0 or done == config.steps:
                    record["validation_bits_per_byte"] = trainer.validation_bits_per_byte()
                    bar.write(f"step {done}: validation {record['validation_bits_per_byte']:.4f} bits per byte")
                log.write(record)
                if done % config.checkpoint_every == 0:
                    save_checkpoint(checkpoint, trainer)
                    saved = done
                speed, peak = f"{record['tokens_per_second']:,.0f} tok/s", f"peak {record['peak_mib']:,.0f} MiB"
                bar.set_postfix_str(f"loss {result.loss:.3f}, {speed}, {peak}")
                bar.update()
            # Here and not in the loop: a signal may come between any two of its lines
            if saved != trainer.step:
                save_checkpoint(checkpoint, trainer)
    return stop[0] if stop else None


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
