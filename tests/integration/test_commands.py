"""Commands to servers of real processes: a module of the operator's registers what runs."""

from __future__ import annotations

import os

import pytest

HANDLERS = """
from pathlib import Path

from kvdist import kv

FOLDER = Path({folder!r})


@kv.register_command(7)
def note(head, body, rank):
    (FOLDER / f"server-{{rank}}").write_text(f"{{head}} {{body}}", "utf-8")


@kv.register_command(8)
def fail(head, body, rank):
    if rank == 1:
        raise LookupError(f"nothing is called {{body!r}}")
"""


@pytest.mark.parametrize("by", ["option", "variable"])
def test_two_servers_run_a_registered_handler_and_its_errors_reach_the_caller(job, tmp_path, by):
    (tmp_path / "handlers_of_the_operator.py").write_text(HANDLERS.format(folder=str(tmp_path)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    name = "handlers_of_the_operator"
    if by == "variable":
        job.launch(2, 2, "commands.py", str(tmp_path), PYTHONPATH=path, KVDIST_SERVER_MODULE=name)
    else:
        job.launch(2, 2, "commands.py", str(tmp_path), options=["--server-module", name], PYTHONPATH=path)
    job.succeed()
    launcher = job.processes["launcher"]
    failed, unknown = (line.split(" │ ", 1)[1] for line in launcher.lines_with("refused: "))
    assert failed == "refused: KvdistError: server-1: command 8 failed with LookupError: nothing is called 'x'"
    assert ": no handler is registered for command 9; known are: 7, 8. " in unknown
    assert len(launcher.lines_with("the servers live: (3,)")) == 2
