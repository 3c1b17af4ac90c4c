"""Signatures for the reference, which reads the source: ``@arguments_of(make)`` gives a function those of ``make``."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENTS_OF = re.compile(r"arguments_of\((\w+)\)")


class Signatures(griffe.Extension):
    """Gives decorated functions the parameters that they have when they run."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the parameters of a function with that decorator."""
        for decorator in func.decorators:
            match = ARGUMENTS_OF.fullmatch(str(decorator.value))
            if match is not None and func.parent is not None:
                func.parameters = func.parent.members[match[1]].parameters
