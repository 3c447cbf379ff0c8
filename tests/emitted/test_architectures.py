"""Every kernel fits the GPUs with the least shared memory, and those that are measured here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import triton

from tests.emitted.architectures import format_rows, survey

FOLDER = Path(__file__).parents[2] / "flexnsa" / "attention" / "triton" / "kernels"


def kernels() -> set[str]:
    """Give the names of our own kernels: functions whose decorator says what not to specialize."""
    functions = (node for file in FOLDER.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and any(isinstance(x, ast.Call) for x in node.decorator_list)
    }


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kernel_fits(target: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Machine code is asked for in bf16 on sm_90 alone. Packed rows take no more shared memory: sm_90 tries them."""
    whole = (target, dtype) == ("sm_90", "bf16")
    packed = (False, True) if whole else (target == "sm_90",)
    rows = list(survey([target], [dtype], [(128, 128)], packed=packed, machine_code=whole))
    with capsys.disabled():
        print(f"\n{format_rows(rows)}")
    assert all(row.is_good for row in rows)

    assert {"backward_parts", "importance_kernel"} <= kernels()
    names = kernels()
    expected = {x for x in names if (f"hopper_{x}" not in names if whole else not x.startswith("hopper_"))}
    assert expected <= {row.kernel for row in rows}, "a kernel that no call of tests/emitted/all_kernels.py launches"

    if whole and triton.__version__ < "3.8":  # which spills 64 bytes of a window
        assert not [row for row in rows if row.call.startswith("flex") and row.verdict == "spills"]
