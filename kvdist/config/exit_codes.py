"""End of a process: its exit code, and the frames of kvdist in the traceback of an uncaught exception.

The code lets a supervisor (the launcher, Slurm, systemd) distinguish a lost peer from a bug.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from kvdist.config.environment import read_setting
from kvdist.errors import FencedError, JobOver, KvdistError, PeerLostError

EXIT_PEER_LOST = 75
"""Exit code of a process that ended because a peer was lost: EX_TEMPFAIL of sysexits.h, by which a retry may help."""

EXIT_CONFIG = 2
"""Exit code for an error in the environment or the command line."""


FRAMES_OF_OURS_MAX = 3
"""Number of frames of kvdist in a traceback; a single frame for a `KvdistError`, whose text suffices."""
INNER_MODULES = ("concurrent", "contextlib", "torch")
"""Modules whose frames count as frames of kvdist below a call by kvdist."""


LINGER_S = 10.0
"""Time for which threads may keep a process from ending before it prints a warning."""
LINGERS = f"kvdist: the main thread ended {LINGER_S:g} s ago, and the process waits for "
"""Beginning of that warning, which the launcher recognises."""


def shorten_tracebacks() -> _Hook:
    """Install a `sys.excepthook` that omits most frames of kvdist, and ends the process with 0 by a `JobOver`.

    All frames are shown with ``python -X dev`` and in an interactive interpreter, whose debugger may need them later.
    Returns the hook.
    """
    hook = sys.excepthook
    if not isinstance(hook, _Hook):
        hook = sys.excepthook = _Hook(hook)
    return hook


def exit_with_peer_lost() -> None:
    """Let an uncaught `PeerLostError` end the process with `EXIT_PEER_LOST` from now on, as a peer is lost.

    So does a `FencedError`, as the other processes have lost this process.

    If a launcher started this process, the error is shown in a single line, without a traceback: every process has it,
    and only the reason of the loss matters. The hook of kvdist becomes the outermost hook again, because a hook
    installed over it would not expect it to raise `SystemExit`. An interactive interpreter does not end. Nor does an
    exception of a thread end a process, as usual in Python.
    """
    hook = shorten_tracebacks()
    hook.ends, hook.is_launched = True, read_setting("KVDIST_LOCAL_RANK") is not None


class _Hook:
    """A `sys.excepthook` around the hook of Python, the program or another library, which prints the exception.

    Attributes:
        ends: whether an uncaught `PeerLostError` or `FencedError` ends the process.
        is_launched: whether a launcher started this process among others.
    """

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook = hook
        self.ends = False
        self.is_launched = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interactive = hasattr(sys, "ps1") or bool(sys.flags.inspect)
        if isinstance(error, JobOver) and not is_interactive:
            sys.stderr.write(f"kvdist: {error}\n")
            raise SystemExit(0)
        ends = self.ends and isinstance(error, PeerLostError | FencedError) and not is_interactive
        if not (is_interactive or sys.flags.dev_mode):
            for one in _chain(error):
                _cut(one.__traceback__, 1 if isinstance(one, KvdistError) else FRAMES_OF_OURS_MAX)
            if ends and self.is_launched:
                trace = error.__traceback__ = None
        self._hook(kind, error, trace)
        if ends:
            raise SystemExit(EXIT_PEER_LOST)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _cut(trace: TracebackType | None, frames_max: int) -> None:
    """Remove all but the first `frames_max` frames of kvdist from a traceback, as the rest does not help its reader."""
    is_ours, ours, shown = False, 0, trace
    while trace is not None and shown is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        is_ours = package == "kvdist" or (is_ours and package in INNER_MODULES)
        ours += is_ours
        if is_ours and ours > frames_max:
            shown.tb_next = trace.tb_next
        else:
            shown = trace
        trace = trace.tb_next


def tell_what_lingers() -> None:
    """After the process has left its job, warn if threads keep it from ending while a launcher waits for its end."""
    name = "kvdist-end"
    if read_setting("KVDIST_LOCAL_RANK") is not None and all(one.name != name for one in threading.enumerate()):
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and takes no thread any more
            threading.Thread(target=_tell_what_lingers, name=name, daemon=True).start()


def _tell_what_lingers() -> None:
    while not _is_ending():
        time.sleep(1.0)
    time.sleep(LINGER_S)
    names = [one.name for one in threading.enumerate() if not (one.daemon or one is threading.main_thread())]
    if names and _is_ending():  # else it has gone on, with handlers of atexit
        text = f"{LINGERS}{', '.join(names)}; end it, join it before the end, or make it a daemon thread\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))  # `sys.stderr` may be another file, or None


def _is_ending() -> bool:
    """Whether the main thread has ended, or only waits for other threads at the interpreter's shutdown."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    is_waiting = frame is not None and frame.f_globals is vars(threading) and frame.f_code.co_name == "_shutdown"
    return is_waiting or not main.is_alive()


class _Exit(SystemExit):
    """Exception of `sys.exit` that records the status with which the interpreter ends, as `atexit` cannot see it.

    The program may catch it and read the status too; but only at the end of the interpreter does no frame call `code`.
    """

    last: Any = None
    """Status with which the interpreter ends; None until it has read the status."""

    @property
    def code(self) -> Any:
        status = _STATUS.__get__(self)
        if sys._getframe().f_back is None:
            _Exit.last = status
        return status

    @code.setter
    def code(self, status: Any) -> None:
        _STATUS.__set__(self, status)


_Exit.__name__, _Exit.__qualname__, _Exit.__module__ = "SystemExit", "SystemExit", "builtins"  # as people read it
_STATUS: Any = SystemExit.__dict__["code"]


def note_exits() -> None:
    """Replace `sys.exit`, so that `end_with` sees the status with which it ends the process."""
    sys.exit = _exit


def _exit(status: Any = None, /) -> NoReturn:
    is_main = threading.current_thread() is threading.main_thread()
    raise (_Exit if is_main else SystemExit)(status)  # another thread ends by the latter alone, in silence


class _End:
    """Object that ends the process when the interpreter deletes it."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def __del__(self, end: Any = os._exit) -> None:  # a default, as the names of this module are gone by then
        end(self._exit_code)


def end_with(exit_code: int) -> None:
    """Replace the exit code of a process that would end with 0; called by a handler of `atexit`.

    An uncaught exception keeps its code, and so does an uncaught `sys.exit`, once `note_exits` was called. The codes of
    ``raise SystemExit(3)`` and of the builtin ``exit(3)``, which Python does not reveal, are replaced. All other
    handlers are called, and files closed: the interpreter clears `sys` last.
    """
    if hasattr(sys, "last_value"):  # an uncaught exception
        return
    status = _Exit.last
    own = status & 0xFF if isinstance(status, int) else int(status is not None)
    setattr(sys, "_kvdist_end", _End(own or exit_code))  # noqa: B010 (types do not know the attribute)
