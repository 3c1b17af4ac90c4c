"""Paths of files and folders as users write them, in calls, settings and options: all of them pass `expanded`."""

from __future__ import annotations

import os

from kvdist.errors import ConfigError


def expanded(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path with ``~``, ``~user`` and ``$NAME`` replaced, as a shell does it; a relative one stays relative.

    Folders are made on the way, so a path that is taken as it stands would make a folder of that name.

    Raises:
        ConfigError: it begins with one that stands for nothing here.
    """
    given = os.fsdecode(path)
    found = os.path.expanduser(os.path.expandvars(given))
    if found.startswith(("~", "$")):
        raise ConfigError(
            f"the path {given[:80]!r} begins with {found.partition('/')[0][:80]!r}, which stands for no folder here:"
            f" name the folder in full, or write {'./' + given[:80]!r} if it is called so"
        )
    return found
