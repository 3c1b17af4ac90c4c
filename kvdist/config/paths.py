"""Paths of files and folders as users write them, in calls, settings and options: `expanded` resolves all of them."""

from __future__ import annotations

import os
import re

from kvdist.errors import ConfigError

_NAME = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
"""Reference to a variable as `os.path.expandvars` recognises it."""


def expanded(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path with ``~``, ``~user`` and ``$NAME`` replaced, as by a shell; a relative path stays relative.

    Callers create missing folders, so without the replacement a folder named ``~`` would be created.

    Raises:
        ConfigError: the variable is not set, or the home directory does not exist.
    """
    given = os.fsdecode(path)
    found = os.path.expandvars(given)
    unset = _NAME.search(found)
    if unset is not None:
        raise ConfigError(
            f"the path {given[:80]!r} contains {unset[0][:80]!r}, but no environment variable of that name is set: set"
            " it, or write the full path"
        )
    found = os.path.expanduser(found)
    if found.startswith("~"):
        raise ConfigError(
            f"the path {given[:80]!r} begins with {found.partition('/')[0][:80]!r}, but this machine has no home"
            f" directory of that name: write the full path, or {'./' + given[:80]!r} for a path of that name"
        )
    return found
