"""The documents say what is so: links lead somewhere, names exist, numbers are the code's, examples run."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdist.config.foreign import MXNET_VARIABLES
from kvdist.config.settings import REPLACED_BY_PATIENCE, SETTINGS
from kvdist.kvstore.registry import DIST_NAMES, LOCAL_NAMES
from kvdist_launch.environment import OWNED_VARIABLES
from tests.forks import Forked
from tests.ports import held_port

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
WALK = ROOT / "docs" / "walk.md"
MANUAL = ROOT / "docs" / "manual-start.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
PAGES = [page for folder in (".", "measured", "reference") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *PAGES]
PROSE = [README, *PAGES]

FOLDERS = (ROOT, ROOT / "examples", ROOT / "kvdist", ROOT / "launcher", ROOT / "launcher" / "kvdist_launch")
"""Where a file may lie that a document names by a path."""
OF_USERS = {"keras_mnist.py", "queue.py", "train.py", "sums.py", "my_rules.py", "job.sh"}
"""Files that a reader makes, or has from others."""
OF_LIBRARIES = {"torch", "numpy", "trainer", "net", "store", "kv"}
"""What dotted names in the documents begin with that are not modules of this project."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOB = "https://github.com/kvdist/kvdist/blob/main/"
"""What the README's links into this repository begin with: a package index shows that page without the files."""
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\b(?:KVDIST|DMLC|MXNET)_[A-Z][A-Z0-9_]*\b")
VARIABLE_ALONE = re.compile(VARIABLE.pattern + r"\Z")
WALK_STEPS = 10
WALK_FILES_MAX = 16
"""Files that one gradient passes, of which two are transports."""
TIMEOUT_S = 150


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def without_fences(path: Path) -> str:
    return FENCE.sub("", text_of(path))


def fenced(path: Path, language: str) -> list[str]:
    """The blocks of code in a document that are marked as this language."""
    return [body for marked, body in FENCE.findall(text_of(path)) if marked == language]


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", without_fences(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(path: Path, heading: str) -> str:
    """What stands below a heading of the second level."""
    parts = text_of(path).split(f"\n## {heading}\n")
    assert len(parts) == 2, f"{name_of(path)} has one section called {heading!r}"
    return parts[1].split("\n## ")[0]


# Links, files, modules.


def dead_links(path: Path) -> Iterator[str]:
    for target in LINK.findall(without_fences(path)):
        if "://" in target and not target.startswith(BLOB):
            continue
        file, _, anchor = target.partition("#")
        leads_to = ROOT / file.removeprefix(BLOB) if target.startswith(BLOB) else path.parent / file if file else path
        if not leads_to.exists():
            yield target
        elif anchor and anchor not in anchors(leads_to):
            yield f"{target} (no such heading)"


def files_named(path: Path) -> set[str]:
    """Names and paths of files in a document's text, in and out of fences."""
    return set(re.findall(r"(?<![\w/*{<.-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|toml)\b", text_of(path)))


def is_there(file: str, beside: Path) -> bool:
    if any((folder / file).exists() for folder in (*FOLDERS, beside)):
        return True
    packages = (ROOT / "kvdist", ROOT / "launcher")
    return "/" not in file and any(any(folder.rglob(file)) for folder in packages)


def modules_named(path: Path) -> set[str]:
    return {
        word
        for text in CODE.findall(without_fences(path))
        for word in re.findall(r"(?<![\w./-])(?:kvdist|kvdist_launch)(?:\.\w+)*", text)
        if f"{word}/" not in text
    }


