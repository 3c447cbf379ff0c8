"""A recording on disk and one in memory only."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness.recording import Recording


def test_every_point_is_on_disk_as_soon_as_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "points.json"
    earlier = Recording(path, "what and how")
    earlier.note(plan="long")
    earlier.add({"name": "NSA", "ms": 1.0})
    recording = Recording(path, "what and how", keep=True, commit="c0ffee")
    recording.add({"name": "NSA", "ms": 2.0}, key=["name"])
    assert json.loads(path.read_text())["points"] == [{"name": "NSA", "ms": 2.0}]
    assert recording.content["environment"]["commit"] == "c0ffee"
    assert recording.content["plan"] == "long"


def test_a_point_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    recording = Recording(path, "what and how")
    for name in ("first", "second"):
        recording.add({"name": name, "losses": [3.5, 2.5], "sizes": {"l": 32}})
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"name"')] == recording.points
    assert json.loads(path.read_text()) == recording.content


def test_numbers_keep_six_digits(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "points.json", "what and how")
    recording.note(setting={"rates": (1.23456789e-4, 6e-4), "tokens": 1234567})
    recording.add({"ms": 1234.5678, "all": [1 / 3, [2 / 3]]})
    content = json.loads((tmp_path / "points.json").read_text())
    assert content["setting"] == {"rates": [1.23457e-4, 6e-4], "tokens": 1234567}
    assert content["points"] == [{"ms": 1234.57, "all": [0.333333, [0.666667]]}]


def test_points_of_an_earlier_commit_say_so(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    Recording(path, "what and how", commit="beef").add({"name": "first"})
    for commit, name in (("c0ffee", "second"), ("c0ffee", "third"), ("facade", "fourth")):
        Recording(path, "what and how", keep=True, commit=commit).add({"name": name})
    commits = {point["name"]: point.get("commit") for point in json.loads(path.read_text())["points"]}
    assert commits == {"first": "beef", "second": "c0ffee", "third": "c0ffee", "fourth": None}


def test_without_a_file_points_are_kept_in_memory() -> None:
    recording = Recording(None, "what and how")
    recording.add({"name": "NSA"})
    assert recording.points == [{"name": "NSA"}]
