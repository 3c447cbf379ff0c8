"""A thread in each rank that ends a run without progress, and names the rank that the others waited for.

These threads cannot communicate through the process group, which may hang. They write files to the folder of the run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from flexnsa.files import write_whole
from flexnsa.lm.checkpoint.lock import hold, is_gone
from flexnsa.lm.diagnosis.hang_report import Collective, Sighting, describe_stall, write_flight_record
from flexnsa.lm.diagnosis.stacks import place_of_error, stacks_path, watch_thread
from flexnsa.lm.training.run import Watcher
from flexnsa.lm.training.trainer import Trainer

STALLED = 75
"""Exit status of every rank: a temporary failure (``EX_TEMPFAIL``), after which the same command may resume."""

ANSWER_SECONDS = 10.0
"""Time that a rank may take longer than the others to write its snapshot."""

LONGEST = 1e6


def watchdog(seconds: float) -> Watcher:
    """Return a watcher of :func:`flexnsa.lm.training.run` that ends all ranks after so many seconds without a step.

    It also ends them when a rank is gone and the connection to it is lost. Each rank writes its stacks to
    ``stacks.rank-<r>.txt``, twice if it may be running, the record of PyTorch's flight recorder to ``flight.rank-<r>``,
    and leaves with status 75.

    Raises:
        ValueError: ``seconds`` is out of range.
    """
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"watchdog: expected seconds, more than 0 and at most {LONGEST:.0f}, got {seconds}")

    @contextmanager
    def watch(trainer: Trainer, folder: Path) -> Iterator[_Watchdog]:
        trainer.ranks.on_first(lambda: [file.unlink() for file in folder.glob(_file_name("*"))])  # of an earlier run
        with stacks_path(folder, trainer.ranks.rank).open("a") as stacks:
            hold(stacks)
            trainer.ranks.gather(None)  # from here on, a rank that holds no file is gone
            dog = _Watchdog(trainer, folder, seconds, stacks.fileno())
            try:
                yield dog
            except RuntimeError as error:
                if isinstance(error, dist.DistError) or "gloo/transport" in str(error):  # a connection is lost
                    traceback.print_exception(error)
                    dog.fire(place_of_error(error))
                raise
            finally:
                dog.end()

    return watch


class _Watchdog:
    """Called after each step; fires on timeout, or when the watchdog of another rank has fired."""

    def __init__(self, trainer: Trainer, folder: Path, seconds: float, stacks: int) -> None:
        self.trainer, self.folder, self.seconds, self.stacks = trainer, folder, seconds, stacks
        self.pause = min(5.0, seconds / 2)
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._firing = threading.Lock()
        self()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        """Start to wait for the next step."""
        self._since = time.monotonic()
        # Works without the lock of Python, which a hanging process may hold
        faulthandler.dump_traceback_later(self.seconds + 2 * (self.pause + ANSWER_SECONDS), exit=True, file=self.stacks)

    def end(self) -> None:
        """Stop watching, unless it is firing: ranks that leave first make others fail in a collective."""
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.seconds / 10)):
            if time.monotonic() - self._since > self.seconds or any(self.folder.glob(_file_name("*"))):
                self.fire()

    def fire(self, broke_off_in: str | None = None) -> NoReturn:
        """Report why there is no progress, or which rank is gone if this one ``broke_off_in`` a place, and end."""
        if not self._firing.acquire(blocking=False):
            threading.Event().wait()  # the other thread will end the process
        ranks = self.trainer.ranks
        try:
            step, begun = self.trainer.step, ranks.collectives()
            self._write_stacks("before")
            recent = write_flight_record(self.folder / f"flight.rank-{ranks.rank}")
            if broke_off_in is None:
                moves, place = watch_thread(self._watched, self.pause)
                self._write_stacks("after")
            else:
                moves, place = False, broke_off_in
            sighting = Sighting(step, begun, moves, place, recent, broke_off_in is not None)
            write_whole(self.folder / _file_name(ranks.rank), json.dumps(asdict(sighting)) + "\n")
            seen = self._gather()
            answered = [rank for rank, sighting in enumerate(seen) if sighting is not None]
            if ranks.rank == answered[0]:
                gone = [rank for rank in range(ranks.world_size) if self._is_gone(rank)]
                message = f"{describe_stall(seen, self.seconds, gone)} (stacks: {stacks_path(self.folder, '*')})"
                print(f"\nflexnsa train: error: {message}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # so that the others have read all snapshots too
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(STALLED)

    def _write_stacks(self, when: str) -> None:
        header = f"\nstep {self.trainer.step}, {when} a pause of {self.pause:g} s, {time.strftime('%F %T')}\n"
        os.write(self.stacks, header.encode())
        faulthandler.dump_traceback(self.stacks, all_threads=True)

    def _gather(self) -> list[Sighting | None]:
        """Wait for the snapshots of all ranks that are not gone, up to a limit."""
        end = time.monotonic() + self.pause + ANSWER_SECONDS
        files = [self.folder / _file_name(rank) for rank in range(self.trainer.ranks.world_size)]
        while time.monotonic() < end and not all(x.exists() or self._is_gone(rank) for rank, x in enumerate(files)):
            time.sleep(0.05)
        return [_read(file) if file.exists() else None for file in files]

    def _is_gone(self, rank: int) -> bool:
        return rank != self.trainer.ranks.rank and is_gone(stacks_path(self.folder, rank))


def _read(file: Path) -> Sighting:
    values = json.loads(file.read_text())
    return Sighting(**values | {"recent": [Collective(**x) for x in values["recent"]]})


def _file_name(rank: int | str) -> str:
    return f"stall.rank-{rank}.json"
