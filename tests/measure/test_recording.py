"""A recording on disk and one in memory only."""

from __future__ import annotations

import json
from pathlib import Path

from flexnsa.measure.recording import Recording


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
