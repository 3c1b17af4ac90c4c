"""``kvdist config``: what each setting means, its default, its value in this process, and what has set it."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from pathlib import Path

from kvdist.config.command_line import USAGE_ERROR
from kvdist.config.environment import is_launched, read_setting, source_of, unknown_variables
from kvdist.config.foreign import FOREIGN_NAMES, without_effect
from kvdist.config.paths import expanded
from kvdist.config.settings import SETTINGS, TABLE, Setting, Variables, shown_default, with_tables
from kvdist.config.suggestions import did_you_mean
from kvdist.errors import ConfigError
from kvdist.version import __version__

WIDTH_MIN, WIDTH_MAX = 40, 160
"""Of a line, in characters: that of the terminal, within these bounds."""

NO_VALUE, DEFAULT, NOT_SET = "-", "default", "not set"

BY_NAME = {name: row for row in SETTINGS.values() for name in (*row.aliases, row.variable)}
"""Every variable that sets something → what it sets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist config``, and as `command` what answers."""
    about = "show this setting alone, by its variable, such as KVDIST_ON_LOSS, or its alias, such as DMLC_ROLE"
    parser.add_argument("name", metavar="NAME", nargs="?", help=about)
    parser.add_argument("--update", metavar="FILE", help="print nothing, but write the tables into the document FILE")
    parser.set_defaults(command=_answer)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    if options.update is not None:
        document = Path(expanded(options.update))
        document.write_text(with_tables(document.read_text("utf-8")), "utf-8")
        return f"{document}: its tables are those of kvdist {__version__}", 0
    width = min(max(WIDTH_MIN, shutil.get_terminal_size().columns), WIDTH_MAX)
    return all_settings(width) if options.name is None else one_setting(options.name, width)


def all_settings(width: int, environ: Variables | None = None) -> tuple[str, int]:
    """Every setting with its value, what has set it, and a sentence; and 2 if a value is not valid, else 0.

    Args:
        width: the characters of a line.
        environ: the variables; None takes those of this process.
    """
    column = max(map(len, SETTINGS)) + 2
    lines, code = [], 0
    for section, rows in TABLE.items():
        lines += ["", section, ""]
        for row in rows:
            value, source, problem = _present(row, environ)
            lines += _wrapped(f"{value} ({_origin(row, source)})", width, f"{row.variable:<{column}}")
            aliases = f" (alias {', '.join(row.aliases)})" if row.aliases else ""
            lines += _wrapped(f"{_plain(row.sentence)}{aliases}", width)
            if problem:
                lines += _wrapped(f"NOT VALID: {problem}", width)
                code = USAGE_ERROR
    unknown = unknown_variables(environ)
    for number, sentence in enumerate(unknown):
        lines += [] if number else ["", "Without effect", ""]
        lines += _wrapped(sentence, width)
    return "\n".join(lines[1:]), code


def one_setting(name: str, width: int, environ: Variables | None = None) -> tuple[str, int]:
    """One setting with its details; and 2 if its value is not valid, else 0.

    Args:
        name: the variable that sets it, or an alias, in upper or lower case.
        width: the characters of a line.
        environ: the variables; None takes those of this process.

    Raises:
        ConfigError: no setting has this name.
    """
    row = BY_NAME.get(name.upper())
    if row is None:
        if name.upper() in FOREIGN_NAMES:
            return without_effect([name.upper()])[0], 0
        advice = did_you_mean(name, list(BY_NAME)) or "kvdist config lists all"
        raise ConfigError(f"there is no setting {name}; {advice}")
    value, source, problem = _present(row, environ)
    meaning = _plain(f"{row.sentence}. {row.details}" if row.details else row.sentence)
    facts = {
        "value": value,
        "from": source,
        "default": _plain(shown_default(row)),
        "expected": row.kind.expected,
        "aliases": ", ".join(row.aliases),
        "NOT VALID": problem,
    }
    column = max(map(len, facts)) + 2
    lines = [row.variable, *_wrapped(meaning, width), ""]
    for title, text in facts.items():
        if text:
            lines += _wrapped(text, width, f"    {title:<{column}}")
    return "\n".join(lines), USAGE_ERROR if problem else 0


def _present(row: Setting, environ: Variables | None) -> tuple[str, str, str]:
    """The value as text, what has set it, and why it is not valid ('' if it is)."""
    setter = "launcher" if is_launched(environ) else "environment"
    try:
        value, variable = read_setting(row.variable, environ), source_of(row.variable, environ)
    except ConfigError as error:
        return NO_VALUE, setter, str(error)
    text = NO_VALUE if value in (None, "", ()) else row.kind.text(value)
    if not variable:
        return text, DEFAULT if shown_default(row) else NOT_SET, ""
    return text, setter if variable == row.variable else f"{setter}, alias {variable}", ""


def _origin(row: Setting, source: str) -> str:
    """The source of a value, with the default of the setting where it differs."""
    default = _plain(shown_default(row))
    if source == DEFAULT:
        return f"{DEFAULT}: {default}" if row.shown_default else DEFAULT
    return f"{source}; default {default}" if default and source != NOT_SET else source


def _wrapped(text: str, width: int, first: str = "    ") -> list[str]:
    """The lines of a text, indented by `first`, or as far as `first` is long."""
    wrapper = textwrap.TextWrapper(width, first, " " * len(first), break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _plain(markdown: str) -> str:
    """The text without the signs of code; a link is its text and, unless that names it, the page of docs/."""

    def shown(link: re.Match[str]) -> str:
        text, page, place = link.groups()
        return text if text == page else f"{text} (docs/{page or 'configuration.md'}{place or ''})"

    return re.sub(r"\[([^\]]+)\]\(([\w/.-]*)(#[\w-]+)?\)", shown, markdown).replace("`", "")
