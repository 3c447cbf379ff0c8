"""The command line: what it imports, what it refuses and how, and the tables it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexnsa.cli import COMMANDS, main
from flexnsa.cli.options import require
from flexnsa.cli.power_law import fit_power_law
from flexnsa.cli.table import format_table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "argument --steps: expected more than 0, got 0"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--lr nan", "argument --lr: expected more than 0, got nan"),
        ("--num-heads 8 --num-kv-heads 3", "argument --num-kv-heads: expected a divisor of num_heads=8, got 3"),
        ("--compress-block-size 20", "argument --compress-block-size: expected a multiple of compress_stride=8"),
        ("--compression fft", "argument --compression: expected one of 'mean', 'linear', 'mlp', got 'fft'"),
        ("--impl magic", "argument --impl: expected one of 'auto', "),
        ("--branches cmp far", "argument --branches: expected some of ('cmp', 'slc', 'win')"),
        ("--attention linear", "argument --attention: invalid choice: 'linear'"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--preset huge", "argument --preset: invalid choice: 'huge'"),
        ("--device abacus", "argument --device: expected a device such as cpu or cuda:0, got 'abacus'"),
        ("--text /nowhere", "argument --text: expected a file or a folder, got '/nowhere'"),
        ("--seq-len 99999999", "argument --seq-len: expected less than the "),
        ("--no-such-thing", "unrecognized arguments: --no-such-thing"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--device", "cpu", "--out", str(tmp_path), *arguments.split()])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_options(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"usage: flexnsa {command} [-h]" in capsys.readouterr().out


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main([])
    assert leaving.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_library_imports_torch_and_none_of_the_extras():
    code = (
        "import sys, torch; before = set(sys.modules); import flexnsa, flexnsa.models, flexnsa.training; "
        "print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    imported = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "flexnsa" in imported
    assert not [name for name in ("numpy", "matplotlib", "tqdm", "safetensors") if name in imported]


def test_missing_package_is_answered_with_its_extra():
    require("json", extra="train")
    with pytest.raises(SystemExit, match=r'no_such_package not installed; try: pip install "flexnsa\[plot\]"'):
        require("json", "no_such_package", extra="plot")


def test_table_aligns_words_left_and_numbers_right():
    table = format_table(["name", "MiB"], [["a", "1"], ["longer", "1,000"]])
    assert table == "name      MiB\n------  -----\na           1\nlonger  1,000"
    with pytest.raises(ValueError, match=r"zip\(\)"):
        format_table(["name", "MiB"], [["a"]])


def test_power_law_is_found_and_what_is_none_is_told():
    fit = fit_power_law((length, 3 * length**2) for length in (1, 2, 4, 8))
    assert (fit.exponent, fit.constant, fit.residual) == (pytest.approx(2), pytest.approx(3), pytest.approx(0))
    assert fit_power_law([(1024, 5.0), (2048, 10.0)]).exponent == pytest.approx(1)
    # A line through the logarithms of 1, 2 * 1.5 ** 3, 4 has the slope of the first to the last.
    fit = fit_power_law([(1, 1.0), (2, 2 * 1.5**3), (4, 4.0)])
    assert (fit.exponent, fit.constant, fit.residual) == (pytest.approx(1), pytest.approx(1.5), pytest.approx(1.25))
    for points in ([(1024, 5.0)], [(1024, 5.0), (1024, 6.0)], [(1024, 0.0), (2048, 1.0)]):
        with pytest.raises(ValueError, match="points: expected positive values at two lengths"):
            fit_power_law(points)
