"""The shape of the project, held by reading its source.

The tables below are the architecture; the functions under them find what breaks it, and a table of wrong lines shows
that they would. Imports inside functions and under ``TYPE_CHECKING`` count
like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.cases import each

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "kvdist.errors": 0,
    "kvdist.version": 0,
    "kvdist.config": 1,
    "kvdist.dtypes": 1,
    "kvdist.estimate": 1,
    "kvdist.status": 1,
    "kvdist.naming": 1,
    "kvdist.nodes": 1,
    "kvdist.reduce_op": 1,
    "kvdist.removed": 0,
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
    "kvdist.serve": 8,
    "kvdist.training": 8,
    "kvdist.diagnostics": 7,
    "kvdist.diagnostics.trace": 4,
    "kvdist.horovod": 9,
    "kvdist.keras": 9,
    "kvdist.mxnet": 9,
    "kvdist.tensorflow": 9,
    "kvdist": 10,
}
"""A module belongs to the longest entry that begins its name. It may import from lower floors and its own."""

SIDEWAYS = {
    ("kvdist.__main__", "kvdist.serve"),
    ("kvdist.checkpoint", "kvdist.optimizer"),
    ("kvdist.config", "kvdist.nodes"),
    ("kvdist.keras", "kvdist.horovod"),
    ("kvdist.optimizer", "kvdist.lr_scheduler"),
    ("kvdist.tensorflow", "kvdist.horovod"),
    ("kvdist.tensorflow", "kvdist.keras"),
}
"""(importer, imported): pairs of entries on one floor where the first may know the second."""

LAUNCHER_MAY_IMPORT = {"kvdist.config", "kvdist.errors", "kvdist.estimate", "kvdist.nodes", "kvdist.version"}

ONLY_IMPORTER = {
    "cupy": {"kvdist/kernels/cupy_device.py", "kvdist/kernels/cupy_runtime.py"},
    "llvmlite": {"kvdist/kernels/numba_cpu.py"},
    "msgpack": {"kvdist/protocol/objects.py", "kvdist/protocol/wire.py"},
    "numba": {"kvdist/kernels/numba_cpu.py", "kvdist/kernels/numba_cuda.py"},
    "zmq": {"kvdist/transport/curve.py", "kvdist/transport/sockets.py", "kvdist/transport/zeromq.py"},
}
"""Libraries that only these files of `kvdist` and the launcher may import."""

UNSEEN_WAITS = {"concurrent.futures.as_completed", "concurrent.futures.wait"}
MAY_WAIT_UNSEEN = {"kvdist/kvstore/allreduce.py", "kvdist/kvstore/collective.py", "kvdist/runtime/waits.py"}
"""Who waits for ranks without servers, which look for what stalls in another way, and the list of waits itself."""

ENVIRONMENT_READER = "kvdist/config/environment.py"

IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select",
    "selectors", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""What no file of `kvdist/core` imports: time arrives as `now`, and what is to be done leaves as an effect."""

WALL_CLOCK = {"datetime.now", "time.time", "time.time_ns"}
MAY_READ_THE_WALL_CLOCK = {
    "kvdist/checkpoint/locks.py", "kvdist/collective/rendezvous.py", "kvdist/collective/timeline.py",
    "kvdist/diagnostics/ring.py", "launcher/kvdist_launch/cli.py", "launcher/kvdist_launch/ssh.py",
}  # fmt: skip
"""Ages of files, and times that are shown to people. Whatever waits reads the monotonic clock: the other one jumps."""

