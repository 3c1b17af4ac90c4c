"""Try a release as its users will: ``make release`` builds the sdist and the wheel, and calls this.

    python -m tests.release dist

The page that the wheel brings must have no relative link. Then each Python from 3.10 to 3.13 that is to be had gets an
empty environment with the wheel in it, and there, in a folder of their own, two workers and two servers run a program
of arrays; with PyTorch the quickstart of the README, too, where pip takes a build of PyTorch without CUDA.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TIMEOUT_S = 1200.0

ARRAYS = """
import numpy as np
from kvdist import kv

store = kv.create("dist")
store.init("w", np.zeros(3, np.float32))
store.push("w", np.ones(3, np.float32))
assert store.pull("w").tolist() == [store.num_workers] * 3
store.close()
"""
"""A program that needs no PyTorch."""


class _Links(HTMLParser):
    """Targets of links and images, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value or "" for name, value in attrs if (tag, name) in {("a", "href"), ("img", "src")}]


def relative_links(markdown: str) -> list[str]:
    """The links and images of a page that lead nowhere once the page stands somewhere else, as rendered."""
    page = _Links()
    page.feed(MarkdownIt().enable("table").render(markdown))
    return [target for target in page.targets if not urlsplit(target).scheme and not target.startswith("#")]


def quickstart(readme: str) -> tuple[str, list[str]]:
    """The script of the README's quickstart, and the command that starts it.

    Raises:
        ValueError: if there is no such section, or none of both in it.
    """
    section = re.search(r"^## Quickstart.*?\n(.*?)(?=^## )", readme, re.MULTILINE | re.DOTALL)
    script = section and re.search(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    command = section and re.search(r"^\$ (kvdist-launch .*)$", section[1], re.MULTILINE)
    if not script or not command:
        raise ValueError("the README has no section 'Quickstart' with a python block and a line '$ kvdist-launch …'")
    return script[1], command[1].split()


def interpreters() -> Iterator[tuple[str, str | None]]:
    """Each version, and a Python of it, or None."""
    for version in PYTHONS:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        there = sorted(pyenv.glob(f"versions/{version}.*/bin/python3"))
        for python in (shutil.which(f"python{version}"), *map(str, there)):
            if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
                yield version, python
                break
        else:
            yield version, None


def has_cuda(python: str) -> bool:
    """Whether the build of PyTorch that pip takes for this Python needs CUDA's packages."""
    words = ["install", "--dry-run", "--quiet", "--no-deps", "--report", "-", torch_version()]
    report = json.loads(_run([python, "-m", "pip", *words], ROOT))
    needed = report["install"][0]["metadata"]["requires_dist"]
    return any(name.startswith(("nvidia-", "cuda-")) for name in needed)


def torch_version() -> str:
    """The requirement of the PyTorch with which kvdist is tested, as in ``torch==2.13.0``."""
    (line,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    return line


def try_wheel(wheel: Path, base: str, readme: str, folder: Path) -> str:
    """Install the wheel for one Python into an empty environment, and use it. Returns what was run.

    Raises:
        RuntimeError: if a command fails, with what it printed.
    """
    _run([base, "-m", "venv", str(folder / "env")], folder)
    python, launch = str(folder / "env/bin/python"), str(folder / "env/bin/kvdist-launch")
    # An old pip downloads a package to see what it needs.
    _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], folder)
    _run([python, "-m", "pip", "install", "--quiet", str(wheel)], folder)
    version = _run([python, "-m", "kvdist", "--version"], folder).split()[-1]
    if f"-{version}-" not in wheel.name:
        raise RuntimeError(f"{wheel.name} says that it is kvdist {version}")
    (folder / "arrays.py").write_text(ARRAYS, "utf-8")
    _run([launch, "-n", "2", "-s", "2", python, "arrays.py"], folder)
    if has_cuda(python):
        return "a program of arrays; THE QUICKSTART WAS NOT RUN: pip has no PyTorch without CUDA for it here"
    _run([python, "-m", "pip", "install", "--quiet", f"{wheel}[torch]", torch_version()], folder)
    script, command = quickstart(readme)
    (folder / "train.py").write_text(script, "utf-8")
    said = _run([launch, *command[1:]], folder)
    workers = int(command[command.index("-n") + 1])
    silent = [rank for rank in range(workers) if f"w{rank} │" not in said]
    if silent:
        raise RuntimeError(f"workers {silent} of the quickstart printed nothing:\n{said}")
    return f"a program of arrays, and the quickstart, which printed {len(said.splitlines())} lines"


def _run(argv: list[str], folder: Path) -> str:
    """What a command prints, away from this project: without its variables and with the environment's own commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVDIST_", "VIRTUAL_"))}
    kept["PATH"] = f"{Path(argv[0]).parent}{os.pathsep}{kept['PATH']}"
    done = subprocess.run(argv, cwd=folder, env=kept, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(argv: list[str]) -> int:
    """Try the wheel in a folder of distributions. Returns the exit code."""
    (wheel,) = Path(argv[0]).resolve().glob("kvdist-*.whl")
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    readme = message_from_string(zipfile.ZipFile(wheel).read(metadata).decode("utf-8")).get_payload()
    assert isinstance(readme, str)
    relative = relative_links(readme)
    if relative:
        print(f"the README has relative links, which lead nowhere on the page of a package index: {relative}")
        return 1
    failed = tried = 0
    for version, python in interpreters():
        if python is None:
            print(f"Python {version}: not to be had here, NOT TRIED", flush=True)
            continue
        tried += 1
        with tempfile.TemporaryDirectory(prefix="kvdist-release-") as folder:
            try:
                print(f"Python {version}: {try_wheel(wheel, python, readme, Path(folder))}", flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"Python {version}: FAILED: {error}", flush=True)
    if not tried:
        print("FAILED: no Python from 3.10 to 3.13 is here to try the wheel", flush=True)
    return int(failed > 0 or not tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
