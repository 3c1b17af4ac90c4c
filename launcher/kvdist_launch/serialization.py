"""Functions and results as bytes, between this process and those it starts: the only use of pickles in kvdist.

Reading a pickle can run code. These come only from the process that started this process, or was started by it, over a
pipe that only the two have, or two pipes and the ssh connection between them: never through another socket, a file or
an argument.

cloudpickle sends the code of functions of ``__main__`` and of notebook cells, of lambdas and closures; functions of
modules are looked up by name on the other side, which therefore gets this side's ``sys.path``.
"""

from __future__ import annotations

import inspect
import json
import linecache
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from types import CodeType
from typing import Any, ClassVar

from kvdist.errors import ConfigError


class SerializationError(ConfigError):
    """An object cannot be sent to another process; the message names it."""


def pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_here: bool = True) -> bytes:
    """A call as bytes.

    Args:
        fn: the function.
        args, kwargs: its arguments.
        is_here: whether the receiver runs on this machine and takes over this process's ``sys.path``; on other machines
            the entries are appended to the receiver's, but its current folder goes first where it does here.

    Raises:
        SerializationError: a part of it cannot be sent.
        ConfigError: cloudpickle is not installed.
    """
    dumps = _dumps_with_file_names(_cloudpickle())
    # The current folder may have another path on the receiver's machine, such as that of its copy.
    path = sys.path if is_here else ["" if one == os.getcwd() else one for one in sys.path]
    head = json.dumps({"path": path, "is_here": is_here, "sources": _sources(fn)}).encode() + b"\n"
    try:
        return head + dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # objects choose what they raise when they refuse
        raise SerializationError(
            f"{_culprit(fn, args, kwargs)} cannot be sent to the workers: {_said(error)}"
        ) from error


def _dumps_with_file_names(cloudpickle: Any) -> Callable[[Any], bytes]:
    """cloudpickle's `dumps`, but with the file names of code, which version 3.1.3 drops: source lines need them."""
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, arguments = reduce(code)[:2]
        return _make_code, (make, arguments, code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its class is known where it is installed
        dispatch_table: ClassVar = ChainMap({CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)

    def dumps(value: Any) -> bytes:
        written = BytesIO()
        Pickler(written).dump(value)
        return written.getvalue()

    return dumps


def _make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], file_name: str) -> CodeType:
    return make(*arguments).replace(co_filename=file_name)


def _sources(fn: Callable[..., Any]) -> dict[str, list[str]]:
    """Name → lines of each notebook cell (which has no file) with code of the function or of ``__main__``."""
    values = [fn, *vars(sys.modules["__main__"]).values()]
    values += [one for value in values if isinstance(value, type) for one in vars(value).values()]
    written = [inspect.unwrap(value) for value in values if inspect.isfunction(value) or inspect.ismethod(value)]
    names = sorted({one.__code__.co_filename for one in written if hasattr(one, "__code__")})
    lines = {name: linecache.getlines(name) for name in names if not os.path.exists(name)}
    return {name: some for name, some in lines.items() if some}


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call that `pack_call` packed; extends ``sys.path`` of this process and its cache of source lines to match.

    Raises:
        SerializationError: a part of it cannot be loaded.
    """
    head, _, body = data.partition(b"\n")
    told = json.loads(head)
    theirs = told["path"]
    in_front = [one for one in theirs[:1] if not one]
    for name, lines in told["sources"].items():
        # Without a time of change, so that nobody looks for such a file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    sys.path[:] = theirs if told["is_here"] else dict.fromkeys([*in_front, *sys.path, *theirs])
    try:
        fn, args, kwargs = _cloudpickle().loads(body)
    except Exception as error:  # whatever is imported on the way may raise anything
        raise SerializationError(
            f"the function cannot be loaded in the worker: {_said(error)}. What it needs must be importable there, or"
            " be defined in the notebook or script itself"
        ) from error
    return fn, args, kwargs


def pack_result(value: Any) -> bytes:
    """A result as bytes.

    Raises:
        SerializationError: it cannot be sent.
    """
    try:
        return bytes(_cloudpickle().dumps(value))
    except Exception as error:  # as above
        raise SerializationError(f"its result, {_kind(value)}, cannot be sent back: {_said(error)}") from error


def unpack_result(data: bytes | bytearray) -> Any:
    """The result that `pack_result` packed.

    Raises:
        SerializationError: it cannot be loaded.
    """
    try:
        return _cloudpickle().loads(data)
    except Exception as error:  # as above
        raise SerializationError(f"a result cannot be loaded here: {_said(error)}") from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError(
            "kvdist_launch.run needs cloudpickle to send functions; install it: pip install cloudpickle"
        ) from None
    return cloudpickle


def _culprit(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The part of a call that cannot be pickled, for people."""
    dumps = _cloudpickle().dumps
    for name, value in _parts(fn, args, kwargs):
        try:
            dumps(value)
        except Exception:  # noqa: BLE001 - whether it raises is the question
            return f"{name}, {_kind(value)},"
    return f"the function {getattr(fn, '__qualname__', fn)!s}"


def _parts(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"args[{index}]", value) for index, value in enumerate(args))
    yield from ((f"kwargs[{name!r}]", value) for name, value in kwargs.items())
    if inspect.ismethod(fn):
        yield "the object whose method is to be called", fn.__self__
    if inspect.isfunction(fn):
        used = inspect.getclosurevars(fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            yield f"the variable {name!r} that the function uses", value


def _kind(value: object) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a value of type {name}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
