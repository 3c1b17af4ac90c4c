"""Tests that are programs of workers: the functions of a test module, run by every worker of one job.

``two = Together(workers=2, servers=2)`` decorates functions. Each becomes a test of its own, but one job runs all that
were collected of a module, so its processes are started once, also where the tests are spread over several processes.
A function with a parameter `store` gets a new store ``dist``. It checks by itself, and fails on whatever rank it
raises. All run in the order of the file, on every rank.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.integration.processes import Job

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0
LEFT_S = 10.0
"""How long a process may take to end behind its launcher."""
STALLED = {"KVDIST_STALL_SHUTDOWN_S": "40"}
"""A worker that fails alone leaves the others waiting; so long, and then the job ends."""


class Together:
    """Functions that the workers of one job run.

    Args:
        workers: how many.
        servers: how many; 0 for workers alone, which `kvdist-run` starts then.
        options: further words for the launcher.
        variables: further variables for all processes.
    """

    def __init__(self, workers: int, servers: int, options: Sequence[str] = (), **variables: str) -> None:
        self.workers, self.servers = workers, servers
        self.options, self.variables = list(options), {**STALLED, "PYTHONPATH": str(ROOT), **variables}
        self.functions: dict[str, Callable[..., None]] = {}
        self.outcomes: dict[int, dict[str, str]] | None = None
        self.told = ""

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        """Let the workers run a function; what is returned is the test that looks at how it went."""
        self.functions[function.__name__] = function

        def test(request: pytest.FixtureRequest, popen: type[subprocess.Popen[bytes]]) -> None:
            self._see(request, popen)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    def each(self, *words: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """The same for a function whose first argument is each of these in turn: as many tests."""

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            for word in words:
                self.functions[f"{function.__name__}[{word}]"] = functools.partial(function, word)

            def test(request: pytest.FixtureRequest, popen: type[subprocess.Popen[bytes]], word: str) -> None:
                self._see(request, popen)

            test.__name__, test.__doc__ = function.__name__, function.__doc__
            return pytest.mark.parametrize("word", words, ids=words)(test)

        return decorate

    def _see(self, request: pytest.FixtureRequest, popen: type[subprocess.Popen[bytes]]) -> None:
        """What a test does: see to it that the job has run, and look at how its own function went."""
        if self.outcomes is None:
            collected = {item.name for item in request.session.items if item.module is request.module}
            names = [word for word in self.functions if word in collected]
            own = next(word for word, value in vars(request.module).items() if value is self)
            with Path(tempfile.gettempdir(), f"together-{request.module.__name__}-{own}").open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another process of this run of tests may be at the same job
                file.seek(0)
                if text := file.read():
                    outcomes, self.told, self.ended_well = json.loads(text)
                    self.outcomes = {int(rank): outcome for rank, outcome in outcomes.items()}
                else:
                    self._run(request.module, own, names, popen)
                    json.dump([self.outcomes, self.told, self.ended_well], file)
        self._look(request.node.name)

    def _run(self, module: ModuleType, own: str, names: list[str], popen: type[subprocess.Popen[bytes]]) -> None:
        """Start the job, wait for its end, and read what its workers have written."""
        self.outcomes = {rank: {} for rank in range(self.workers)}
        folder, results = Path(tempfile.mkdtemp(prefix="job-")), Path(tempfile.mkdtemp(prefix="results-"))
        job = Job(folder, uuid.uuid4().hex, popen)
        words = [sys.executable, __file__, str(module.__file__), own, str(results), *names]
        if self.servers:
            starter = ["kvdist_launch", "-n", str(self.workers), "-s", str(self.servers)]
        else:
            starter = ["kvdist_launch.run_cli", "-np", str(self.workers)]
        try:
            job.start("launcher", [sys.executable, "-m", *starter, *self.options, *words], **self.variables)
            code = job.finish(TIMEOUT_S)["launcher"]
            for path in folder.glob("torchinductor_*"):  # a cache that `torch.optim` makes
                shutil.rmtree(path)
            left = job.left_behind(LEFT_S)
            for path in results.glob("rank-*"):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                self.outcomes[int(path.name.removeprefix("rank-"))] = dict(lines)
            self.told = f"exit code {code}, left behind: {left}\n{job.transcript()}"
            self.ended_well = code == 0 and not left
        finally:
            job.close()
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(results)

    def _look(self, name: str) -> None:
        """Fail with what the ranks have raised, or with what the job has printed where a rank never came that far."""
        assert self.outcomes is not None
        said = {rank: outcome.get(name) for rank, outcome in self.outcomes.items()}
        texts = [f"rank {rank}: {'never run' if text is None else text}" for rank, text in said.items() if text != ""]
        if None in said.values():
            before = [f"{word} on rank {rank}" for rank, all_ in self.outcomes.items() for word in all_ if all_[word]]
            texts += ["failed before: " + ", ".join(before), self.told]
        if texts:
            pytest.fail("\n".join(texts), pytrace=False)
        if not any(text for outcome in self.outcomes.values() for text in outcome.values()):
            assert self.ended_well, self.told


def same(got: Any, wanted: Any, within: float = 0.0) -> None:
    """Compare arrays, tensors or numbers, by default exactly."""
    values = got.detach().to("cpu").double().numpy() if hasattr(got, "detach") else np.asarray(got, np.float64)
    np.testing.assert_allclose(values, np.asarray(wanted, np.float64), rtol=0, atol=within)


def main(file: str, own: str, results: str, *names: str) -> None:
    """What each worker runs."""
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    together: Together = getattr(importlib.import_module(module), own)
    with open(Path(results) / f"rank-{os.environ['KVDIST_RANK']}", "w") as lines:

        def note(name: str, function: Callable[..., None], *args: Any) -> None:
            text = ""
            try:
                function(*args)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 (the test shows it)
                text = traceback.format_exc()
            print(json.dumps([name, text]), file=lines, flush=True)

        if not together.servers:
            import kvdist.collective as hvd

            hvd.init()
            for name in names:
                note(name, together.functions[name])
            hvd.shutdown()
            return
        from kvdist import kv

        with kv.create("dist"):  # a worker that has closed its last store cannot come back
            for name in names:
                function = together.functions[name]
                if "store" not in inspect.signature(function).parameters:
                    note(name, function)
                    continue
                with kv.create("dist") as store:
                    note(name, function, store)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.acceptance import together as this

    this.main(*sys.argv[1:])


def folder(name: str) -> Path:
    """One that all workers of this job have."""
    path = Path(tempfile.gettempdir(), f"kvdist-together-{os.getppid()}-{name}")
    path.mkdir(exist_ok=True)
    return path


def exchanged(store: Any, name: str, mine: Any) -> list[Any]:
    """What all workers have to say, by rank."""
    path = folder(name)
    Path(path, str(store.rank)).write_text(json.dumps(mine))
    store.barrier()
    found = [json.loads(Path(path, str(rank)).read_text()) for rank in range(store.num_workers)]
    store.barrier()
    shutil.rmtree(path, ignore_errors=True)
    return found
