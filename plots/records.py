"""Recorded measurements: where they are, how to make them, and what a caption says of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = {
    "training_text_h200.json": "python -m benchmarks training.throughput --models text-125m --lengths 2048 4096 8192 "
    "16384 32768 65536 --json benchmarks/results/training_text_h200.json",
    "training_h200.json": "python -m benchmarks training.throughput --json benchmarks/results/training_h200.json",
    "attention_h200.json": "python -m benchmarks attention.gpu --json benchmarks/results/attention_h200.json",
    "cpu_throughput.json": "make record",
    "memory_training.json": "make record",
    "recall_h200.json": "python -m benchmarks learning.recall --replayed --json benchmarks/results/recall_h200.json",
    "language_h200.json": "python -m benchmarks learning.language --json benchmarks/results/language_h200.json",
    "decode_h200.json": "python -m benchmarks decoding.gpu --json benchmarks/results/decode_h200.json",
}


class NotRecordedError(Exception):
    """A figure's measurements are not there."""


@dataclass(frozen=True)
class Record:
    """One file of measurements."""

    content: dict[str, Any]

    def points(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Points in the order of their lengths; of one kind, where the file has several."""
        chosen = [point for point in self.content["points"] if kind is None or point.get("kind") == kind]
        return sorted(chosen, key=lambda point: point["seq_len"])

    def curves(self, *quantities: str, names: Iterable[str], kind: str | None = None) -> dict[str, dict[int, float]]:
        """Sum quantities by name, then length, of the points of some names that have all of them."""
        found: dict[str, dict[int, float]] = {name: {} for name in names}
        for point in self.points(kind):
            if point["name"] in found and all(quantity in point for quantity in quantities):
                found[point["name"]][point["seq_len"]] = sum(point[quantity] for quantity in quantities)
        return {name: curve for name, curve in found.items() if curve}

    def where(self) -> str:
        """Name device, software and state of the code."""
        environment = self.content["environment"]
        count = environment["threads"]
        on_cpu = "cpu" in str(self.content.get("setting", "cpu"))
        threads = f"{count} thread{'s' * (count != 1)}, " if on_cpu else ""
        commits = Counter(point.get("commit", environment.get("commit")) for point in self.content["points"])
        (first, _), *others = commits.most_common()
        others = "".join(f", {count} points of {commit}" for commit, count in others)
        return f"{environment['device']}, {threads}torch {environment['torch']}, commit {first}{others}"

    def shapes(self) -> str:
        """Name the shape of all points."""
        setting = self.content["setting"]
        heads = f"{setting['num_heads']} query and {setting['num_kv_heads']} key heads of {setting['head_dim']}"
        return f"{setting['dtype']}, B={setting['batch']}, {heads}"


@dataclass(frozen=True)
class Results:
    """The folder of recorded measurements."""

    folder: Path

    def load(self, name: str) -> Record:
        """Read a file.

        Raises:
            NotRecordedError: it is not there; the message tells the command that records it.
        """
        path = self.folder / name
        if not path.exists():
            raise NotRecordedError(f"{path} is not recorded; {COMMANDS[name]} does so.")
        return Record(json.loads(path.read_text()))
