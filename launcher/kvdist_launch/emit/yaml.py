"""Writes YAML: mappings and lists in blocks, and every text in double quotes, so that none can mean anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdist.errors import ConfigError

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]

WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""What a reader of YAML 1.1 takes for something else than a text where it is not quoted."""

ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def document(value: Mapping[str, Value]) -> str:
    """The lines of one document.

    Raises:
        ConfigError: a text has bytes that are no UTF-8, which YAML cannot hold.
    """
    return "\n".join(_mapping(value, "")) + "\n"


def _mapping(value: Mapping[str, Value], indent: str) -> list[str]:
    lines: list[str] = []
    for key, each in value.items():
        is_plain = key.isascii() and key.isidentifier() and key.lower() not in WORDS
        name = key if is_plain else _quoted(key)
        lines += _under(f"{indent}{name}:", each, indent + "  ")
    return lines


def _under(head: str, value: Value, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        return [head, *_mapping(value, indent)] if value else [f"{head} {{}}"]
    if isinstance(value, str | int):
        return [f"{head} {_scalar(value)}"]
    return [head, *(line for each in value for line in _item(each, indent))] if value else [f"{head} []"]


def _item(value: Value, indent: str) -> list[str]:
    if isinstance(value, Mapping) and value:
        first, *rest = _mapping(value, indent + "  ")
        return [f"{indent}- {first.lstrip(' ')}", *rest]
    return _under(f"{indent}-", value, indent + "  ")


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quoted(value)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable():
        return letter
    if 0xD800 <= ord(letter) <= 0xDFFF:
        raise ConfigError("a word or a variable of the job has bytes that are no UTF-8; YAML cannot hold them")
    return f"\\U{ord(letter):08x}"
