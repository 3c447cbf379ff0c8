"""Say what a module offers, as plain values that JSON holds, and whether what it offers now still honours that.

A later version may add names, fields with a default and parameters with a default; it may take nothing away and change
neither a default nor the order of what can be given by position.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import typing
from types import FunctionType, ModuleType
from typing import Any

MODULES = ("flexnsa", "flexnsa.mods", "flexnsa.packing", "flexnsa.models", "flexnsa.training", "flexnsa.memory")
SINGLE_NAMES = ("flexnsa.checkpointing.keep_selection",)


def describe_everything() -> dict[str, dict[str, Any]]:
    """Describe every public name of :data:`MODULES`, and :data:`SINGLE_NAMES`, under ``module.name``."""
    modules = map(importlib.import_module, MODULES)
    names = [f"{module.__name__}.{name}" for module in modules for name in _names(module)]
    return json.loads(json.dumps({name: describe(look_up(name)) for name in (*names, *SINGLE_NAMES)}))


def look_up(full_name: str) -> Any:
    """Import ``module.name``."""
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def describe(value: Any) -> dict[str, Any]:
    """Describe a class, a function, a type or a constant."""
    if typing.get_origin(value) is not None:
        return {"kind": "type"}
    if inspect.isclass(value):
        return {"kind": "class", "call": signature(value), "fields": _fields(value), "members": _members(value)}
    if callable(value):
        return {"kind": "function", "call": signature(value)}
    return {"kind": "constant", "value": _plain(value)}


def signature(function: Any) -> str:
    """Give names, kinds and defaults, ``(q, *, scale=None)``; annotations say how, not what, and are left out."""
    found = inspect.signature(function)
    factories: dict[str, Any] = {}
    if _is_dataclass(function):
        factories = {field.name: field.default_factory for field in dataclasses.fields(function)}
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=factories[name]() if repr(parameter.default) == "<factory>" else parameter.default,
        )
        for name, parameter in found.parameters.items()
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def broken_promises(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """List what was offered and is not any more."""
    if recorded["kind"] == "type" and found["kind"] == "class":
        return []
    if recorded["kind"] != found["kind"]:
        return [f"was a {recorded['kind']}, is a {found['kind']}"]
    if recorded["kind"] == "constant":
        return [] if _still_holds(recorded["value"], found["value"]) else [f"was {recorded['value']}"]
    broken = broken_calls(recorded["call"], found["call"]) if "call" in recorded else []
    for name, was in recorded.get("members", {}).items():
        now = found["members"].get(name, "gone")
        if "(" in was and "(" in now:
            broken += [f"{name}: {complaint}" for complaint in broken_calls(was, now)]
        elif was != now:
            broken.append(f"{name} was {was}, is {now}")
    return broken + [f"{name} is gone" for name in recorded.get("fields", ()) if name not in found["fields"]]


def broken_calls(recorded: str, found: str) -> list[str]:
    """List the ways of calling ``recorded`` that ``found`` would not take, or take otherwise."""
    was, now = _Parameters(recorded), _Parameters(found)
    broken = []
    if now.positional[: len(was.positional)] != was.positional:
        broken.append(f"by position were {was.positional}, are {now.positional}")
    broken += [f"{name} is new and required" for name, default in now.positional[len(was.positional) :] if not default]
    for name, default in was.by_name.items():
        if name not in now.by_name:
            broken.append(f"{name} is gone")
        elif now.by_name[name] != default:
            broken.append(f"{name} was by default {default}, is {now.by_name[name]}")
    broken += [f"{name} is new and required" for name, d in now.by_name.items() if not d and name not in was.by_name]
    broken += [f"{name} is gone" for name in was.open if name not in now.open]
    return broken


class _Parameters:
    """A signature taken apart: each parameter's name and default, which is None if there is none."""

    def __init__(self, text: str) -> None:
        (function,) = ast.parse(f"def f{text}: ...").body
        assert isinstance(function, ast.FunctionDef)
        args = function.args
        positional = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
        by_name = [d and ast.unparse(d) for d in args.kw_defaults]
        self.positional = [(a.arg, d) for a, d in zip(positional, defaults, strict=True)]
        self.by_name = {a.arg: d for a, d in zip(args.kwonlyargs, by_name, strict=True)}
        self.open = [stars + a.arg for stars, a in (("*", args.vararg), ("**", args.kwarg)) if a is not None]


def _names(module: ModuleType) -> list[str]:
    """Give ``__all__``, or else what is defined here: no module, and nothing that belongs to another one."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(name for name, value in vars(module).items() if name[0] != "_" and _belongs(value, module))


def _belongs(value: Any, module: ModuleType) -> bool:
    if typing.get_origin(value) is not None:
        return True  # a type alias does not know where it was written
    home = getattr(value, "__module__", module.__name__)
    return not inspect.ismodule(value) and home == module.__name__


def _members(cls: type) -> dict[str, str]:
    """Give the methods, with their signatures, and the properties that the package itself defines."""
    found = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("flexnsa"):
            continue
        for name, value in vars(base).items():
            if name[0] == "_":
                continue
            if isinstance(value, property):
                found[name] = "a property"
            elif isinstance(value, FunctionType | classmethod | staticmethod):
                found[name] = signature(getattr(cls, name))
    return dict(sorted(found.items()))


def _fields(cls: type) -> list[str]:
    if _is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "_fields", ()))


def _is_dataclass(value: Any) -> bool:
    return inspect.isclass(value) and dataclasses.is_dataclass(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not inspect.isclass(value):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _still_holds(recorded: Any, found: Any) -> bool:
    """Tell whether a constant says what it said; a dict may say more, and so may a tuple at its end."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return all(key in found and _still_holds(value, found[key]) for key, value in recorded.items())
    if isinstance(recorded, list) and isinstance(found, list):
        return found[: len(recorded)] == recorded
    return recorded == found
