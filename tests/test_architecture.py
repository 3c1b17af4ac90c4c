"""The shape of the project, held by reading its source.

The tables below are the architecture; the functions under them find what breaks it, and each has a test that feeds it
a few lines of wrong source to show that it would speak. Imports inside functions and under ``TYPE_CHECKING`` count
like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.cases import each

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "kvdist.errors": 0,
    "kvdist.version": 0,
    "kvdist.config": 1,
    "kvdist.dtypes": 1,
    "kvdist.nodes": 1,
    "kvdist.schema": 1,
    "kvdist.kernels": 2,
    "kvdist.protocol": 2,
    "kvdist.transport": 2,
    "kvdist.buckets": 3,
    "kvdist.checkpoint": 3,
    "kvdist.lr_scheduler": 3,
    "kvdist.optimizer": 3,
    "kvdist.core": 4,
    "kvdist.runtime": 5,
    "kvdist.collective": 6,
    "kvdist.kvstore": 7,
    "kvdist.__main__": 8,
    "kvdist.kv": 8,
    "kvdist.profiler": 8,
    "kvdist.training": 8,
    "kvdist.horovod": 9,
    "kvdist.keras": 9,
    "kvdist.tensorflow": 9,
    "kvdist": 10,
}
"""A module belongs to the longest entry that begins its name. It may import from lower floors and its own."""

SIDEWAYS = {
    ("kvdist.checkpoint", "kvdist.optimizer"),
    ("kvdist.config", "kvdist.nodes"),
    ("kvdist.keras", "kvdist.horovod"),
    ("kvdist.optimizer", "kvdist.lr_scheduler"),
    ("kvdist.tensorflow", "kvdist.horovod"),
    ("kvdist.tensorflow", "kvdist.keras"),
}
"""(importer, imported): pairs of entries on one floor where the first may know the second."""

LAUNCHER_MAY_IMPORT = {"kvdist.config", "kvdist.errors", "kvdist.nodes", "kvdist.version"}

ONLY_IMPORTER = {
    "cupy": {"kvdist/kernels/cupy_cuda/device.py"},
    "llvmlite": {"kvdist/kernels/numba_cpu.py"},
    "msgpack": {"kvdist/protocol/objects.py", "kvdist/protocol/wire.py"},
    "numba": {"kvdist/kernels/numba_cpu.py", "kvdist/kernels/numba_cuda.py"},
    "zmq": {"kvdist/transport/curve.py", "kvdist/transport/sockets.py", "kvdist/transport/zeromq.py"},
}
"""Libraries that only these files of `kvdist` and the launcher may import."""

ENVIRONMENT_READER = "kvdist/config/environment.py"

IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select",
    "selectors", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""What no file of `kvdist/core` imports: time arrives as `now`, and what is to be done leaves as an effect."""

BANNED_MODULES = {"cPickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
MAY_PICKLE = {"launcher/kvdist_launch/serialization.py": "cloudpickle"}
"""What one file may import of the banned modules: it sends functions to our own children, over pipes alone."""
BANNED_CALLS = {
    "eval", "exec", "exit", "os._exit", "os.popen", "os.system", "quit", "sys.exit", "torch.load", "yaml.load",
}  # fmt: skip
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
MAY_EXIT = {"kvdist/__main__.py", "launcher/kvdist_launch/__main__.py", "launcher/kvdist_launch/cli.py"}
"""Programs, not libraries: `sys.exit` is theirs to call."""
MAY_EXIT_AT_THE_END = "kvdist/config/exit_codes.py"
"""It calls `os._exit` when the interpreter ends anyway, which is the only way left to change the exit code."""

MAY_IMPORT_BY_NAME = {"kvdist/__init__.py", "kvdist/__main__.py"}
"""Who may import a module that is named by a string, where no reader of imports sees it: names of our own that are
resolved late, and modules that whoever starts a server names on its command line."""

FUNCTION_LINES_MAX = 70

HEAVY = ("torch", "numba", "cupy", "sklearn", "scipy", "keras", "tensorflow")
"""Libraries that `import kvdist` and a server do without until something asks for them."""


@dataclass(frozen=True)
class Source:
    """One file: where it lies, the name it is imported by, and its text."""

    path: str
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


def read_sources(folder: Path) -> list[Source]:
    """Every Python file of the package in `folder`."""
    sources = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(path.relative_to(ROOT).as_posix(), name, path.read_text("utf-8")))
    return sources


LIBRARY = read_sources(ROOT / "kvdist")
LAUNCHER = read_sources(ROOT / "launcher" / "kvdist_launch")
SOURCES = LIBRARY + LAUNCHER
MODULES = {source.module for source in SOURCES}


# What a file imports.


