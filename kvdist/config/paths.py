"""Paths of files and folders as users write them, in calls, settings and options: all of them pass `expanded`."""

from __future__ import annotations

import os
import re

from kvdist.errors import ConfigError

_NAME = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
"""What `os.path.expandvars` takes for the name of a variable."""


def expanded(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path with ``~``, ``~user`` and ``$NAME`` replaced, as a shell does it; a relative one stays relative.

    Folders are made on the way, so a path that is taken as it stands would make a folder of that name.

    Raises:
        ConfigError: one of them stands for nothing here.
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
