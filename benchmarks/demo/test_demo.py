"""The demo from end to end, with next to nothing to do."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.demo import __main__ as demo
from benchmarks.harness.parity import measure_parity
from benchmarks.harness.scaling import measure
from flexnsa.lm import TrainConfig

TINY = demo.Size(
    training=TrainConfig(steps=4, batch_size=1, seq_len=96, eval_every=2, eval_sequences=2),
    sample_bytes=3,
    seq_lens=dict.fromkeys(("math SDPA", "flash SDPA", "NSA"), (256, 512)),
)


def test_demo_prints_its_tables_and_draws_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "QUICK", TINY)
    demo.main(["--quick", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    tables = "dk_cmp", "slope", "validation bits per byte", "the dense model of", "selection loss: 0."
    sizes = [int(size.replace(",", "")) for size in re.findall(r"of ([\d,]+) parameters", printed)]
    assert len(sizes) == 3
    assert sizes[2] == pytest.approx(sizes[0], rel=0.03), "NSA is compared with a dense model of as many parameters"
    for expected in (*tables, "NSA writes:", "def __init__"):
        assert expected in printed
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_plain_pytorch_is_as_exact_as_itself_and_sdpa_within_the_tolerance():
    rows = measure_parity(("reference", "sdpa"), (torch.float32,))
    assert len(rows) == 2 * 9
    for row in rows:
        assert 0 < row.plain_error < 1e-5
        if row.impl == "reference":
            assert row.error == row.plain_error
        else:
            assert row.error <= row.plain_error * (2 if row.tensor == "out" else 3)


def test_materialised_scores_are_counted():
    point = measure("math SDPA", 1024)
    scores = 12 * 1024 * 1024 * 4 / 2**20
    assert point.saved_mib >= scores
    assert point.peak_mib >= 2 * scores  # the probabilities and their gradient
    assert point.seconds > 0
