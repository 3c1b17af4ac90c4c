"""The job's secret on one host: a file that only its user can read, for as long as the job runs.

The launcher draws it, agents hear it on their standard input, processes find its path in ``KVDIST_SECRET_FILE``. It
stands in no argument, in no variable and in no log.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

SECRET_BYTES = 32
VARIABLE = "KVDIST_SECRET_FILE"


def draw() -> str:
    """A new secret, in hexadecimal digits."""
    return os.urandom(SECRET_BYTES).hex()


def draw_for_one_machine(environ: Mapping[str, str]) -> str | None:
    """A new secret for who asks for encryption; None for others, as nothing leaves the machine."""
    return draw() if environ.get("KVDIST_SECURITY", "").lower() == "curve" else None


class SecretFile:
    """The file. Made when this is, in a folder of its own that nobody else can enter.

    Args:
        secret: what stands in it.
    """

    def __init__(self, secret: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvdist-secret-", dir=_private_place()))
        self.path = self._folder / "secret"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secret + "\n")

    @property
    def folder(self) -> str:
        """What is to be removed when the job is over."""
        return str(self._folder)

    def remove(self) -> None:
        """The job is over."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_place() -> str | None:
    """Where nothing reaches a disk, if there is such a place."""
    for place in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):
        if place and os.access(place, os.W_OK | os.X_OK):
            return place
    return None
