"""Seats, processes and endings as plain values of JSON, and back: what frames are filled with.

Values of the environment and arguments may hold any bytes but NUL. Python shows bytes that are no UTF-8 as lone
surrogates, which JSON carries as escapes, so they arrive as they were.
"""

from __future__ import annotations

from typing import Any

from kvdist.nodes import NodeId, Role
from kvdist_launch.ending import Ending
from kvdist_launch.environment import Environment
from kvdist_launch.plan import Process


def from_node(node: NodeId) -> list[Any]:
    """A seat."""
    return [str(node.role), node.rank]


def to_node(words: list[Any]) -> NodeId:
    """What `from_node` made."""
    role, rank = words
    return NodeId(Role(role), int(rank))


def from_process(process: Process) -> dict[str, Any]:
    """What is to be started."""
    environment = process.environment
    return {
        "node": from_node(process.node),
        "argv": list(process.argv),
        "defaults": dict(environment.defaults),
        "front": dict(environment.front),
        "settings": dict(environment.settings),
        "cwd": process.cwd,
        "is_told": process.is_told_of_endings,
        "is_root": process.is_root,
    }


def to_process(fields: dict[str, Any], host: int = 0) -> Process:
    """What `from_process` made."""
    return Process(
        node=to_node(fields["node"]),
        host=host,
        argv=tuple(fields["argv"]),
        environment=Environment(fields["defaults"], fields["front"], fields["settings"]),
        cwd=fields["cwd"],
        is_told_of_endings=bool(fields["is_told"]),
        is_root=bool(fields["is_root"]),
    )


def from_ending(ending: Ending) -> dict[str, Any]:
    """How a process ended."""
    return {"node": from_node(ending.node), "pid": ending.pid, "status": ending.status}


def to_ending(fields: dict[str, Any], host: str) -> Ending:
    """What `from_ending` made, on the host of that name."""
    return Ending(to_node(fields["node"]), int(fields["pid"]), int(fields["status"]), host=host)