def imported_names(source: Source) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of everything imported anywhere in the file; `from a import b` gives ``a.b``."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(source, node)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def absolute_base(source: Source, node: ast.ImportFrom) -> str:
    """The module after `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join(package + ([node.module] if node.module else []))


def imported_modules(source: Source, modules: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(module, line): as `imported_names`, with every name cut back to the module of ours that defines it."""
    known = set(modules)
    for name, line in imported_names(source):
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name in known:
            yield name, line


def entry_of(module: str) -> str:
    """The entry of `FLOORS` that a module belongs to."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in FLOORS), "")


# What is wrong with it. Each function returns sentences.


def floor_faults(source: Source, modules: Iterable[str]) -> list[str]:
    """Imports that run upward, or sideways to a stranger, and modules without a floor of their own."""
    mine = entry_of(source.module)
    if mine in ("", "kvdist") and source.module != "kvdist":
        return [f"{source.path}: {source.module} has no floor; give it one in FLOORS"]
    faults = []
    for module, line in imported_modules(source, modules):
        theirs = entry_of(module)
        downward = FLOORS.get(theirs, 99) < FLOORS[mine]
        if not (downward or theirs == mine or (mine, theirs) in SIDEWAYS):
            faults.append(f"{source.path}:{line}: {source.module} may not import {module}, which is not below it")
    return faults


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A round trip for each module that imports itself by way of others."""
    found = []
    for start in sorted(graph):
        trail, seen = [[start]], {start}
        while trail:
            path = trail.pop()
            for target in sorted(graph.get(path[-1], ())):
                if target == start:
                    found.append([*path, start])
                elif target not in seen:
                    seen.add(target)
                    trail.append([*path, target])
    return found


def import_graph(sources: Iterable[Source], modules: Iterable[str]) -> dict[str, set[str]]:
    """Who imports whom, modules of ours only."""
    return {source.module: {name for name, _ in imported_modules(source, modules)} for source in sources}


def launcher_faults(source: Source, modules: Iterable[str]) -> list[str]:
    """What the launcher imports of the library beyond the few modules it may know."""
    return [
        f"{source.path}:{line}: the launcher may not import {module}"
        for module, line in imported_modules(source, modules)
        if not module.startswith("kvdist_launch") and entry_of(module) not in LAUNCHER_MAY_IMPORT
    ]


def importer_faults(source: Source) -> list[str]:
    """Libraries imported outside the one place that wraps each, and what has no business in the pure core."""
    faults = []
    for name, line in imported_names(source):
        top = name.partition(".")[0]
        if top in ONLY_IMPORTER and source.path not in ONLY_IMPORTER[top]:
            faults.append(f"{source.path}:{line}: only {' and '.join(sorted(ONLY_IMPORTER[top]))} may import {top}")
        if name.startswith("torch.distributed") and not source.module.startswith("kvdist.collective"):
            faults.append(f"{source.path}:{line}: only kvdist.collective may import torch.distributed")
        if source.module.startswith("kvdist.core") and (top in IMPURE or name.startswith("numpy.random")):
            faults.append(f"{source.path}:{line}: the core is pure and may not import {name}")
    return faults


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for such an expression, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def environment_faults(source: Source) -> list[str]:
    """Uses of the environment outside the one module of the library that reads it."""
    if source.path == ENVIRONMENT_READER:
        return []
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    used = [(dotted(node), node.lineno) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    lines = [line for name, line in [*used, *imported_names(source)] if name in names]
    return [f"{source.path}:{line}: only {ENVIRONMENT_READER} reads the environment" for line in lines]


def banned_faults(source: Source) -> list[str]:
    """Whatever could execute what a peer sent, run a shell, or end a process from inside a library."""
    faults = [
        f"{source.path}:{line}: {name} is banned"
        for name, line in imported_names(source)
        if not may_import(source, name) or (name in BANNED_CALLS and not may_call(source, name))
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            faults += [f"{source.path}:{node.lineno}: {what} is banned" for what in banned_in_call(source, node)]
    return faults


def banned_in_call(source: Source, call: ast.Call) -> Iterator[str]:
    """What is banned about one call."""
    name = dotted(call.func)
    if name in BANNED_CALLS and not may_call(source, name):
        yield name
    if isinstance(call.func, ast.Attribute) and call.func.attr in BANNED_METHODS:
        yield call.func.attr
    for keyword in call.keywords:
        falsy = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if (keyword.arg == "shell" and not falsy) or (keyword.arg == "allow_pickle" and not falsy):
            yield f"{keyword.arg}=True"


def may_import(source: Source, name: str) -> bool:
    """Whether a module is not banned, or not for this file."""
    return name.partition(".")[0] not in BANNED_MODULES or MAY_PICKLE.get(source.path) == name


def may_call(source: Source, name: str) -> bool:
    """Whether this file is a program and the call its exit."""
    if name == "os._exit":
        return source.path == MAY_EXIT_AT_THE_END
    return name == "sys.exit" and source.path in MAY_EXIT


def by_name_faults(source: Source) -> list[str]:
    """Imports of modules named by a string, with which a floor could be passed unseen."""
    if source.path in MAY_IMPORT_BY_NAME:
        return []
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    names = ("__import__", "import_module", "importlib.import_module", "importlib.__import__")
    found = [node for node in calls if dotted(node.func) in names]
    return [f"{source.path}:{node.lineno}: imports a module by its name as a string" for node in found]


def handler_faults(source: Source) -> list[str]:
    """`except:` without a type, which also swallows Ctrl-C and an exit."""
    bare = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler) and node.type is None]
    return [f"{source.path}:{node.lineno}: a bare except" for node in bare]


