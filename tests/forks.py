"""Processes that begin within milliseconds: forks of one that has imported kvdist, or of one that has torch as well.

`Forked` is `subprocess.Popen` for the programs of this Python: ``[sys.executable, "train.py", ...]``, ``-m`` or ``-c``.
Each is a child of the process that asks for it, with its own environment, directory, streams, descriptors and
``__main__``, and ends as an interpreter does. What is not such a program is started as `subprocess.Popen` starts it. A
launcher that is forked, and a script that speaks of kvdist_launch, has the processes of its job forked too.

A process that forks has one thread and no socket but the one on which it is asked. A test about how a process starts
needs one that is started from scratch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

LAUNCHERS = ("kvdist_launch", "kvdist_launch.run_cli")
SERVE = "import os; del os.environ['ROOM']; from tests import forks; forks.prepare({}); forks.serve({})"
ROOM = 1 << 16
"""Bytes for the variables of a fork, which lie where those of the process that forks were."""
REQUEST_BYTES = 1 << 17
DESCRIPTORS_MAX = 16
ASIDE = 500
"""Above every descriptor that a fork is given."""
PR_SET_CHILD_SUBREAPER = 36
ENV_START = 47
"""Where /proc/self/stat has the address of the variables, behind the name; their end follows."""


class Forked(subprocess.Popen):
    """A forked process, or one that is started from scratch if the command is no program of this Python."""

    links: Sequence[socket.socket] = ()
    """To the process that forks for programs without torch, and to the one for programs with torch."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        if not self.links or not is_program(args):
            super()._execute_child(args, *others)
            return
        given = inspect.signature(super()._execute_child).bind(args, *others).arguments
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        own = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        asked = {
            "argv": list(args),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": os.path.abspath(given["cwd"] or "."),
            "session": given["start_new_session"],
            "numbers": [0, 1, 2, *given["pass_fds"]],
        }
        link, libc = self.links[may_import_torch(args, asked["cwd"])], ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the fork's own parent ends at once
        try:
            socket.send_fds(link, [json.dumps(asked).encode()], [*own, *given["pass_fds"]])
            self.pid = int(link.recv(REQUEST_BYTES))
            link.recv(1)  # now it is a child of this process
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))


def is_program(args: Any) -> bool:
    """Whether a command is this Python and what it runs, without options of Python's."""
    return args[0] == sys.executable and len(args) > 1 and (args[1] in ("-m", "-c") or args[1].endswith(".py"))


def may_import_torch(args: Sequence[str], folder: str) -> bool:
    """Whether a program of a command speaks of torch: to import it takes as long as eighty forks that have it."""
    texts = [*args, *(text_of(os.path.join(folder, word)) for word in args)]
    return any(re.search(r"\b(torch|Trainer|horovod|keras|collective|hybrid)\b", text) for text in texts)


def text_of(program: str) -> str:
    """What a script says; nothing where the word is no script."""
    file = Path(program)
    return file.read_text("utf-8") if program.endswith(".py") and file.exists() else ""


@contextlib.contextmanager
def forking() -> Iterator[type[Forked]]:
    """Start the processes that fork; a class of `Forked` that asks them."""
    with contextlib.ExitStack() as stack:
        links = []
        for with_torch in (False, True):
            link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            argv = [sys.executable, "-c", SERVE.format(with_torch, theirs.fileno())]
            env = {**os.environ, "PYTHONUNBUFFERED": "1", "ROOM": "x" * ROOM}
            stack.enter_context(subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
            links.append(stack.enter_context(link))
            theirs.close()
        yield type("Forked", (Forked,), {"links": links})


def prepare(with_torch: bool) -> None:
    """Import what programs need."""
    modules: dict[str, Any] = {}
    atexit.register(leave, modules)  # as the first, which is called as the last
    import kvdist.__main__
    import kvdist.kv
    import kvdist.serve
    import kvdist_launch.cli
    import kvdist_launch.run_cli  # noqa: F401

    with contextlib.suppress(ImportError):
        from kvdist.kernels import numba_cpu

        numba_cpu.build("sum_float32")  # the first kernel of a process takes half a second, from the cache too
    with contextlib.suppress(ImportError):
        if with_torch:
            import torch._dynamo  # noqa: F401 (the first optimizer of a process imports it, for two seconds)

            import kvdist.collective

            assert kvdist.Trainer
    del sys.modules["kvdist.__main__"]  # or runpy warns when it runs that
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    modules |= sys.modules
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's would take its operators apart
    gc.collect()
    gc.freeze()


def leave(modules: dict[str, Any]) -> None:
    """Let the interpreter end without these modules: taking them apart would copy the memory that forks share."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name in modules.keys() - {"__main__", "builtins", "sys"}:
        sys.modules.pop(name, None)


def serve(number: int) -> NoReturn:
    """Fork what is asked for on a connection, until its end."""
    link = socket.socket(fileno=number)
    while True:
        data, received, _, _ = socket.recv_fds(link, REQUEST_BYTES, DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                link.close()
                be(received, **json.loads(data))
            link.send(str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # the child is now that of the process that asks
        link.send(b".")
        for descriptor in received:
            os.close(descriptor)


def be(
    received: Sequence[int], numbers: Sequence[int], argv: list[str], env: dict[str, str], cwd: str, session: bool
) -> NoReturn:
    """Turn this fork into the process that was asked for, and run it to its end."""
    if session:
        os.setsid()
    os.chdir(cwd)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, ASIDE) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path[1:] if path not in paths]
    os.environ.clear()
    os.environ.update(env)
    show(env)
    if "PYTHONWARNINGS" in env:
        warnings.simplefilter(env["PYTHONWARNINGS"])
    tempfile.tempdir = None  # to be looked up again
    program, words = argv[1], argv[2:]
    if words[0] in LAUNCHERS if program == "-m" else "kvdist_launch" in text_of(program):
        fork_for_this_process()
    first = os.path.dirname(os.path.abspath(program)) if program.endswith(".py") else ""
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv[:] = [program, *words] if program.endswith(".py") else [program, *words[1:]]
    run(program, words)


def show(env: dict[str, str]) -> None:
    """Write variables to where /proc shows those of a process."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENV_START : ENV_START + 2])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    assert len(text) <= end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def fork_for_this_process() -> None:
    """Let this process start others by forking what it is now."""
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        link.close()
        serve(theirs.detach())
    theirs.close()
    Forked.links, subprocess.Popen = (link, link), Forked  # type: ignore[misc]


def run(program: str, words: list[str]) -> NoReturn:
    """Run a program and end, as ``python`` does."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # before what libraries have registered, which takes 0.15 s with torch
    main = sys.modules["__main__"] = type(sys)("__main__")
    if program == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        main.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec", dont_inherit=True), vars(main))
    raise SystemExit  # and no call of `sys.exit`, which programs may have replaced
