"""The user's command: from what stands on the command line to an argument list that can be started.

A command is a list of arguments and never passes through a shell, whatever is in it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from kvdist.errors import ConfigError

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""The exit codes with which a shell says the same."""

SHELL_OPERATORS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1"})


class CommandError(ConfigError):
    """The command cannot be started; `exit_code` is what a shell would end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def parse_command(words: Sequence[str], path: str | None, is_here: bool = True) -> tuple[str, ...]:
    """The argument list that `words` stand for: themselves, or if there is one only, the words quoted in it.

    Args:
        words: what stands on the command line.
        path: where programs are searched, as in the variable PATH; None is the system's default.
        is_here: whether it runs on this machine, so that the program must be there.

    Raises:
        CommandError: there is no such program, or it cannot be executed.
        ConfigError: there is no command, its quotes do not match, or it is written for a shell.
    """
    command = list(words)
    if len(command) == 1 and shutil.which(command[0], path=path) is None:
        command = _split(command[0])
    if not command or not command[0]:
        raise ConfigError("there is no command to run; write it last, behind the options, as in: ... python train.py")
    if is_here:
        _require_program(command[0], path)
    return tuple(command)


def _split(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the command {text!r} cannot be split into words: {str(error).lower()}") from error
    operators = [word for word in command if word in SHELL_OPERATORS]
    if operators:
        raise ConfigError(
            f"the command {text!r} needs a shell for {operators[0]!r}, and the launcher uses none;"
            f" to have one, write: sh -c {shlex.quote(text)}"
        )
    return command


def _require_program(program: str, path: str | None) -> None:
    if shutil.which(program, path=path) is not None:
        return
    if os.path.isdir(program):
        raise CommandError(f"{program} is a directory, not a command", NOT_EXECUTABLE)
    if os.path.dirname(program) and os.path.exists(program):
        raise CommandError(
            f"{program} is not executable; make it so (chmod +x {shlex.quote(program)}), or name its interpreter"
            f" (python {shlex.quote(program)})",
            NOT_EXECUTABLE,
        )
    where = "there is no such file" if os.path.dirname(program) else "it is in no directory of PATH"
    raise CommandError(f"the command {program!r} does not exist: {where}", NOT_FOUND)