def length_faults(source: Source) -> list[str]:
    """Functions over the limit, docstring left out."""
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            if lines > FUNCTION_LINES_MAX:
                faults.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines of {FUNCTION_LINES_MAX}")
    return faults


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def path_faults(path: str, text: str) -> list[str]:
    """Paths of the machine on which somebody wrote it."""
    machine = ("/" + "work/", "/" + "root/", "/home" + "/runner")
    return [f"{path}: names {needle}, a path of one machine" for needle in machine if needle in text]


# The project has none of these faults.


def test_a_module_imports_only_what_lies_below_it() -> None:
    assert [fault for source in LIBRARY for fault in floor_faults(source, MODULES)] == []


def test_no_import_runs_in_a_circle() -> None:
    assert cycles(import_graph(SOURCES, MODULES)) == []


def test_the_launcher_knows_only_config_nodes_and_errors() -> None:
    assert [fault for source in LAUNCHER for fault in launcher_faults(source, MODULES)] == []


def test_a_library_is_imported_only_where_it_is_wrapped() -> None:
    assert [fault for source in SOURCES for fault in importer_faults(source)] == []


def test_whatever_the_core_reaches_is_pure() -> None:
    graph, sources = import_graph(LIBRARY, MODULES), {source.module: source for source in LIBRARY}
    reached, ahead = set(), [module for module in sources if entry_of(module) == "kvdist.core"]
    while ahead:
        if (module := ahead.pop()) not in reached:
            reached.add(module)
            ahead += graph[module]
    imported = [(module, name) for module in reached for name, _ in imported_names(sources[module])]
    assert [(module, name) for module, name in imported if name.partition(".")[0] in IMPURE] == []


def test_no_import_hides_in_a_string() -> None:
    assert [fault for source in SOURCES for fault in by_name_faults(source)] == []


def test_only_config_reads_the_environment() -> None:
    assert [fault for source in LIBRARY for fault in environment_faults(source)] == []


def test_nothing_runs_what_it_was_sent_or_ends_its_caller() -> None:
    assert [fault for source in SOURCES for fault in banned_faults(source) + handler_faults(source)] == []


def test_functions_are_short() -> None:
    assert [fault for source in SOURCES for fault in length_faults(source)] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    faults = []
    for path in project_files():
        faults += path_faults(path.relative_to(ROOT).as_posix(), path.read_text("utf-8", errors="replace"))
    assert faults == []


def project_files() -> Iterator[Path]:
    """The text files of the project, without what building and running make."""
    folders = ("kvdist", "launcher", "tests", "benchmarks", "examples", "docs", ".ci")
    endings = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".yml", ".yaml", ""}
    for path in [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]:
        if path.is_file() and path.suffix in endings and "__pycache__" not in path.parts and path.name != ".git":
            yield path


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after the statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@each("statement", ["import kvdist", "import kvdist.__main__", "import kvdist_launch.cli"])
def test_importing_it_draws_in_nothing_heavy(statement: str) -> None:
    assert modules_loaded_by(statement).isdisjoint(HEAVY)


def test_every_entry_of_the_tables_is_of_use() -> None:
    floors = set(FLOORS.values())
    assert floors == set(range(max(floors) + 1))
    assert all(FLOORS[importer] == FLOORS[imported] for importer, imported in SIDEWAYS)
    graph = import_graph(LIBRARY, MODULES)
    used = {(entry_of(importer), entry_of(target)) for importer, targets in graph.items() for target in targets}
    assert used >= SIDEWAYS, "an allowance that nothing uses any more"


# And each fault would be found: the same functions on a few wrong lines.


def wrong(text: str, module: str = "kvdist.core.server.block") -> Source:
    return Source(module.replace(".", "/") + ".py", module, text)


