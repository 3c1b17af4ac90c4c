"""What is done with each node of this process before it runs: see `kvdist/__init__.py`, which says what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdist.runtime.node import Node

PREPARATIONS: list[Callable[[Node], None]] = []


def prepare(node: Node) -> None:
    """Do with a node what is to be done before it runs."""
    for preparation in PREPARATIONS:
        preparation(node)
