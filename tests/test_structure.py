"""The repository is a house: rooms on floors, imports point downwards, and nothing private leaves its file.

So it can be read from the first floor to the last, and every part can be used without what is built on it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import pytest

from tests.support.import_graph import ROOT, below, find_circle, import_graph, imported_names, rooms, sources

FLOORS = (
    # integers, checks, positions of tokens
    "flexnsa/primitives flexnsa/operators flexnsa/files",
    "flexnsa/config",
    "flexnsa/checks",
    "flexnsa/masks",
    "flexnsa/mods flexnsa/packing",
    # attention: the contract, what implementations share, the implementations, the table of them
    "flexnsa/attention/__init__ flexnsa/attention/step flexnsa/attention/interface flexnsa/attention/compilation"
    " flexnsa/attention/footprint",
    "flexnsa/attention/scoring flexnsa/attention/shares flexnsa/attention/threads flexnsa/attention/tiles"
    " flexnsa/attention/plan flexnsa/attention/log_scores flexnsa/attention/sampling flexnsa/attention/product_scores",
    "flexnsa/attention/selection flexnsa/attention/selection_loss",
    "flexnsa/attention/reference flexnsa/attention/sdpa flexnsa/attention/flex flexnsa/attention/triton",
    "flexnsa/attention/dispatch flexnsa/attention/sinks flexnsa/attention/all_tokens",
    # modules, and public functions
    "flexnsa/cache",
    "flexnsa/layers",
    "flexnsa/functional",
    "flexnsa/__init__ flexnsa/optim",
    # layers on several ranks, and in models of others
    "flexnsa/parallel flexnsa/transformers flexnsa/torchtitan flexnsa/vllm",
    # the language model
    "flexnsa/lm/generation flexnsa/lm/dense flexnsa/lm/measure",
    "flexnsa/lm/model",
    "flexnsa/lm/parallel flexnsa/lm/estimate",
    "flexnsa/lm/checkpoint",
    "flexnsa/lm/data",
    "flexnsa/lm/training",
    "flexnsa/lm/__init__ flexnsa/lm/transformers_model",
    "flexnsa/lm/diagnosis",
    "flexnsa/lm/cli flexnsa/__main__",
    # not in the package
    "benchmarks",
    "plots examples",
    "tests",
)
"""From the ground up. A file imports from its own floor and those below it."""

IMPLEMENTATIONS = ("reference", "sdpa", "flex", "triton")

KERNELS = "flexnsa/attention/triton/kernels"
PRIVATE_PATH = re.compile(r"(flexnsa|benchmarks|plots)(\.\w+)*\._[a-z]\w*(\.\w+)*")


def floor_of(name: str) -> int | None:
    """Give the number of the floor that names the file, or the innermost folder around it."""
    places = {place: floor for floor, row in enumerate(FLOORS) for place in row.split()}
    parts = name.split("/")
    around = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((places[place] for place in around if place in places), None)


def test_every_file_has_its_floor() -> None:
    _assert_none(name for name in sources() if floor_of(name) is None)


def test_imports_point_downwards() -> None:
    floors = {name: floor for name in sources() if (floor := floor_of(name)) is not None}
    _assert_none(
        f"{name} imports {target}"
        for name in floors
        for target in sorted(import_graph()[name] & floors.keys())
        if floors[target] > floors[name]
    )


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert not find_circle(import_graph())


@pytest.mark.parametrize(
    ("top", "most"), [("flexnsa", 89), ("flexnsa/lm", 33), ("flexnsa/attention", 53), ("benchmarks", 18)]
)
def test_few_rooms_import_others_and_none_itself_by_way_of_them(top: str, most: int) -> None:
    files = below(top, names=sources())
    arrows = rooms({name: import_graph()[name] & files - {f"{top}/__init__"} for name in files}, top.count("/") + 2)
    assert not find_circle(arrows)
    assert sum(map(len, arrows.values())) <= most


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) in (["a", "b", "c", "a"], ["a", "c", "b", "a"])
    assert not find_circle({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize("own", IMPLEMENTATIONS)
def test_implementations_never_import_one_another(own: str) -> None:
    files = below(f"flexnsa/attention/{own}", names=sources())
    assert files
    others = [f"flexnsa/attention/{other}" for other in IMPLEMENTATIONS if other != own]
    assert not {name: found for name in files if (found := below(*others, names=import_graph()[name]))}


def test_the_oracle_shares_no_attention_masking_or_scoring_code() -> None:
    imported = import_graph()["flexnsa/attention/reference"]
    assert imported <= {"flexnsa/config", "flexnsa/masks/positions", "flexnsa/attention/interface"}


def test_masks_know_nothing_of_scores() -> None:
    files = below("flexnsa/masks", names=sources())
    imported = set[str]().union(*(import_graph()[name] for name in files)) - files
    assert imported <= {f"flexnsa/{name}" for name in ("config", "operators/search", "primitives")}


@pytest.mark.parametrize("place", ["flexnsa/functional", "flexnsa/layers", "flexnsa/attention"])
def test_a_tensor_can_be_followed_from_the_public_functions_to_a_kernel(place: str) -> None:
    files = below(place, names=sources())
    assert files
    _assert_none(f"{name}: {line}" for name in sorted(files) for line in _lines_that_say_any(name))


def test_attention_and_layers_are_typed_strictly_but_for_kernels_and_their_launchers() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert set(checked["strict"]) >= {"flexnsa/attention", "flexnsa/layers"}
    relaxes = re.compile(r"^\s*#\s*pyright:(?!\s*(ignore|strict)\b)", re.MULTILINE)
    files = below(*checked["strict"], names=sources())
    relaxed = {name for name in files if relaxes.search((ROOT / f"{name}.py").read_text())}
    assert relaxed
    assert relaxed <= below(KERNELS, names=files)  # Python has no types for what a kernel computes


def test_a_layer_is_few_frames_above_its_kernels() -> None:
    from_outside = ("training, forward", "training, backward", "training, forward on a CPU", "a decoding step")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.frames", *from_outside]
    printed = subprocess.check_output(command, text=True, cwd=ROOT)
    counts = re.findall(r"(\d+) frames in (\d+) files, (\d+) of operators", printed)
    assert len(counts) == len(from_outside)
    for path in counts:
        assert all(int(count) <= limit for count, limit in zip(path, (8, 6, 6), strict=True)), printed


def test_what_moved_is_where_the_list_says() -> None:
    for line in (ROOT / "docs/moved.txt").read_text().splitlines():
        old, new = line.split()
        assert _exists(new), new
        assert not _exists(old), old


def _exists(name: str) -> bool:
    """Return whether there is a module of this name, or a name in a module."""
    if _source_of(name) is not None:
        return True
    module, _, own = name.rpartition(".")
    return re.search(rf"^(def|class) {own}\b|^{own}\b.* = ", _source_of(module) or "", re.MULTILINE) is not None


def _source_of(name: str) -> str | None:
    path = ROOT / name.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return files[0].read_text() if files else None


def test_no_file_uses_what_another_keeps_private() -> None:
    _assert_none(f"{name}: {found}" for name in sources() for found in _private_names_of_others(name))


def test_imports_bring_in_torch_and_nothing_heavier_and_models_and_training_no_extra_before_they_are_used() -> None:
    code = "import sys, torch; before = set(sys.modules)"
    for modules in ("flexnsa", "flexnsa.lm, flexnsa.lm.estimate"):
        code += f"; import {modules}; print(*set(sys.modules) - before)"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    of_library, of_models = map(str.split, printed.splitlines())
    brought = {name.split(".")[0] for name in of_library} - sys.stdlib_module_names
    assert brought <= {"flexnsa", "torch"}
    assert "flexnsa" in brought
    assert not {name for name in of_library if name.startswith(("torch._inductor", "torch._dynamo"))}
    assert not {name.split(".")[0] for name in of_models} & {"numpy", "matplotlib", "safetensors", "tqdm", "triton"}


def test_calls_that_are_not_compiled_import_no_compiler() -> None:
    """To import one takes seconds."""
    code = """if True:
        import sys, flexnsa, torch
        from flexnsa import lm
        heads = dict(num_heads=2, num_kv_heads=1, head_dim=16, nsa=flexnsa.NSAConfig.for_text(2, 1))
        model = lm.DecoderLM(lm.DecoderConfig(vocab_size=9, num_layers=1, dim=32, **heads))
        tokens = torch.zeros(1, 100, dtype=torch.int64)
        model(tokens, selection=flexnsa.SelectionLoss(seed=0, step=0)).sum().backward()
        model(tokens, document_ids=tokens)
        lm.generate_tokens(model, tokens, 2)
        sys.exit("torch._dynamo" in sys.modules)
    """
    subprocess.check_call([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT)


def _assert_none(wrong: Iterable[str]) -> None:
    """Demand that there is nothing wrong, and else show all of it."""
    found = list(wrong)
    assert not found, "\n".join(["", *found])


def _lines_that_say_any(name: str) -> list[str]:
    """Give the lines, continued ones by their first, that name ``typing.Any`` other than to import it."""
    text = (ROOT / f"{name}.py").read_text().splitlines()
    found = []
    for node in ast.walk(sources()[name]):
        says = isinstance(node, ast.Name) and node.id == "Any"
        says |= isinstance(node, ast.Attribute) and node.attr == "Any"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted type, not a sentence
            says |= re.search(r"(^|[\[,.|] ?)Any($|[\],|])", node.value) is not None
        if says:
            found.append(text[node.lineno - 1].strip())  # pyright: ignore[reportAttributeAccessIssue]
    return list(dict.fromkeys(found))


def _private_names_of_others(name: str) -> list[str]:
    """Give the names with a leading underscore that a file takes from another one: imports, attributes, patches."""
    bound = imported_names(name)
    found = [f"imports {bare} of {target}" for bare, target in bound.items() if _is_private(bare.split(".")[-1])]
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.ImportFrom):  # under another name: from x import _y as y
            renamed = [alias for alias in node.names if _is_private(alias.name) and alias.asname in bound]
            found += [f"imports {alias.name} as {alias.asname}" for alias in renamed]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node.value) in bound:
            found.append(f"uses {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and len(node.args) >= 2 and ast.unparse(node.args[0]) in bound:
            attribute = getattr(node.args[1], "value", None)  # as in monkeypatch.setattr(module, "_name", ...)
            if isinstance(attribute, str) and _is_private(attribute):
                found.append(f"patches {ast.unparse(node.args[0])}.{attribute}")
        elif isinstance(node, ast.Constant) and PRIVATE_PATH.fullmatch(str(node.value)):
            found.append(f"names {node.value!r}")
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
