"""A thread beside each rank that ends a run which makes no steps, and says who held it up.

Threads of several ranks cannot ask each other through the process group, which may be what hangs. They leave what they
saw in the folder of the run.
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

from flexnsa.diagnostics.stacks import stacks_path, watch_thread
from flexnsa.diagnostics.stall import Sighting, describe_stall
from flexnsa.files import write_whole
from flexnsa.training import Trainer, Watcher

STALLED = 75
"""Exit status of every rank: a temporary failure (``EX_TEMPFAIL``), after which the same command may go on."""

ANSWER_SECONDS = 10.0
"""What a rank may take to leave its sighting, longer than the others."""

LONGEST = 1e6


def watchdog(seconds: float) -> Watcher:
    """Give a watcher of :func:`flexnsa.training.run` that ends all ranks when none has made a step for so long.

    Each writes its stacks twice to ``stacks.rank-<r>.txt``, and leaves with status 75.

    Raises:
        ValueError: ``seconds`` is no such time.
    """
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"watchdog: expected seconds, more than 0 and at most {LONGEST:.0f}, got {seconds}")

    @contextmanager
    def watch(trainer: Trainer, folder: Path) -> Iterator[_Watchdog]:
        trainer.ranks.on_first(lambda: _forget_sightings(folder))
        with stacks_path(folder, trainer.ranks.rank).open("a") as stacks:
            dog = _Watchdog(trainer, folder, seconds, stacks.fileno())
            try:
                yield dog
            finally:
                dog.end()

    return watch


class _Watchdog:
    """Called after each step; bites when it was not called for long, or when that of another rank has."""

    def __init__(self, trainer: Trainer, folder: Path, seconds: float, stacks: int) -> None:
        self.trainer, self.folder, self.seconds, self.stacks = trainer, folder, seconds, stacks
        self.pause = min(5.0, seconds / 2)
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        """Begin to wait for the next step."""
        self._since = time.monotonic()
        # Needs no Python, which a process that hangs may have locked
        faulthandler.dump_traceback_later(self.seconds + 2 * (self.pause + ANSWER_SECONDS), exit=True, file=self.stacks)

    def end(self) -> None:
        """Stop watching; if it bites already, let it: the ranks that leave first make others fail in a collective."""
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.seconds / 10)):
            if time.monotonic() - self._since > self.seconds or any(self.folder.glob(_file_name("*"))):
                self._bite()

    def _bite(self) -> None:
        ranks = self.trainer.ranks
        try:
            step, begun = self.trainer.step, ranks.collectives()
            self._write_stacks("before")
            moves, place = watch_thread(self._watched, self.pause)
            self._write_stacks("after")
            sighting = Sighting(step, begun, moves, place)
            write_whole(self.folder / _file_name(ranks.rank), json.dumps(asdict(sighting)) + "\n")
            seen = self._gather()
            answered = [rank for rank, sighting in enumerate(seen) if sighting is not None]
            if ranks.rank == answered[0]:
                message = f"{describe_stall(seen, self.seconds)} (stacks: {stacks_path(self.folder, '*')})"
                print(f"\nflexnsa train: error: {message}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # so that the others, too, have read what all have seen
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
        """Wait for the sightings of all ranks, but not for ever."""
        end = time.monotonic() + self.pause + ANSWER_SECONDS
        files = [self.folder / _file_name(rank) for rank in range(self.trainer.ranks.world_size)]
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        return [Sighting(**json.loads(file.read_text())) if file.exists() else None for file in files]


def _file_name(rank: int | str) -> str:
    return f"stall.rank-{rank}.json"


def _forget_sightings(folder: Path) -> None:
    for file in folder.glob(_file_name("*")):
        file.unlink()
