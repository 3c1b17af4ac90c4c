"""Systems that need a Python environment of their own: a script beside this file makes each, once."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

BUILD_TIMEOUT_S = 1800.0


class Absent(Exception):
    """A system cannot run here; the message says why."""


@functools.cache
def python_made_by(script: Path) -> str:
    """The Python of an environment, made on the first call.

    Raises:
        Absent: the script failed.
    """
    try:
        made = subprocess.run([str(script)], stdout=subprocess.PIPE, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"{script.name}: {error}") from error
    if made.returncode:
        raise Absent(f"{script.name} ended with code {made.returncode}; what it said stands above")
    return made.stdout.strip()