def resolves(dotted: str) -> bool:
    """Whether this is a module of the project, or something public in one."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True  # not by importing it: it may need a library that is not here, such as TensorFlow
    module, _, last = dotted.rpartition(".")
    if importlib.util.find_spec(dotted.partition(".")[0]) is None:
        return False
    if not module:
        return True
    try:
        if importlib.util.find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        return False
    return last in dir(importlib.import_module(module))


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    assert {name_of(path): dead for path in DOCUMENTS if (dead := list(dead_links(path)))} == {}


def test_a_link_to_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = (
        f"[a](page.md#here) [b](gone.md) [c](#there) [d](https://example.org/x) [e]({BLOB}LICENSE) [f]({BLOB}gone.md)"
    )
    page.write_text(f"# Here\n{links}\n", "utf-8")
    assert list(dead_links(page)) == ["gone.md", "#there (no such heading)", f"{BLOB}gone.md"]


def test_the_links_of_the_readme_work_where_the_repository_is_not() -> None:
    targets = LINK.findall(without_fences(README))
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(BLOB)] == []


def test_every_file_that_is_named_exists() -> None:
    named = [(path, file) for path in PROSE for file in files_named(path) - OF_USERS]
    assert sorted((name_of(path), file) for path, file in named if not is_there(file, path.parent)) == []


def test_a_file_that_is_not_there_is_noticed() -> None:
    assert is_there("core/round.py", ROOT) and is_there("round.py", ROOT)
    assert not is_there("core/neverwas.py", ROOT) and not is_there("neverwas.py", ROOT)


def test_every_module_that_is_named_exists() -> None:
    named = [(name_of(path), word) for path in PROSE for word in modules_named(path)]
    assert sorted(one for one in named if not resolves(one[1])) == []


def test_a_module_that_is_not_there_is_noticed() -> None:
    assert resolves("kvdist.core.round") and resolves("kvdist.PeerLostError") and resolves("kvdist_launch")
    assert not resolves("kvdist.core.shards") and not resolves("kvdist.nothing.here") and not resolves("kvdist.Nothing")


def test_the_classes_of_the_glossary_are_there() -> None:
    lines = text_of(ROOT / "docs" / "glossary.md").splitlines()
    cells = [line.split("|")[3] for line in lines if line.startswith("| *")]
    named = {word for cell in cells for word in CODE.findall(cell) if word[0].isupper()}
    defined = {
        node.id if isinstance(node, ast.Name) else node.name
        for package in ("kvdist", "launcher")
        for path in (ROOT / package).rglob("*.py")
        for top in ast.parse(text_of(path)).body
        for node in ([top] if isinstance(top, ast.ClassDef) else getattr(top, "targets", []))
        if isinstance(node, ast.ClassDef | ast.Name)
    }
    assert len(named) > 25
    assert sorted(name for name in named if name.partition(".")[0] not in defined) == []


def names_of_stores(page: str) -> list[set[str]]:
    """What stands in the columns of the table of stores: the names above, and those below that mean the same."""
    rows = [row.split("|")[2:-1] for row in page.splitlines() if row.startswith(("| | `", "| also called "))]
    assert len(rows) == 2, "the table has a head and a row of other names"
    return [{name for cell in column for name in CODE.findall(cell)} for column in zip(*rows, strict=True)]


def test_the_table_of_stores_has_every_name_in_the_column_of_its_mode() -> None:
    in_rounds = {name for name, policy in DIST_NAMES.items() if policy.is_lockstep}
    page = text_of(ROOT / "docs" / "stores.md")
    assert names_of_stores(page) == [set(LOCAL_NAMES), in_rounds, set(DIST_NAMES) - in_rounds]
    assert names_of_stores(page.replace("| `dist_async` |", "| `dist_late` |"))[2] >= {"dist_late"}


# Variables and limits.


def variables_in_the_code() -> set[str]:
    """Every variable that is read, set by the launcher, or known to change nothing."""
    twins = {row.twin for row in SETTINGS.values()} | {row.derived[0] for row in SETTINGS.values() if row.derived}
    others = {*MXNET_VARIABLES, *REPLACED_BY_PATIENCE, *OWNED_VARIABLES}
    return {name for name in {*SETTINGS, *twins, *others} if VARIABLE_ALONE.match(name)}


def variables_that_are_not_offered(path: Path) -> set[str]:
    """Variables of the mirrored system of which a row of a table says so."""
    lines = [line for line in text_of(path).splitlines() if line.startswith("| `") and "| not offered |" in line]
    return {name for line in lines for name in VARIABLE.findall(line.split("| not offered |")[0])}


def test_every_variable_in_a_document_is_known_to_the_code() -> None:
    known = variables_in_the_code()
    for path in PROSE:
        told = set(VARIABLE.findall(text_of(path)))
        assert told - known - variables_that_are_not_offered(path) == set(), name_of(path)


def test_what_is_said_not_to_be_offered_is_not_read_by_the_code() -> None:
    told = variables_that_are_not_offered(ROOT / "docs" / "reference" / "mxnet.md")
    assert told & variables_in_the_code() == {name for name in MXNET_VARIABLES if name in told}
    assert len(told) > 20


def test_every_variable_of_the_code_stands_in_the_configuration() -> None:
    assert variables_in_the_code() - set(VARIABLE.findall(text_of(CONFIGURATION))) == set()


# The walk of one gradient.


def walk_steps() -> list[str]:
    return re.findall(r"^\d+\. .*(?:\n +.*)*", text_of(WALK), re.MULTILINE)


def definitions(file: str) -> set[str]:
    """``function()`` of the module and ``Class.method`` of its classes."""
    found = set()
    for node in ast.parse(text_of(WALK.parent / file)).body:
        if isinstance(node, ast.FunctionDef):
            found.add(f"{node.name}()")
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    return found


def functions_without_a_home(step: str) -> list[str]:
    """The functions that a step names and that are not defined in the files to which it links."""
    named = [text for text in CODE.findall(step) if re.fullmatch(r"[A-Z]\w*\.\w+|\w+\(\)", text)]
    assert named, f"this step names no function: {step}"
    known = set().union(*(definitions(target) for target in LINK.findall(step)))
    return [function for function in named if function not in known]


def test_the_walk_has_ten_steps() -> None:
    assert [int(step.split(".")[0]) for step in walk_steps()] == list(range(1, WALK_STEPS + 1))


def test_the_walk_passes_few_files() -> None:
    assert len({target for step in walk_steps() for target in LINK.findall(step)}) <= WALK_FILES_MAX


def test_a_step_of_the_walk_names_functions_of_the_files_it_links() -> None:
    assert [function for step in walk_steps() for function in functions_without_a_home(step)] == []


def test_a_step_that_names_what_is_not_there_is_noticed() -> None:
    step = "1. `Round.open` and `Round.offer` in [x](../kvdist/core/round.py)"
    assert functions_without_a_home(step) == ["Round.open"]


# Examples.


def patched(diff: str) -> str:
    """The script that a difference leads to."""
    kept = [line for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(line[1:] if line[:1] in ("+", " ") else line for line in kept)


PYTHON = [(path, body) for path in PROSE for body in [*fenced(path, "python"), *map(patched, fenced(path, "diff"))]]


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not VARIABLE_ALONE.match(name)}


def test_there_are_examples_to_run() -> None:
    assert {path for path, _ in PYTHON} >= {README, MANUAL}


@pytest.mark.parametrize("page", sorted({path for path, _ in PYTHON}), ids=name_of)
def test_each_python_example_runs_alone_in_the_embedded_cluster(
    page: Path, forked: type[Forked], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    # On a busy machine a wait may be long; that is not what the example shows.
    env = {**plain_environment(), "PYTHONWARNINGS": "error", "KVDIST_EXPLAIN_AFTER_S": "1000"}
    for number, body in enumerate(body for path, body in PYTHON if path == page):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "train.py").write_text(body, "utf-8")
        argv, pipe = [sys.executable, "train.py"], subprocess.PIPE
        with forked(argv, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True) as process:
            said = process.communicate(timeout=TIMEOUT_S)[1]
        assert process.returncode == 0, f"{body}\n{said}"
        # A module of optimizers, say, makes no store, and what starts a job has a cluster.
        is_alone = 'create("dist' in body and "kvdist_launch" not in body
        expected = ["kv.create('dist'): running alone, as the environment names no cluster"] * is_alone
        assert [line.partition(". ")[0] for line in said.splitlines()[:1]] == expected


def test_the_quickstart_prints_a_loss_of_both_workers_in_each_epoch(forked: type[Forked], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    quickstart = section(README, "Quickstart: 60 seconds")
    ((_, script),) = [block for block in FENCE.findall(quickstart) if block[0] == "python"]
    (command,) = re.findall(r"^\$ kvdist-launch (.+)$", quickstart, re.MULTILINE)
    shown = re.findall(r"^(w\d) │ (epoch \d+): loss [\d.]+$", quickstart, re.MULTILINE)
    (tmp_path / "train.py").write_text(script, "utf-8")
    words = [sys.executable if word == "python" else word for word in command.split()]
    argv, pipe = [sys.executable, "-m", "kvdist_launch", *words], subprocess.PIPE
    with forked(argv, cwd=tmp_path, env=plain_environment(), stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    printed = re.findall(r"^(w\d) │ (epoch \d+): loss [\d.]+$", out, re.MULTILINE)
    assert sorted(printed) == sorted(shown) and {worker for worker, _ in printed} == {"w0", "w1"}


def shell_words(body: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Each line of a shell block: the variables that it sets, and the command that gets them."""
    for line in body.splitlines():
        words = line.removeprefix("export ").split()
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        yield variables, [word for word in words if "=" not in word]


def test_the_three_shells_of_the_manual_start_make_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(fenced(MANUAL, "python")[0], "utf-8")
    exports, *shells = [list(shell_words(body)) for body in fenced(MANUAL, "shell")]
    shared = {name: value for variables, _ in exports for name, value in variables.items()}
    with held_port() as port:
        shared["DMLC_PS_ROOT_PORT"] = str(port)
        processes = []
        for ((variables, command),) in shells:
            assert command.pop(0) == "python"
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=tmp_path,
                    env={**plain_environment(), **shared, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    promised = re.findall(r"The worker prints `([^`]+)`", text_of(MANUAL))
    assert [outputs[2].strip()] == promised
