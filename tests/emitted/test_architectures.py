"""Every kernel fits the GPUs with the least shared memory, and those that are measured here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.emitted.architectures import format_rows, survey

KERNELS = Path(__file__).parents[2] / "flexnsa" / "attention" / "triton"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_every_kernel_fits(target: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(survey([target], [dtype], [(128, 128)]))
    with capsys.disabled():
        print(f"\n{format_rows(rows)}")
    assert all(row.is_good for row in rows)

    launches = re.compile(r"launch\((\w+),|launch: Any = (\w+)\[")
    found = (match for file in KERNELS.glob("*.py") for match in launches.findall(file.read_text()))
    ours = {"".join(names).removeprefix("_") for names in found}
    assert "backward_parts" in ours
    assert ours <= {row.kernel for row in rows}, "a kernel that no call of tests/emitted/all_kernels.py launches"

    if (target, dtype) == ("sm_90", "bf16"):
        assert not [row for row in rows if row.call.startswith("flex") and row.verdict == "spills"]
