"""Roles, names and incarnations of processes.

A `NodeId` names a place in the cluster ("worker-3"). A `Member` is a process in that place: a restarted worker-3 is the
same node and another member. Messages go to members, never to nodes, so no message meant for a dead process can reach
its replacement.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """The part that a process plays. Values are the words of the environment variable ``DMLC_ROLE``."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"

    # Members are looked up by their names for every message; identity is enough, as a role is made once.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


UNRANKED = 0xFFFFFFFF
"""The rank of a process before the scheduler has assigned one."""


@dataclass(frozen=True, slots=True, order=False)
class NodeId:
    """A place in the cluster: a role and a rank counted from 0 within the role."""

    role: Role
    rank: int

    def __str__(self) -> str:
        if self.role is Role.SCHEDULER:
            return "scheduler"
        return f"{self.role}-{'?' if self.rank == UNRANKED else self.rank}"


@dataclass(frozen=True, slots=True)
class Member:
    """A process in a place of the cluster.

    `incarnation` is assigned by the scheduler at registration and strictly increases; before that it is the random
    token with which the process introduced itself (then `node.rank` is `UNRANKED`).
    """

    node: NodeId
    incarnation: int

    def __str__(self) -> str:
        return str(self.node)


HOST_MARK = ";shm="
"""Separates an endpoint from its host mark: a token shared by processes that can read each other's memory, a dot, and
the process."""


def host_of(endpoint: str) -> str:
    """The host in the host mark of an endpoint; '' without a mark. Processes whose hosts are equal can share memory."""
    _, mark, host = endpoint.rpartition(HOST_MARK)
    return host.partition(".")[0] if mark else ""


SCHEDULER = NodeId(Role.SCHEDULER, 0)


def worker(rank: int) -> NodeId:
    """The node of the worker with that rank."""
    return NodeId(Role.WORKER, rank)


def server(rank: int) -> NodeId:
    """The node of the server with that rank."""
    return NodeId(Role.SERVER, rank)
