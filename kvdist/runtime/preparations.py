"""Functions that are called with each node of this process before it runs: `kvdist/__init__.py` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdist.runtime.node import Node

PREPARATIONS: list[Callable[[Node], None]] = []


def prepare(node: Node) -> None:
    """Call the registered functions with a node that does not run yet."""
    for preparation in PREPARATIONS:
        preparation(node)
