"""A disk that fails, or a process that dies, at the n-th call of the system that a checkpoint makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvdist.checkpoint import files

CALLS = ("fsync", "replace", "open", "mkdir", "unlink", "rmdir", "listdir", "scandir")
OTHER_PID = 999_999_937


class Killed(BaseException):
    """The process is gone: nothing that it would have done afterwards happens."""


class Faults:
    """Counts the calls, and lets one fail.

    Args:
        at: which call fails, from 0; None for none.
        fault: gives what it raises.
        lasting: whether every later call fails too.
        only: the names of calls that are counted; all if it is empty.
    """

    def __init__(
        self, at: int | None, fault: Callable[[], BaseException], lasting: bool = False, only: tuple[str, ...] = ()
    ) -> None:
        self.at, self.fault, self.lasting, self.only = at, fault, lasting, only
        self.calls: list[str] = []

    def count(self, name: str) -> None:
        if self.only and name not in self.only:
            return
        self.calls.append(name)
        number = len(self.calls) - 1
        if self.at is not None and (number == self.at or (self.lasting and number > self.at)):
            raise self.fault()


class CountedFile:
    """A file of which each write is a call."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, chunk: Any) -> int:
        half = len(chunk) // 2
        written = self._file.write(chunk[:half]) if half else 0
        self._faults.count("write")
        return written + self._file.write(chunk[half:])

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # the system closes the files of the dead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(faults: Faults, monkeypatch: Any) -> Iterator[None]:
    """Within it calls are counted, and fail."""

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            faults.count(name)
            return real(*arguments, **options)

        return call

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        faults.count("open")
        file = open(path, mode, *arguments, **options)  # noqa: SIM115  # whoever opens it closes it
        return CountedFile(file, faults) if "x" in mode else file

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, counted(name, getattr(os, name)))
        patched.setattr(os, "getpid", lambda: OTHER_PID)
        patched.setattr(files, "open", opened, raising=False)
        yield
