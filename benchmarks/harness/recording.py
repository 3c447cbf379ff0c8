"""Measurements on disk: their environment, and every point written at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flexnsa.files import write_whole
from flexnsa.lm.diagnosis.environment import environment

DIGITS = 6
"""Significant digits of recorded numbers: pages print sums and differences of them to four or five."""


class Recording:
    """A JSON file of an environment and a list of points, replaced in one move whenever a point is added.

    Args:
        path: the file, whose folder is made; None keeps everything in memory.
        about: what was measured, and how, in words.
        keep: continue with the points and notes of the file, such as those of an earlier, stopped run. Points of
            another commit name it.
        commit: commit of the code; by default that of the git checkout of this file.
    """

    def __init__(self, path: Path | None, about: str, *, keep: bool = False, commit: str | None = None) -> None:
        self.path = path
        self.content: dict[str, Any] = {"about": about, "environment": environment(commit), "points": []}
        if path is None:
            return
        if keep and path.exists():
            earlier = json.loads(path.read_text())
            commit, now = (content["environment"]["commit"] for content in (earlier, self.content))
            points = [point if commit == now else {"commit": commit} | point for point in earlier["points"]]
            self.content = earlier | self.content | {"points": points}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points recorded so far."""
        return self.content["points"]

    def add(self, point: dict[str, Any], key: Iterable[str] = ()) -> None:
        """Record a point; an earlier one with the same values of ``key`` is replaced."""
        key = tuple(key)
        if key:
            same = [old for old in self.points if all(old.get(name) == point.get(name) for name in key)]
            for old in same:
                self.points.remove(old)
        self.points.append(point)
        self.save()

    def note(self, **values: Any) -> None:
        """Record values besides the points."""
        self.content.update(values)
        self.save()

    def save(self) -> None:
        """Write the file; a process that is killed meanwhile leaves the previous one whole."""
        if self.path is None:
            return
        write_whole(self.path, encode(self.content))


def encode(content: Mapping[str, Any]) -> str:
    """Return a recording as JSON with one point a line, so that two versions differ by points."""
    lines = (f"{json.dumps(name)}: {_encode_lines(_shorten(value))}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _shorten(value: Any) -> Any:
    """Round all numbers with a fraction to :data:`DIGITS` significant digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _shorten(entry) for name, entry in value.items()}
    return [_shorten(entry) for entry in value] if isinstance(value, list | tuple) else value


def _encode_lines(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(value, separators=(",", ":"))
    return "[\n" + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in value) + "\n]"
