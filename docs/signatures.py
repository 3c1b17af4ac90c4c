"""Signatures and arguments for the reference, which reads the source.

``@arguments_of(make)`` gives a function the signature of ``make``. Arguments that a docstring describes together, as in
``learning_rate, momentum: of the outer optimizer.``, each have that description.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENTS_OF = re.compile(r"arguments_of\((\w+)\)")
TOGETHER = re.compile(r"^ {4}((?:\w+,\s+)+\w+):(.*(?:\n {5,}.*)*)", re.MULTILINE)
"""Several names in an entry of a section; the list may have several lines, and so may the description."""


class Signatures(griffe.Extension):
    """Gives decorated functions the parameters that they have when they run."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a function with that decorator."""
        for decorator in func.decorators:
            match = ARGUMENTS_OF.fullmatch(str(decorator.value))
            if match is not None and func.parent is not None:
                func.parameters = func.parent.members[match[1]].parameters

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Describe arguments one by one."""
        if obj.docstring is not None:
            obj.docstring.value = TOGETHER.sub(_apart, obj.docstring.value)


def _apart(entry: re.Match[str]) -> str:
    return "\n".join(f"    {name}:{entry[2]}" for name in re.split(r",\s+", entry[1]))