BANNED_MODULES = {"cPickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
MAY_PICKLE = {"launcher/kvdist_launch/serialization.py": "cloudpickle", "kvdist/runtime/journal.py": "pickle"}
"""What a file may import of the banned modules. One sends functions to our own children, over pipes alone. The other
reads what this user's scheduler has written, and makes nothing but objects of the machine: no code is run."""
BANNED_CALLS = {
    "eval", "exec", "exit", "os._exit", "os.popen", "os.system", "quit", "sys.exit", "torch.load", "yaml.load",
}  # fmt: skip
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
MAY_EXIT = {"kvdist/__main__.py", "launcher/kvdist_launch/__main__.py", "launcher/kvdist_launch/cli.py"}
"""Programs, not libraries: `sys.exit` is theirs to call."""
MAY_EXIT_AT_ONCE = {"kvdist/config/exit_codes.py", "launcher/kvdist_launch/start.py"}
"""They call `os._exit`: when the interpreter ends anyway, which is the only way left to change the exit code, and where
nothing is done yet, while modules are imported, which an exception would disturb."""

MAY_IMPORT_BY_NAME = {"kvdist/__init__.py", "kvdist/__main__.py", "kvdist/serve.py"}
"""Who may import a module that is named by a string, where no reader of imports sees it: names of our own that are
resolved late, and modules that whoever starts a server names on its command line."""

FUNCTION_LINES_MAX = 70

HEAVY = ("torch", "numba", "cupy", "sklearn", "scipy", "keras", "tensorflow", "mxnet")
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


@cache
def imported_names(source: Source) -> list[tuple[str, int]]:
    """(absolute dotted name, line) of everything imported anywhere in the file; `from a import b` gives ``a.b``."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(source, node)
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


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
        if name in UNSEEN_WAITS and source.path not in MAY_WAIT_UNSEEN:
            faults.append(f"{source.path}:{line}: a wait that is in no list; take kvdist.runtime.waits, not {name}")
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
        return source.path in MAY_EXIT_AT_ONCE
    return name == "sys.exit" and source.path in MAY_EXIT


def by_name_faults(source: Source) -> list[str]:
    """Imports of modules named by a string, with which a floor could be passed unseen."""
    if source.path in MAY_IMPORT_BY_NAME:
        return []
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    names = ("__import__", "import_module", "importlib.import_module", "importlib.__import__")
    found = [node for node in calls if dotted(node.func) in names]
    return [f"{source.path}:{node.lineno}: imports a module by its name as a string" for node in found]


def clock_faults(source: Source) -> list[str]:
    """The time of day, where a jump of it could end a wait or lose a process."""
    if source.path in MAY_READ_THE_WALL_CLOCK:
        return []
    used = [(dotted(node), node.lineno) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    names = [*used, *imported_names(source)]
    found = [(name, line) for name, line in names if name in WALL_CLOCK]
    return [f"{source.path}:{line}: {name} is the time of day, which jumps" for name, line in found]


def handler_faults(source: Source) -> list[str]:
    """`except:` without a type, which also swallows Ctrl-C and an exit."""
    bare = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler) and node.type is None]
    return [f"{source.path}:{node.lineno}: a bare except" for node in bare]


@cache
def makers_of_tensors() -> frozenset[str]:
    """The functions of torch whose tensors lie on the program's default device, unless they are told where."""
    from torch.utils._device import _device_constructors

    return frozenset(one.__name__ for one in _device_constructors())


def device_faults(source: Source) -> list[str]:
    """Tensors that would lie where the program has `torch.set_default_device` put its own."""
    faults = [
        f"{source.path}:{line}: {name} is called as an attribute of torch, where its device is seen"
        for name, line in imported_names(source)
        if name.startswith("torch.") and name.removeprefix("torch.") in makers_of_tensors()
    ]
    for node in ast.walk(source.tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        made = name.startswith("torch.") and name.rpartition(".")[2] in makers_of_tensors()
        if made and not any(keyword.arg == "device" for keyword in node.keywords):
            faults.append(f"{source.path}:{node.lineno}: {name} without a device")
    return faults


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


# The project has none of these faults, and each would be found: the same functions on a few wrong lines.

SOME_MODULES = {
    "kvdist", "kvdist.errors", "kvdist.config.settings", "kvdist.protocol", "kvdist.protocol.wire", "kvdist.nodes",
    "kvdist.transport.base", "kvdist.core.server.block", "kvdist.core.server.server", "kvdist.kvstore.dist",
    "kvdist.runtime.node",
}  # fmt: skip
BLOCK, WIRE, TRAINER = "kvdist.core.server.block", "kvdist.protocol.wire", "kvdist.training.trainer"
LONG_BODY = "    x = 1\n" * FUNCTION_LINES_MAX

CHECKS = {
    "a module imports only what lies below it": (LIBRARY, floor_faults),
    "the launcher knows only config, nodes, errors, the estimate and the version": (LAUNCHER, launcher_faults),
    "a library is imported only where it is wrapped": (SOURCES, importer_faults),
    "no import hides in a string": (SOURCES, by_name_faults),
    "only config reads the environment": (LIBRARY, environment_faults),
    "nothing runs what it was sent or ends its caller": (SOURCES, banned_faults),
    "nothing that waits reads the time of day": (SOURCES, clock_faults),
    "an exception has a type where it is caught": (SOURCES, handler_faults),
    "a tensor is made on a device that is named": (LIBRARY, device_faults),
    "functions are short": (SOURCES, length_faults),
}
"""What holds, the files that it holds for, and what finds its faults."""

WRONG = [
    (floor_faults, BLOCK, "from kvdist.kvstore.dist import DistKVStore"),
    (floor_faults, BLOCK, "def late():\n    import kvdist.runtime.node"),
    (floor_faults, WIRE, "if TYPE_CHECKING:\n    from kvdist.runtime import node"),
    (floor_faults, BLOCK, "from ...runtime import node"),
    (floor_faults, BLOCK, "from ...kvstore.dist import DistKVStore"),
    (floor_faults, BLOCK, "from kvdist import Trainer"),
    (floor_faults, WIRE, "from kvdist.transport.base import Route"),
    (floor_faults, "kvdist.novelty", "import math"),
    (launcher_faults, "kvdist_launch.cli", "from kvdist.core.server.server import Server"),
    (importer_faults, "kvdist.runtime.node", "import zmq"),
    (importer_faults, "kvdist.protocol.messages", "import msgpack"),
    (importer_faults, BLOCK, "import time"),
    (importer_faults, BLOCK, "from threading import Lock"),
    (importer_faults, BLOCK, "from numpy import random"),
    (importer_faults, TRAINER, "from concurrent.futures import Future, wait"),
    (importer_faults, TRAINER, "import torch.distributed"),
    (importer_faults, TRAINER, "from torch import distributed"),
    (by_name_faults, BLOCK, "__import__('zmq')"),
    (by_name_faults, BLOCK, "import importlib\nimportlib.import_module('zmq')"),
    (environment_faults, BLOCK, "import os\nos.environ['A']"),
    (environment_faults, BLOCK, "import os\nos.getenv('A')"),
    (environment_faults, BLOCK, "from os import environ"),
    (banned_faults, BLOCK, "import pickle"),
    (banned_faults, BLOCK, "import cloudpickle"),
    (banned_faults, BLOCK, "from marshal import loads"),
    (banned_faults, BLOCK, "def late():\n    import shelve"),
    (banned_faults, BLOCK, "eval('1')"),
    (banned_faults, BLOCK, "exec('1')"),
    (banned_faults, BLOCK, "socket.recv_pyobj()"),
    (banned_faults, BLOCK, "import torch\ntorch.load('f')"),
    (banned_faults, BLOCK, "yaml.load(f)"),
    (banned_faults, BLOCK, "subprocess.run('ls', shell=True)"),
    (banned_faults, BLOCK, "np.load('f', allow_pickle=True)"),
    (banned_faults, BLOCK, "os.system('ls')"),
    (banned_faults, BLOCK, "sys.exit(1)"),
    (banned_faults, BLOCK, "from os import system"),
    (banned_faults, "launcher.kvdist_launch.serialization", "import pickle"),
    (clock_faults, "kvdist.runtime.node", "import time\ntime.time()"),
    (clock_faults, "kvdist.runtime.node", "from time import time_ns"),
    (clock_faults, "kvdist.runtime.node", "from datetime import datetime\nclock = datetime.now"),
    (handler_faults, BLOCK, "try:\n    f()\nexcept:\n    pass"),
    (device_faults, TRAINER, "torch.zeros(3)"),
    (device_faults, TRAINER, "torch.tensor([1], dtype=torch.int64).cumsum(0)"),
    (device_faults, TRAINER, "from torch import zeros"),
    (length_faults, BLOCK, f"def f():\n{LONG_BODY}"),
]
"""A function that finds faults, the module of a file, and a text with one fault."""

RIGHT = [
    (floor_faults, BLOCK, "from kvdist.errors import ConfigError"),
    (floor_faults, BLOCK, "from kvdist import errors"),
    (floor_faults, BLOCK, "from . import server"),
    (floor_faults, BLOCK, "import numpy"),
    (launcher_faults, "kvdist_launch.cli", "from kvdist.config.settings import ClusterConfig"),
    (banned_faults, "kvdist.__main__", "sys.exit(1)"),
    (banned_faults, BLOCK, "model.eval()\nsubprocess.run(['ls'], shell=False)"),
    (banned_faults, "launcher.kvdist_launch.serialization", "import cloudpickle"),
    (device_faults, TRAINER, "torch.zeros(3, device='cpu')\ntorch.from_numpy(a)\ntorch.zeros_like(b)"),
    (length_faults, BLOCK, 'def f():\n    """' + "word\n" * 90 + '    """\n    return 1\n'),
]


def faults_of(check: Callable[..., list[str]], source: Source, modules: Iterable[str]) -> list[str]:
    return check(source, modules) if check in (floor_faults, launcher_faults) else check(source)


@each("rule", CHECKS)
def test_the_project_keeps_each_rule(rule: str) -> None:
    sources, check = CHECKS[rule]
    assert [fault for source in sources for fault in faults_of(check, source, MODULES)] == []


@each("check, module, text, count", [*((*row, 1) for row in WRONG), *((*row, 0) for row in RIGHT)])
def test_each_rule_finds_its_faults_and_no_others(
    check: Callable[..., list[str]], module: str, text: str, count: int
) -> None:
    source = Source(module.replace(".", "/") + ".py", module, text)
    assert len(faults_of(check, source, SOME_MODULES)) == count


def test_each_rule_has_a_wrong_text() -> None:
    assert {check for check, _, _ in WRONG} == {check for _, check in CHECKS.values()}


def test_no_import_runs_in_a_circle() -> None:
    assert ["a", "b", "c", "a"] in cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert cycles(import_graph(SOURCES, MODULES)) == []


def test_whatever_the_core_reaches_is_pure() -> None:
    graph, sources = import_graph(LIBRARY, MODULES), {source.module: source for source in LIBRARY}
    reached, ahead = set(), [module for module in sources if entry_of(module) == "kvdist.core"]
    while ahead:
        if (module := ahead.pop()) not in reached:
            reached.add(module)
            ahead += graph[module]
    imported = [(module, name) for module in reached for name, _ in imported_names(sources[module])]
    assert [(module, name) for module, name in imported if name.partition(".")[0] in IMPURE] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    faults = []
    for path in project_files():
        faults += path_faults(path.relative_to(ROOT).as_posix(), path.read_text("utf-8", errors="replace"))
    assert faults == []
    assert len(path_faults("README.md", "see /" + "work/main for more")) == 1


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


@each("statement", ["import kvdist", "import kvdist.serve", "import kvdist_launch.cli"])
def test_importing_it_draws_in_nothing_heavy(statement: str) -> None:
    assert modules_loaded_by(statement).isdisjoint(HEAVY)
    assert "msgpack" in modules_loaded_by("import msgpack"), "what is loaded is seen"


def test_every_entry_of_the_tables_is_of_use() -> None:
    floors = set(FLOORS.values())
    assert floors == set(range(max(floors) + 1))
    assert all(FLOORS[importer] == FLOORS[imported] for importer, imported in SIDEWAYS)
    graph = import_graph(LIBRARY, MODULES)
    used = {(entry_of(importer), entry_of(target)) for importer, targets in graph.items() for target in targets}
    assert used >= SIDEWAYS, "an allowance that nothing uses any more"
