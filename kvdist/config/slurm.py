"""Slurm's short ways to write long lists, read: of hosts, as in ``gpu[01-03,7]``, and of tasks, as in ``2(x3),1``."""

from __future__ import annotations

import itertools
import re

from kvdist.errors import ConfigError

ENTRIES_MAX = 65_536
"""A list is a few characters long and stands for any number of entries; more than these are a mistake."""


def hosts_of(nodes: str) -> list[str]:
    """The hosts of a list like ``login,gpu[01-03,7],r[1-2]n[1-2]``, in its order.

    Raises:
        ConfigError: it is no such list.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if ",".join(parts) != nodes:
        raise ConfigError(f"{_shown(nodes)} is no list of Slurm's hosts, such as gpu[01-03,7]")
    hosts: list[str] = []
    for part in parts:
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_numbers(piece, nodes) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        for words in itertools.product(*choices):
            hosts.append("".join(words))
            if len(hosts) > ENTRIES_MAX:
                raise ConfigError(f"{_shown(nodes)} names more than {ENTRIES_MAX} hosts")
    return hosts


def tasks_of(counts: str) -> list[int]:
    """The numbers of tasks of the nodes in a list like ``2(x3),1``, in its order.

    Raises:
        ConfigError: it is no such list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None or len(found) + int(match.group(2) or 1) > ENTRIES_MAX:
            raise ConfigError(f"{_shown(counts)} is no list of Slurm's numbers of tasks, such as 2(x3),1")
        found += [int(match.group(1))] * int(match.group(2) or 1)
    return found


def _numbers(ranges: str, nodes: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", one)
        if match is None:
            raise ConfigError(f"{_shown(nodes)} is no list of Slurm's hosts, such as gpu[01-03,7]")
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < ENTRIES_MAX:
            raise ConfigError(f"{_shown(nodes)} has the range {one}, which runs backwards or is too long")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _shown(text: str, most: int = 80) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")
