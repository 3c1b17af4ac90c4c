"""What ``--dry-run`` prints: each process with its host, its folder, changes to its environment, and its argv.

Nothing in it can steer a terminal, and values that look secret are hidden.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from kvdist_launch.environment import redacted
from kvdist_launch.hosts import Host
from kvdist_launch.placement import LAUNCHER
from kvdist_launch.plan import Process


def preview(processes: Sequence[Process], hosts: Sequence[Host]) -> str:
    """The plan for people.

    Variables marked ``default`` apply where the host sets none, those marked ``front`` go before what it has, and
    those marked ``set`` win.
    """
    return "\n".join(_shown(process, hosts) for process in processes)


def _shown(process: Process, hosts: Sequence[Host]) -> str:
    layers = process.environment
    lines = [f"{process.node} on {_where(process, hosts)}"]
    for label, variables in (("default", layers.defaults), ("front", layers.front), ("set", layers.settings)):
        lines += [f"  {label:7} {text}" for text in _assignments(redacted(variables))]
    lines.append(f"  run     {' '.join(quoted(word) for word in process.argv)}")
    return "".join(line + "\n" for line in lines)


def _where(process: Process, hosts: Sequence[Host]) -> str:
    name = "the launching machine" if process.host == LAUNCHER else str(hosts[process.host])
    return name if process.cwd is None else f"{name} in {quoted(process.cwd)}"


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={quoted(value)}" for name, value in sorted(variables.items())]


def quoted(text: str) -> str:
    """A word for a shell; control characters are written as bash and zsh do, ``$'\\n'``."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(escaped(letter, ESCAPES) for letter in text)}'"


def escaped(letter: str, escapes: Mapping[str, str]) -> str:
    """A letter as quoted text has it: as `escapes` says, as it is if it can be seen, else its bytes in hexadecimal."""
    if letter in escapes:
        return escapes[letter]
    if letter.isprintable():
        return letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))


ESCAPES = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
