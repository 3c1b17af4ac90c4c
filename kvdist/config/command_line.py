"""What the command lines of kvdist and of its launcher share: a parser, and how a program ends that cannot go on."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvdist.config.suggestions import did_you_mean

USAGE_ERROR = 2
"""The exit code of a program whose command line is wrong; argparse has the same."""


def end_with(reason: object, code: int, program: str = "kvdist") -> int:
    """Print on standard error why a program ends, in a single line. Returns `code`, the exit code."""
    sys.stderr.write(f"{program}: {reason}\n")
    sys.stderr.flush()
    return code


class Parser(argparse.ArgumentParser):
    """A parser that refuses an unknown option in a single line, with the options that are spelled like it.

    Args:
        kwargs: as for `argparse.ArgumentParser`.
        instead: options that this program does not have, such as those of MXNet's launcher → what to write instead.
    """

    def __init__(self, *, instead: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._instead = instead or {}

    def parse_args(self, words: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """The values of all arguments.

        Raises:
            SystemExit: argparse answered (``--help``, ``--version``) or refused the words.
        """
        unknown = self._unknown(words)
        if unknown:
            advice = self._instead.get(unknown) or did_you_mean(unknown, self._candidates()) or "--help lists all"
            self.exit(end_with(f"error: unknown option {unknown}; {advice}", USAGE_ERROR, self.prog))
        return super().parse_args(words, namespace)

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The options among the words of a command line, and the command of the user that follows them.

        The first word that is not an option begins the command, whose words may look like options of this program.
        argparse cannot promise that, so the command is cut off before. A ``--`` before the command is dropped.
        """
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
            action = self._option_string_actions.get(words[index])
            index += 1 if action is None or action.nargs == 0 else 2
        return list(words[:index]), list(words[index + (words[index : index + 1] == ["--"]) :])

    def _unknown(self, words: Sequence[str]) -> str:
        """The first word that looks like an option and is none; '' if all options are known."""
        known, is_value = self._option_string_actions, False
        for word in words:
            name, is_joined, _ = word.partition("=")
            if is_value:
                is_value = False
            elif word == "--":
                break
            elif name in known:
                is_value = known[name].nargs != 0 and not is_joined
            elif re.match(r"-[^\d.]", word) and (word[:2] not in known or not _accepts(known[word[:2]], word[2:])):
                return name
        return ""

    def _candidates(self) -> dict[str, str]:
        """Option, or word that stands in an option's value → how it is written with its value."""
        found: dict[str, str] = {}
        for name, action in self._option_string_actions.items():
            if action.help != argparse.SUPPRESS:
                found[name] = f"{name} {action.metavar or ''}".strip()
        for action in self._actions:
            # `--abort` for `--on-worker-exit abort|restart:N`, `--workers` for `-n WORKERS`.
            for value in re.findall(r"\b[a-z]{3,}\b|\b[A-Z]+S\b", str(action.metavar or "")):
                found.setdefault(f"--{value.lower()}", found.get(next(iter(action.option_strings), ""), ""))
        return found


def _accepts(action: argparse.Action, text: str) -> bool:
    """Whether an option takes what is written behind its letter, as in ``-n4``."""
    try:
        return action.nargs != 0 and (not callable(action.type) or action.type(text) is not None)
    except (ValueError, argparse.ArgumentTypeError):
        return False
