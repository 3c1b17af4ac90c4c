"""What gets installed: declared libraries are the imported ones, commands lead somewhere, data files come along."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.release import quickstart, relative_links

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

IMPORT_NAMES = {
    "PyYAML": {"yaml"},
    "cupy-cuda12x": {"cupy", "cupyx"},
    "numba": {"llvmlite", "numba"},
    "cuda-bindings": {"cuda"},
    "numba-cuda": {"numba"},
    "pyzmq": {"zmq"},
    "scikit-learn": {"sklearn"},
    "tensorflow-cpu": {"tensorflow"},
}
"""Under which names a library is imported, where not under its own."""


def distribution_name(requirement: str) -> str:
    """``pyzmq`` of ``pyzmq>=26.4``."""
    return re.split(r"[\[<>=~!; ]", requirement, maxsplit=1)[0]


def import_names(requirements: list[str]) -> set[str]:
    names = [distribution_name(requirement) for requirement in requirements]
    return {imported for name in names for imported in IMPORT_NAMES.get(name, {name})}


def third_party_imports(folder: Path) -> set[str]:
    """Libraries that the code in `folder` imports, inside functions too."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"kvdist", "kvdist_launch"}


def test_every_library_that_is_imported_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    frameworks = extras["torch"] + extras["keras"] + extras["tensorflow"] + extras["mxnet"]
    declared = import_names(PROJECT["dependencies"] + frameworks + extras["gpu"])
    assert third_party_imports(ROOT / "kvdist") <= declared
    optional = extras["completion"] + extras["notebook"] + extras["yaml"]
    assert third_party_imports(ROOT / "launcher") <= import_names(PROJECT["dependencies"] + optional)


def test_every_library_that_is_required_is_imported() -> None:
    used = third_party_imports(ROOT / "kvdist") | third_party_imports(ROOT / "launcher")
    assert import_names(PROJECT["dependencies"]) <= used


def test_every_library_that_make_installs_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    names = ("keras", "tensorflow", "examples", "test", "docs", "dev", "bench", "release")
    needed = PROJECT["dependencies"] + [requirement for name in names for requirement in extras[name]]
    pinned = {distribution_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {distribution_name(requirement) for requirement in needed} - {"kvdist"} <= pinned


def test_the_extras_that_users_were_promised_exist() -> None:
    assert {"torch", "gpu", "test", "bench", "dev"} <= set(PROJECT["optional-dependencies"])


@each("name", sorted(PROJECT["scripts"]))
def test_a_command_leads_to_a_function(name: str) -> None:
    entry = importlib.metadata.EntryPoint(name, PROJECT["scripts"][name], "console_scripts")
    assert callable(entry.load())


def test_a_relative_link_of_a_page_is_noticed_as_rendered() -> None:
    page = "| [a](docs/a.md) |\n|---|\n| ![b](b.png) |\n\n[c](https://c.org/c) [d](#d) <img src='e.png'> `[f](f.md)`"
    assert relative_links(page) == ["docs/a.md", "b.png", "e.png"]


def test_the_quickstart_is_the_script_and_the_command_of_its_section() -> None:
    other = "```python\nno\n```\n"
    section = "## Quickstart: fast\n```python\nyes\n```\n```\n$ kvdist-launch -n 3 x.py\n```\n"
    assert quickstart(f"{other}{section}## More\n") == ("yes\n", ["kvdist-launch", "-n", "3", "x.py"])
    with pytest.raises(ValueError, match="no section 'Quickstart'"):
        quickstart(f"{other}## More\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_holds_both_packages_and_their_data_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building leaves files beside what it builds
    for folder in ("kvdist", "launcher"):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("kvdist-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {"kvdist/py.typed", "kvdist/protocol/WIRE.md", "kvdist/core/server/server.py"}
    assert names >= {"kvdist_launch/py.typed", "kvdist_launch/cli.py"}
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"kvdist", "kvdist_launch"}
