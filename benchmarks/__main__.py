"""List all benchmarks, or run one: ``python -m benchmarks [NAME [options]]``."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
INSTALLED_BY = {
    "transformers": "pip install '.[hf]'",
    "triton": "pip install triton, which has builds for Linux",
    "tqdm": "pip install '.[bench]'",
}
"""What some benchmarks need and not every environment has."""


def listed() -> dict[str, str]:
    """What each benchmark measures, by name: the first line of every module, one folder down, that has a ``main``.

    Modules are read and not imported, because some need what is not on every machine.
    """
    benchmarks = {}
    for file in sorted(HERE.glob("*/*.py")):
        module = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            name = file.parent.name if file.stem == "__main__" else f"{file.parent.name}.{file.stem}"
            benchmarks[name] = (ast.get_docstring(module) or "").partition("\n")[0]
    return benchmarks


def not_installed(package: str) -> str:
    """Return a message that a package is missing, and what installs it."""
    return f"{package} not installed: {INSTALLED_BY[package]}"


def main(argv: Sequence[str] | None = None) -> None:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    benchmarks = listed()
    if name in benchmarks:
        sys.argv[0] = f"python -m benchmarks {name}"  # what its help calls it
        module = f"benchmarks.{name}" if "." in name else f"benchmarks.{name}.__main__"
        try:
            benchmark = importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in INSTALLED_BY:
                raise
            raise SystemExit(f"{name}: {not_installed(missing)}") from None
        benchmark.main(arguments)
        return
    width = max(map(len, benchmarks))
    print("\n".join(f"{known:{width}}  {summary}" for known, summary in benchmarks.items()))
    if name not in ("", "-h", "--help"):
        raise SystemExit(f"\nexpected one of these, got {name!r}")
    print("\npython -m benchmarks NAME --help tells the options of one.")


if __name__ == "__main__":
    main()
