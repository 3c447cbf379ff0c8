"""Compile what a run on a GPU will measure, all of it at once, before anything is timed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CompileAhead:
    """Compiles every job in a process of its own, all at once, into the cache that the measurement then uses."""

    def __init__(self, options: argparse.Namespace, jobs: Sequence[tuple[str, int]], seconds: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.end = time.monotonic() + seconds
        self.running: list[tuple[Path, subprocess.Popen[bytes]]] = []
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
        for kind, length in jobs:
            file = Path(self.folder.name) / f"{kind}-{length}.json"
            command = [sys.executable, "-m", "benchmarks.attention.gpu", "--json", str(file)]
            command += [
                "--compile-only",
                kind,
                str(length),
                "--seconds",
                str(seconds),
                "--device",
                options.device,
                "--impl",
                options.impl,
            ]
            command += ["--tiny"] if options.tiny else []
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            self.running.append((file, process))

    def points(self) -> list[dict[str, Any]]:
        """Wait, and give the time of every first call."""
        for _, process in self.running:
            try:
                process.wait(max(1.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        files = [file for file, _ in self.running if file.exists()]
        points = [point for file in files for point in json.loads(file.read_text())["points"]]
        fields = ("kind", "name", "seq_len", "first_call_s", "label")
        return [{field: point[field] for field in fields if field in point} for point in points]
