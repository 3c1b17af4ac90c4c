"""A worker that calls a function; started with the argument OUT by `kvdist_launch.run`.

The call arrives on standard input. OUT is the descriptor of a pipe between both processes, which carries the result or
the exception: a header, which is a line of JSON, then the result's bytes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.errors import PeerLostError
from kvdist_launch.serialization import SerializationError, pack_result, unpack_call


def main(arguments: list[str]) -> int:
    """Receive the call, run it, and send its result. Returns the exit code; exceptions of the function propagate."""
    outward = int(arguments[0])
    os.set_inheritable(outward, False)
    # An exception ends a worker as it ends a script; other hooks (a store has one) still run.
    sys.excepthook = _Reporter(outward)
    sys.path.append("")  # for what the function imports, once all of ours is here
    fn, args, kwargs = unpack_call(sys.stdin.buffer.read())
    try:
        result = pack_result(_call(fn, args, kwargs))
    except SystemExit as error:
        _send(outward, _raised("SystemExit", f"SystemExit: {error.code}\n", _exit_code(error)))
        raise
    _send(outward, {"bytes": len(result)}, result)
    return 0


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


class _Reporter:
    """An excepthook that sends the exception to the launcher, and shows it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        theirs = _below(trace)
        if isinstance(error, SerializationError):
            # Its message says everything; where in cloudpickle it came from does not matter to users.
            error.__cause__ = None
            error.__suppress_context__ = True
            theirs = None
        text = "".join(traceback.format_exception(kind, error, theirs))
        _send(self._descriptor, _raised(_name(kind), text, EXIT_PEER_LOST if isinstance(error, PeerLostError) else 1))
        # Not by Python's own hook, which knows no lines of what is no file.
        sys.stderr.write(text)
        sys.stderr.flush()


def _below(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the user's function on, without outer frames of kvdist."""
    while trace is not None and trace.tb_frame.f_code is not _call.__code__:
        trace = trace.tb_next
    return None if trace is None else trace.tb_next


def _name(kind: type[BaseException]) -> str:
    is_plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"


def _raised(name: str, text: str, exit_code: int) -> dict[str, Any]:
    """The header for an exception; the process will end with this exit code, unless a thread keeps it from ending."""
    return {"raised": name, "text": text, "exit_code": exit_code}


def _exit_code(error: SystemExit) -> int:
    """Exit code of a `SystemExit`, as in Python: 0 for None, and 1 for a text, which is printed."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _send(descriptor: int, head: dict[str, Any], payload: bytes = b"") -> None:
    try:
        for part in (json.dumps(head).encode() + b"\n", payload):
            data = memoryview(part)
            while data:
                data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        return  # The launcher is gone, and its watchdog ends this process in a moment.


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
