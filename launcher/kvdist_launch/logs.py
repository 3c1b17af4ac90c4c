"""One file per process with all it prints: ``worker-0.log``, ``server-1.log``, ``scheduler.log``.

Both outputs are in it in the order in which they came, line by line and without prefixes. A file of an earlier job is
kept as ``worker-0.log.1``; what that replaces is gone. A disk that fills up ends the logs, not the job.

`RankFolders` is Horovod's way: a folder for each worker, with a file for each output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kvdist.errors import ConfigError
from kvdist.nodes import NodeId, Role


class Logs:
    """The log files of one job.

    Args:
        folder: where they lie; it is made if need be.
        say: tells the user.
    """

    _option = "--log-dir"

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._descriptors: dict[Path, int] = {}
        self._has_ended = False

    def open(self, nodes: Iterable[NodeId]) -> None:
        """Make the files; those that this job has already are gone on with.

        Raises:
            ConfigError: one cannot be made.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in (path for node in nodes for path in self._paths(node)):
                if path in self._descriptors or self._has_ended:
                    continue
                if path.exists():
                    path.replace(f"{path}.1")
                path.parent.mkdir(exist_ok=True)
                self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"log files cannot be written to {self._folder}: {error.filename or self._folder}: {error.strerror};"
                f" give {self._option} a folder that can be written to"
            ) from error

    def write(self, node: NodeId, stream: int, lines: Iterable[bytes]) -> None:
        """Add lines of one output of a process to its file, if that still takes them."""
        path = dict(enumerate(self._paths(node))).get(stream, self._folder)
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            return
        # A line of a progress bar is a line here: nothing can be overwritten in a file.
        data = memoryview(b"".join(line[:-1] + b"\n" for line in lines))
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            # Whatever is wrong with one file is likely to be wrong with all, and one sentence is enough.
            self._say(f"{path}: {error.strerror}; the log files end here, the job goes on")
            self.close()

    def close(self) -> None:
        """Write no more."""
        self._has_ended = True
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _paths(self, node: NodeId) -> tuple[Path, ...]:
        """The files for the outputs of a process; none where they are not kept."""
        path = self._folder / f"{node}.log"
        return path, path


class RankFolders(Logs):
    """``rank.0/stdout``, ``rank.0/stderr`` and so on; ranks have as many digits as the largest one.

    Args:
        folder: where these folders lie; it is made if need be.
        say: tells the user.
        size: how many workers there are.
    """

    _option = "--output-filename"

    def __init__(self, folder: Path, say: Callable[[str], None], size: int) -> None:
        super().__init__(folder, say)
        self._digits = len(str(size - 1))

    def _paths(self, node: NodeId) -> tuple[Path, ...]:
        if node.role is not Role.WORKER:
            return ()
        folder = self._folder / f"rank.{node.rank:0{self._digits}d}"
        return folder / "stdout", folder / "stderr"
