"""A matrix runs every combination once, resumes where it was stopped, and names the cases that did not pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flexnsa
from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.diagnosis import Outcome, run_case, run_matrix
from flexnsa.lm.diagnosis import matrix as matrix_module
from flexnsa.lm.diagnosis.matrix import source_sha256, versions
from tests.lm.cli.tiny_run import write_text
from tests.lm.diagnosis.conftest import Diagnose

AXES = {"branches": [("cmp", "slc"), ("win",)], "impl": ["sdpa", "reference"], "precision": ["fp32", "bf16"]}
ONE_CASE = {"branches": [("win",)], "impl": ["sdpa"], "precision": ["fp32"]}


class Cases:
    """A step with chosen endings, which counts its calls."""

    def __init__(self, **endings: Any) -> None:
        self.endings, self.count = endings, 0

    def __call__(self, point: dict[str, Any], _folder: Path) -> Outcome:
        self.count += 1
        status = self.endings.get(point["impl"], "passed")
        if status == "interrupted":
            raise KeyboardInterrupt
        loss = 5.0 + (point["precision"] == "bf16") + 5e-3 * (point["impl"] == "reference")
        return Outcome(status, "why" * (status == "failed"), 1.0, {"losses": [9.0, loss]})


def fail() -> dict[str, Any]:
    raise ValueError("no such kernel")


def test_every_combination_has_a_folder_and_what_failed_is_named(tmp_path: Path) -> None:
    cases = Cases(reference="failed")
    matrix = run_matrix(tmp_path, AXES, cases)
    assert cases.count == 8
    assert not matrix.passed
    assert matrix.sentence.startswith(
        "4 of 8 cases passed; failed: branches=cmp+slc,impl=reference,precision=fp32; branches=cmp+slc,impl=reference,"
    )
    matrix = run_matrix(tmp_path, ONE_CASE, lambda _, folder: run_case(folder, fail, seconds=20), about={"new": 1})
    assert "rank 0: ValueError: no such kernel (test_matrix.py:" in matrix.table
    folder = tmp_path / "branches=win,impl=sdpa,precision=fp32"
    files = {LOCK_NAME, "environment.json", "log.rank-0.txt", "case.json", "outcome.json"}
    assert files == {file.name for file in folder.iterdir()}
    assert "ValueError: no such kernel" in (folder / "log.rank-0.txt").read_text()


def test_a_matrix_that_was_stopped_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_matrix(tmp_path, AXES, Cases(reference="interrupted"))
    axes = AXES | {"branches": [("cmp", "slc")]}
    rest = Cases(reference="failed")
    assert not run_matrix(tmp_path, axes, rest).passed
    assert rest.count == 2  # those of sdpa had ended
    again = Cases()
    assert not run_matrix(tmp_path, axes, again).passed  # what failed is not forgotten
    assert again.count == 0
    assert run_matrix(tmp_path, axes, again, retry=True).passed
    assert again.count == 2
    for count in (6, 6):
        matrix = run_matrix(tmp_path, axes, again, about={"seq_len": 99})
        assert (again.count, matrix.passed) == (count, True)
        assert matrix.spread == pytest.approx(1e-3, rel=0.01)  # among implementations, and not among precisions
        assert "losses of cases that compute the same differ by at most 1.0e-03" in matrix.sentence


@pytest.mark.parametrize("name", ["flexnsa_sha256", "device", "python", "torch", "triton"])
def test_an_outcome_of_other_code_is_not_taken_for_one_of_this(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, here = Cases(), versions()
    assert name in here
    for count, changes in [(1, {}), (1, {}), (2, {name: "another"}), (2, {name: "another"})]:
        monkeypatch.setattr(matrix_module, "versions", lambda: here | changes)  # noqa: B023
        run_matrix(tmp_path, ONE_CASE, cases)
        assert cases.count == count


def test_a_changed_file_of_a_package_changes_its_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "code.py"
    seen = set[str]()
    for content in ("a = 1", "a = 2"):
        file.write_text(content)
        seen.add(source_sha256(tmp_path))
    file.rename(tmp_path / "code.py")
    seen.add(source_sha256(tmp_path))
    assert len(seen) == 3
    assert source_sha256() == source_sha256(Path(flexnsa.__file__).parent)  # all of it, not the language model alone


@pytest.mark.parametrize("name", ["case.json", "outcome.json"])
def test_a_damaged_outcome_is_found_out_and_its_case_run_again(name: str, tmp_path: Path) -> None:
    cases = Cases()
    matrix = run_matrix(tmp_path, ONE_CASE, cases)
    (file,) = tmp_path.glob(f"*/{name}")
    whole = file.read_bytes()
    at = len(whole) // 3
    damages = [b"", whole[:-9], b"\xff", whole + whole, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]]
    for count, damaged in enumerate(damages, 2):
        file.write_bytes(damaged)
        again = run_matrix(tmp_path, ONE_CASE, cases)
        assert cases.count == count
        assert again.cases[0][1].values == matrix.cases[0][1].values


ONE_COMMAND = "--axis branches=win --axis impl=sdpa --axis precision=fp32 --axis checkpointing=all"


def test_the_command_runs_again_what_was_run_on_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diagnose: Diagnose
) -> None:
    ran: list[Path] = []

    def end_at_once(folder: Path, *_: Any, **__: Any) -> Outcome:
        ran.append(folder)
        return Outcome("passed", "", 1.0, {"losses": [1.0]})

    monkeypatch.setattr("flexnsa.lm.diagnosis.recipe.run_case", end_at_once)
    text = write_text(tmp_path / "text")
    for count, number in ((1, "8001"), (1, "8001"), (2, "8002"), (2, "8002")):
        text.write_text(text.read_text().replace("8001", number))
        diagnose("matrix", f"{ONE_COMMAND} --axis ranks=1")
        assert len(ran) == count


def test_the_command_trains_on_one_rank_and_on_two_alike(diagnose: Diagnose) -> None:
    ran = diagnose("matrix", f"{ONE_COMMAND} --eval-sequences 2")
    assert ran.out.startswith("2 of 2 cases passed; losses of cases that compute the same differ by at most ")
    assert [case["point"]["ranks"] for case in ran.record["cases"]] == [1, 2]
    losses = [case["values"]["losses"] for case in ran.record["cases"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert ran.err.count("passed in") == 2
    assert diagnose("matrix", f"{ONE_COMMAND} --eval-sequences 2").err == ""  # both had passed


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("magic=1", "--axis: expected NAME=VALUE,VALUE with the name of an option, got 'magic=1'"),
        ("dense_stages=1", "--axis: expected NAME=VALUE,VALUE with the name of an option, got 'dense_stages=1'"),
        ("device=x", "--axis: expected NAME=VALUE,VALUE with the name of an option, got 'device=x'"),
        ("seq_len=x", "--axis: expected values of seq_len, int, got 'x'"),
        ("compiled=maybe", "--axis: expected values of compiled, bool, got 'maybe'"),
        ("impl=flex", "--impl: expected 'auto' or 'sdpa' to train on a CPU"),
        ("parallel=none", "--parallel: expected one of 'ddp', 'fsdp2', got 'none'"),
        ("shared_keys=true", "--shared-keys/--no-shared-keys: expected False without the branches cmp and slc"),
        ("begin_as_mean=true", "--begin-as-mean/--no-begin-as-mean: expected False without the branches cmp"),
        ("gate=softmax", "--gate: expected 'sigmoid' for a single branch"),
    ],
)
def test_wrong_axes_are_named_before_any_case(axis: str, message: str, tmp_path: Path, diagnose: Diagnose) -> None:
    """The last three contradict a branch on its own, which is one of the default axis."""
    ran = diagnose("matrix", f"--axis {axis}")
    assert ran.status == 2
    (line,) = ran.err.splitlines()
    assert f"argument {message}" in line
    assert not (tmp_path / "out").exists()
