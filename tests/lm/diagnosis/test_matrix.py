"""A matrix runs every combination once, resumes where it was stopped, and names the cases that did not pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flexnsa
from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis import Outcome, run_case, run_matrix
from flexnsa.lm.diagnosis import matrix as matrix_module
from flexnsa.lm.diagnosis.matrix import source_sha256, versions
from tests.lm.cli.tiny_run import SIZES, write_text

AXES = {"branches": [("cmp", "slc"), ("win",)], "impl": ["sdpa", "reference"], "precision": ["fp32", "bf16"]}


class Cases:
    """A step with chosen endings, which counts its calls."""

    def __init__(self, **endings: Any) -> None:
        self.endings, self.asked = endings, 0

    def __call__(self, point: dict[str, Any], folder: Path) -> Outcome:
        self.asked += 1
        status = self.endings.get(point["impl"], "passed")
        if status == "interrupted":
            raise KeyboardInterrupt
        loss = 5.0 + (point["precision"] == "bf16") + 5e-3 * (point["impl"] == "reference")
        return run_case(folder, end, status, {"losses": [9.0, loss]}, seconds=20)


def end(status: str, values: dict[str, Any]) -> dict[str, Any]:
    if status == "failed":
        raise ValueError("no such kernel")
    return values


def test_every_combination_has_a_folder_and_what_failed_is_named(tmp_path: Path) -> None:
    cases = Cases(reference="failed")
    matrix = run_matrix(tmp_path, AXES, cases)
    assert cases.asked == 8
    assert not matrix.passed
    assert matrix.sentence.startswith(
        "4 of 8 cases passed; failed: branches=cmp+slc,impl=reference,precision=fp32; branches=cmp+slc,impl=reference,"
    )
    assert "rank 0: ValueError: no such kernel (test_matrix.py:" in matrix.table
    folder = tmp_path / "branches=win,impl=sdpa,precision=bf16"
    kept = {LOCK_NAME, "environment.json", "log.rank-0.txt", "outcome.json"}
    assert kept == {x.name for x in folder.iterdir()}
    failed = tmp_path / "branches=win,impl=reference,precision=bf16"
    assert "ValueError: no such kernel" in (failed / "log.rank-0.txt").read_text()


def test_a_matrix_that_was_stopped_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_matrix(tmp_path, AXES, Cases(reference="interrupted"))
    axes = AXES | {"branches": [("cmp", "slc")]}
    rest = Cases(reference="failed")
    assert not run_matrix(tmp_path, axes, rest).passed
    assert rest.asked == 2  # those of sdpa had ended
    again = Cases()
    matrix = run_matrix(tmp_path, axes, again)
    assert (again.asked, matrix.passed) == (0, False)  # what failed is not forgotten
    assert run_matrix(tmp_path, axes, again, retry=True).passed
    assert again.asked == 2
    other = Cases()
    assert run_matrix(tmp_path, axes, other, about={"seq_len": 99}).passed
    assert other.asked == 4
    matrix = run_matrix(tmp_path, axes, other, about={"seq_len": 99})
    assert other.asked == 4
    assert matrix.spread == pytest.approx(1e-3, rel=0.01)  # among implementations, and not among precisions
    assert "losses of cases that compute the same differ by at most 1.0e-03" in matrix.sentence


@pytest.mark.parametrize("name", ["flexnsa_sha256", "device", "python", "torch", "triton"])
def test_an_outcome_of_other_code_is_not_taken_for_one_of_this(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, cases = {"branches": [("win",)], "impl": ["sdpa"], "precision": ["fp32"]}, Cases()
    for asked in (1, 1):
        run_matrix(tmp_path, axes, cases)
        assert cases.asked == asked
    before = versions()
    assert name in before
    monkeypatch.setattr(matrix_module, "versions", lambda: before | {name: "another"})
    for asked in (2, 2):
        run_matrix(tmp_path, axes, cases)
        assert cases.asked == asked


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


def test_a_damaged_outcome_is_found_out_and_its_case_run_again(tmp_path: Path) -> None:
    axes, cases = {"branches": [("win",)], "impl": ["sdpa"], "precision": ["fp32"]}, Cases()
    matrix = run_matrix(tmp_path, axes, cases)
    (file,) = tmp_path.glob("*/outcome.json")
    whole = file.read_bytes()
    at = len(whole) // 3
    damages = [b"", whole[:-9], b"\xff", whole + whole, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]]
    for asked, damaged in enumerate(damages, 2):
        file.write_bytes(damaged)
        again = run_matrix(tmp_path, axes, cases)
        assert cases.asked == asked
        assert again.cases[0][1].values == matrix.cases[0][1].values


def test_the_command_runs_again_what_was_run_on_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []

    def end_at_once(folder: Path, *_: Any, **__: Any) -> Outcome:
        ran.append(folder)
        return run_case(folder, end, "passed", {"losses": [1.0]}, seconds=20)

    monkeypatch.setattr("flexnsa.lm.diagnosis.recipe.run_case", end_at_once)
    text = write_text(tmp_path / "text")
    command = ["diagnose", "matrix", "--text", str(text), *SIZES.replace("--steps 2", "").split()]
    command += ["--out", str(tmp_path / "matrix")]
    for axis in ("branches=win", "impl=sdpa", "precision=fp32", "checkpointing=all", "ranks=1"):
        command += ["--axis", axis]
    for number in (1, 1):
        main(command)
        assert len(ran) == number
    text.write_text(text.read_text().replace("8001", "8002"))
    for number in (2, 2):
        main(command)
        assert len(ran) == number


def test_the_command_trains_on_one_rank_and_on_two_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, seen = write_text(tmp_path / "text"), tmp_path / "seen.json"
    sizes = "--dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 2 --seq-len 24"
    command = ["diagnose", "matrix", "--text", str(text), *sizes.split(), "--device", "cpu"]
    command += ["--out", str(tmp_path / "matrix"), "--json", str(seen), "--eval-sequences", "2"]
    command += [
        "--axis",
        "branches=win",
        "--axis",
        "impl=sdpa",
        "--axis",
        "precision=fp32",
        "--axis",
        "checkpointing=all",
    ]
    main(command)
    said = capsys.readouterr()
    assert said.out.startswith("2 of 2 cases passed; losses of cases that compute the same differ by at most ")
    record = json.loads(seen.read_text())
    assert [case["point"]["ranks"] for case in record["cases"]] == [1, 2]
    losses = [case["values"]["losses"] for case in record["cases"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert said.err.count("passed in") == 2
    main(command)
    assert capsys.readouterr().err == ""  # both had passed
    for axis, message in {
        "magic=1": "expected NAME=VALUE,VALUE with the name of an option, got 'magic=1'",
        "model=x": "expected NAME=VALUE,VALUE with the name of an option, got 'model=x'",
        "device=x": "expected NAME=VALUE,VALUE with the name of an option, got 'device=x'",
        "seq_len=x": "expected values of seq_len, int, got 'x'",
        "compiled=maybe": "expected values of compiled, bool, got 'maybe'",
    }.items():
        with pytest.raises(SystemExit) as left:
            main([*command, "--axis", axis])
        assert left.value.code == 2
        assert f"argument --axis: {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main([*command, "--axis", "impl=flex"])
    assert left.value.code == 2
    assert "argument --impl: expected 'auto' or 'sdpa' to train on a CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--axis", "parallel=none"])
    assert "argument --parallel: expected one of 'ddp', 'fsdp2', got 'none'" in capsys.readouterr().err