SOME_MODULES = {
    "kvdist", "kvdist.errors", "kvdist.config.settings", "kvdist.protocol", "kvdist.protocol.wire", "kvdist.nodes",
    "kvdist.transport.base", "kvdist.core.server.block", "kvdist.core.server.server", "kvdist.kvstore.dist",
    "kvdist.runtime.node",
}  # fmt: skip


@each(
    "module, text",
    [
        ("kvdist.core.server.block", "from kvdist.kvstore.dist import DistKVStore"),
        ("kvdist.core.server.block", "def late():\n    import kvdist.runtime.node"),
        ("kvdist.protocol.wire", "if TYPE_CHECKING:\n    from kvdist.runtime import node"),
        ("kvdist.core.server.block", "from ...runtime import node"),
        ("kvdist.core.server.block", "from ...kvstore.dist import DistKVStore"),
        ("kvdist.core.server.block", "from kvdist import Trainer"),
        ("kvdist.protocol.wire", "from kvdist.transport.base import Route"),
        ("kvdist.novelty", "import math"),
    ],
)
def test_an_upward_or_sideways_import_is_found(module: str, text: str) -> None:
    assert len(floor_faults(wrong(text, module), SOME_MODULES)) == 1


@each(
    "text",
    ["from kvdist.errors import ConfigError", "from kvdist import errors", "from . import server", "import numpy"],
)
def test_a_downward_import_is_not_complained_of(text: str) -> None:
    assert floor_faults(wrong(text), SOME_MODULES) == []


def test_a_circle_is_found_with_its_members() -> None:
    assert ["a", "b", "c", "a"] in cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_launcher_that_knows_too_much_is_found() -> None:
    text = "from kvdist.config.settings import ClusterConfig\nfrom kvdist.core.server.server import Server"
    assert len(launcher_faults(wrong(text, "kvdist_launch.cli"), SOME_MODULES)) == 1


@each(
    "module, text",
    [
        ("kvdist.runtime.node", "import zmq"),
        ("kvdist.protocol.messages", "import msgpack"),
        ("kvdist.core.server.block", "import time"),
        ("kvdist.core.server.block", "from threading import Lock"),
        ("kvdist.core.server.block", "from numpy import random"),
        ("kvdist.training.trainer", "import torch.distributed"),
        ("kvdist.training.trainer", "from torch import distributed"),
    ],
)
def test_a_library_in_the_wrong_place_is_found(module: str, text: str) -> None:
    assert len(importer_faults(wrong(text, module))) == 1


@each("text", ["__import__('zmq')", "import importlib\nimportlib.import_module('zmq')"])
def test_an_import_that_hides_in_a_string_is_found(text: str) -> None:
    assert len(by_name_faults(wrong(text))) == 1


@each("text", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"])
def test_a_second_reader_of_the_environment_is_found(text: str) -> None:
    assert len(environment_faults(wrong(text))) == 1


@each(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "def late():\n    import shelve",
        "eval('1')",
        "exec('1')",
        "socket.recv_pyobj()",
        "import torch\ntorch.load('f')",
        "yaml.load(f)",
        "subprocess.run('ls', shell=True)",
        "np.load('f', allow_pickle=True)",
        "os.system('ls')",
        "sys.exit(1)",
        "from os import system",
    ],
)
def test_a_banned_call_is_found(text: str) -> None:
    assert len(banned_faults(wrong(text))) == 1


def test_one_file_may_use_cloudpickle_and_no_other_pickle() -> None:
    assert [len(banned_faults(Source(path, "", "import cloudpickle"))) for path in (*MAY_PICKLE, "a.py")] == [0, 1]
    assert len(banned_faults(Source(next(iter(MAY_PICKLE)), "", "import pickle"))) == 1


def test_a_program_may_exit_and_a_model_may_be_evaluated() -> None:
    assert banned_faults(wrong("sys.exit(1)", "kvdist.__main__")) == []
    assert banned_faults(wrong("model.eval()\nsubprocess.run(['ls'], shell=False)")) == []


def test_a_bare_except_is_found() -> None:
    assert len(handler_faults(wrong("try:\n    f()\nexcept:\n    pass"))) == 1


def test_a_long_function_is_found_and_its_docstring_is_free() -> None:
    body = "    x = 1\n" * FUNCTION_LINES_MAX
    assert len(length_faults(wrong(f"def f():\n{body}"))) == 1
    docstring = '    """' + "word\n" * 90 + '    """\n'
    assert length_faults(wrong(f"def f():\n{docstring}    return 1\n")) == []


def test_a_path_of_one_machine_is_found() -> None:
    assert len(path_faults("README.md", "see /" + "work/main for more")) == 1


def test_the_reader_of_loaded_modules_sees_what_is_loaded() -> None:
    assert "msgpack" in modules_loaded_by("import msgpack")
