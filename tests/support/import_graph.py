"""Who imports whom in this repository, read from the source: also inside functions and for the type checker only.

A file is named by its path from the root without the suffix: ``flexnsa/config``, ``flexnsa/lm/__init__``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("flexnsa", "benchmarks", "plots", "examples", "tests")

Graph = Mapping[str, set[str]]
"""The files, or rooms, that each of them imports."""


@cache
def sources() -> dict[str, ast.Module]:
    """Parse every file."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return {file.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(file.read_text()) for file in files}


@cache
def import_graph() -> dict[str, set[str]]:
    """Give the files of this repository that each file imports; importing a package runs more, which is no matter."""
    return {name: set(imported_names(name).values()) for name in sources()}


def imported_names(name: str) -> dict[str, str]:
    """Give what a file calls the things that it imports from this repository, and the file that each comes from."""
    found = {}
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if target := _find(name, alias.name):
                    found[alias.asname or alias.name] = target
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(name, node)
            for alias in node.names:
                if target := _find(name, f"{module}.{alias.name}") or _find(name, module):
                    found[alias.asname or alias.name] = target
    return found


def find_circle(graph: Graph) -> list[str]:
    """Give one circle, its first member twice, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def rooms(graph: Graph, depth: int = 2) -> dict[str, set[str]]:
    """Merge the files of each folder by the first parts of their names, ``flexnsa/attention`` by two of them."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        room = found.setdefault(_room(name, depth), set())
        room |= {_room(target, depth) for target in targets} - {_room(name, depth)}
    return found


def below(*prefixes: str, names: Iterable[str]) -> set[str]:
    """Give the files that are one of these or stand in one of these folders."""
    return {name for name in names if any(name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)}


def _room(name: str, depth: int) -> str:
    return "/".join(name.split("/")[:depth])


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """Give the module of ``from ..a import b`` with its dots resolved."""
    if not node.level:
        return node.module or ""
    package = name.split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _find(importer: str, module: str) -> str | None:
    """Give the file of a module; the tests import their helpers from their own folders, as pytest lets them."""
    path = module.replace(".", "/")
    folders = ["", f"{importer.rpartition('/')[0]}/", "tests/"] if importer.startswith("tests/") else [""]
    for folder in folders:
        for candidate in (f"{folder}{path}", f"{folder}{path}/__init__"):
            if candidate in sources() and candidate != importer:
                return candidate
    return None
