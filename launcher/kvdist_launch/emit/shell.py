"""Processes as lines of a POSIX shell.

Values stand in the text of a script, never in the argument list of a program, where ``ps`` would show them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from kvdist_launch.environment import OTHER_NAME, OWNED_VARIABLES, Environment

INDENT = "  "


def exports(environment: Environment, besides: Iterable[str] = ()) -> list[str]:
    """The lines that change a shell's environment as `Environment.over` does.

    Args:
        besides: names that other lines export afterwards.
    """
    stale = {*OWNED_VARIABLES, *(OTHER_NAME[name] for name in environment.settings if name in OTHER_NAME)}
    lines = [f"unset {' '.join(sorted(stale - {*environment.settings, *besides}))}"]
    for name, value in sorted(environment.defaults.items()):
        lines.append(f'[ "${{{name}+set}}" ] || export {name}={shlex.quote(value)}')
    for name, value in sorted(environment.front.items()):
        lines.append(f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"')
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.settings.items())]


def command(argv: Sequence[str]) -> str:
    """The line that runs a program."""
    return shlex.join(argv)


def indented(lines: Iterable[str]) -> list[str]:
    """The lines one step further in; a value that has several lines keeps them as they are."""
    return [INDENT + line for line in lines]


def heredoc(lines: Sequence[str], word: str) -> list[str]:
    """What follows ``<<'word'``. `word` must not be a line of its own in the text."""
    if any(word in line.split("\n") for line in lines):
        raise ValueError(f"{word} ends the text early")
    return [*lines, word]
