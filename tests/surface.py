"""What users rely on, a line each: public names with their signatures, options of command lines, settings.

    python -m tests.surface --write    # after a change that is meant

`tests/surface.txt` has the lines of the last change that was meant; a test compares.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kvdist.__main__ import GROUPS
from kvdist.__main__ import _parser as kvdist_parser
from kvdist.config.command_line import Parser
from kvdist.config.settings import SETTINGS, shown_default
from kvdist_launch import doctor, options, run_cli

FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "kvdist", "kvdist.kv", "kvdist.optimizer", "kvdist.lr_scheduler", "kvdist.collective", "kvdist.horovod",
    "kvdist.profiler", "kvdist_launch",
)  # fmt: skip
READ_ONLY = ("kvdist.keras", "kvdist.mxnet", "kvdist.tensorflow")
"""Modules that need a framework which is not here: their source is read."""


def lines() -> list[str]:
    """All lines, in order, each with the kind of thing that it names first."""
    found = [line for name in MODULES for line in _of_module(importlib.import_module(name))]
    found += [line for name in READ_ONLY for line in _of_source(name)]
    found += [line for program, parser in _parsers() for line in _of_parser(program, parser)]
    found += [line for row in SETTINGS.values() for line in _of_setting(row)]
    return sorted(dict.fromkeys(found))


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        value, label = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield f"class {label}({', '.join(base.__name__ for base in value.__bases__ if base is not object)})"
            yield from _of_class(label, value)
        elif callable(value):
            yield f"call {label}{_signature(value)}"
        else:
            yield f"value {label}"


def _of_class(label: str, owner: type) -> Iterator[str]:
    if inspect.getattr_static(owner, "__init__") is not object.__init__ and not issubclass(owner, BaseException):
        yield f"call {label}{_signature(owner)}"
    for name in dir(owner):
        homes = [base for base in owner.__mro__ if name in vars(base)]
        if name.startswith("_") or not homes[0].__module__.startswith(("kvdist.", "kvdist_launch")):
            continue
        if homes[-1] is not owner and not homes[-1].__name__.startswith("_"):
            continue  # it stands with the class that has it first
        value = inspect.getattr_static(owner, name)
        value = getattr(value, "__func__", value)
        yield f"call {label}.{name}{_signature(value)}" if callable(value) else f"value {label}.{name}"


def _signature(value: Any) -> str:
    """The parameters with kinds and defaults, without annotations."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # of a builtin
        return "(...)"
    shown = [_bare(one) for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return str(inspect.Signature(shown))


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    value, nothing = parameter.default, inspect.Parameter.empty
    default = value if value is nothing or isinstance(value, (int, float, str, tuple, type(None))) else ...
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)


def _of_source(name: str) -> Iterator[str]:
    folder = Path(importlib.import_module("kvdist").__file__ or "").parent / name.partition(".")[2]
    trees = [ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))]
    root = ast.parse((folder / "__init__.py").read_text())
    assigned = [one for one in root.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"]
    (exported,) = assigned
    defined = {one.name: one for tree in trees for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    assert isinstance(exported.value, ast.List)
    for element in exported.value.elts:
        word = ast.literal_eval(element)
        one = defined.get(word)
        if isinstance(one, ast.FunctionDef):
            yield f"call {name}.{word}({_arguments(one)})"
        elif isinstance(one, ast.ClassDef):
            yield f"class {name}.{word}({', '.join(map(ast.unparse, one.bases))})"
            for part in one.body:
                if isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
                    suffix = "" if part.name == "__init__" else f".{part.name}"
                    yield f"call {name}.{word}{suffix}({_arguments(part)})"
        else:
            yield f"value {name}.{word}"


def _arguments(function: ast.FunctionDef) -> str:
    bare = function.args
    for one in [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]:
        if one is not None:
            one.annotation = None
    bare.args = [one for one in bare.args if one.arg != "self"]
    return ast.unparse(bare)


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield "kvdist-launch", options.new_parser()
    yield "kvdist-run", run_cli.new_parser()
    yield "kvdist doctor", doctor._parser()
    yield "kvdist", kvdist_parser()
    for name, subcommand in (item for group in GROUPS.values() for item in group.items()):
        module, _, function = subcommand.place.partition(":")
        if function:
            parser = Parser(prog=f"kvdist {name}")
            getattr(importlib.import_module(module), function)(parser)
            yield f"kvdist {name}", parser


def _of_parser(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        takes = "" if action.nargs == 0 else f" {action.metavar or action.dest}"
        several = f" ({action.nargs} times)" if action.nargs not in (None, 0) else ""
        yield f"option {program} {' '.join(action.option_strings) or 'argument'}{takes}{several}"


def _of_setting(row: Any) -> Iterator[str]:
    yield f"setting {row.variable} = {shown_default(row)}"
    for name in row.aliases:
        yield f"setting {row.variable}, also {name}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    FILE.write_text("\n".join(lines()) + "\n", "utf-8")
