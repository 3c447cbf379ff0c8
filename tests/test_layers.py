"""The package is a list of layers: a file imports from its own layer or those above it in LAYERS, never from below.

So it can be read from the first line of LAYERS to the last, and every part can be used without what is built on it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flexnsa

ROOT = Path(flexnsa.__file__).parent
LAYERS = [
    ["checks", "config", "geometry", "operators", "threads"],
    ["compression", "gating", "rope"],
    ["masks", "mods", "packing"],
    ["kernels", "scoring_triton"],
    ["scoring", "selection", "reads"],
    ["attention"],
    ["arguments", "functional"],
    ["module", "cache", "checkpointing"],
    ["measure"],
    ["models"],
    ["memory"],
    ["training"],
    ["cli", "__main__"],
]
SIBLINGS = {name for name in ("reference", "sdpa", "flex") if (ROOT / "attention" / f"{name}.py").exists()}
FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


def modules_imported(file: Path) -> set[str]:
    """Every module of the package that the file imports, also inside functions, as ``a.b`` below ``flexnsa``."""
    package = file.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package) + 1
            base = ["flexnsa", *package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("flexnsa.") for name in found if name.startswith("flexnsa.")}


def layer_of(module: str) -> int:
    """Rank in LAYERS; names of the public API (``from flexnsa import NSAConfig``) rank with ``module``."""
    top = "module" if module in flexnsa.__all__ else module.split(".")[0]
    layers = [rank for rank, names in enumerate(LAYERS) if top in names]
    assert layers, f"flexnsa/{top} has no place in LAYERS"
    return layers[0]


@pytest.mark.parametrize(
    "file", [f for f in FILES if f != ROOT / "__init__.py"], ids=lambda f: str(f.relative_to(ROOT))
)
def test_imports_point_one_way(file: Path) -> None:
    own = layer_of(file.relative_to(ROOT).parts[0].removesuffix(".py"))
    below = {module for module in modules_imported(file) if layer_of(module) > own}
    assert not below, f"{file.relative_to(ROOT)} imports from a layer built on it: {sorted(below)}"


@pytest.mark.parametrize("name", sorted(SIBLINGS))
def test_implementations_never_import_one_another(name: str) -> None:
    file = ROOT / "attention" / f"{name}.py"
    imported = {part for module in modules_imported(file) for part in module.split(".")}
    assert not imported & (SIBLINGS - {name})


def test_the_oracle_shares_no_attention_masking_or_scoring_code() -> None:
    shared = {".".join(module.split(".")[:-1]) for module in modules_imported(ROOT / "attention" / "reference.py")}
    assert shared <= {"config", "geometry", "masks.positions"}


def test_masks_know_nothing_of_scores() -> None:
    for file in (ROOT / "masks").glob("*.py"):
        assert {module.split(".")[0] for module in modules_imported(file)} <= {"checks", "config", "geometry", "masks"}


def test_importing_flexnsa_brings_in_nothing_but_torch() -> None:
    code = "import sys, torch; before = set(sys.modules); import flexnsa; print(*sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    brought = {name.split(".")[0] for name in result.stdout.split()} - set(sys.stdlib_module_names)
    assert "flexnsa" in brought
    assert brought <= {"flexnsa", "torch"}
