"""Which process sits on which host, as MXNet places them: in turn over the hosts, servers first.

The i-th of servers and workers together goes to host i modulo the number of hosts; a host that does not take that
role, or whose slots are all taken, is passed over. Then ranks are given anew in the order of the hosts, so that
worker 0 sits on the first host that has workers, and the workers of one host have consecutive ranks.

Where hosts are to be filled, as Horovod does it, the workers take all slots of a host before those of the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist_launch.hosts import Host

LAUNCHER = -1
"""The place of the launching machine among hosts, where it need not be one of them."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one process sits.

    Attributes:
        host: an index into the job's hosts, or `LAUNCHER`.
        local_rank: counts the processes of this role on this host.
    """

    node: NodeId
    host: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Where a worker stands among those around it.

    Attributes:
        local_size: the workers of its host.
        cross_rank: its host's place among the hosts that have a worker of its local rank.
        cross_size: how many of these there are.
    """

    local_size: int
    cross_rank: int
    cross_size: int


def place(
    hosts: Sequence[Host],
    num_workers: int,
    num_servers: int,
    scheduler_host: int | None = None,
    is_filled: bool = False,
) -> list[Seat]:
    """The seats of a job in starting order: the scheduler, servers, workers. A job without servers has workers alone.

    Args:
        scheduler_host: an index into `hosts`; None is the launching machine.
        is_filled: whether workers take all slots of a host before those of the next.

    Raises:
        ConfigError: some processes have no place; the message names the sums.
    """
    counts: dict[Role, list[int]] = {Role.SERVER: [0] * len(hosts), Role.WORKER: [0] * len(hosts)}
    turn = 0
    for role, number in ((Role.SERVER, num_servers), (Role.WORKER, num_workers)):
        _require_room(hosts, role, number)
        for _ in range(number):
            while not _has_room(hosts[turn % len(hosts)], role, counts[role][turn % len(hosts)]):
                turn += 1
            counts[role][turn % len(hosts)] += 1
            turn += 0 if is_filled and role is Role.WORKER else 1
    seats = [Seat(SCHEDULER, LAUNCHER if scheduler_host is None else scheduler_host, 0)] if num_servers else []
    for role, filled in counts.items():
        places = [(index, local) for index, count in enumerate(filled) for local in range(count)]
        seats += [Seat(NodeId(role, rank), index, local) for rank, (index, local) in enumerate(places)]
    return seats


def neighbours(seats: Sequence[Seat]) -> Mapping[NodeId, Neighbours]:
    """How each worker stands among the others."""
    workers = [seat for seat in seats if seat.node.role is Role.WORKER]
    sizes = Counter(seat.host for seat in workers)
    across: dict[int, list[int]] = {}
    for seat in workers:
        across.setdefault(seat.local_rank, []).append(seat.host)
    return {
        seat.node: Neighbours(sizes[seat.host], across[seat.local_rank].index(seat.host), len(across[seat.local_rank]))
        for seat in workers
    }


def workers_of_slots(hosts: Sequence[Host]) -> int:
    """The number of workers when nobody says it: the sum of all slots.

    Raises:
        ConfigError: a host that takes workers does not say how many.
    """
    silent = [str(host) for host in hosts if host.takes(Role.WORKER) and host.slots is None]
    if silent:
        raise ConfigError(
            f"the number of workers is missing: write -n WORKERS, or slots= for every host"
            f" ({_some(silent)} {'has' if len(silent) == 1 else 'have'} none)"
        )
    number = sum(host.slots or 0 for host in hosts if host.takes(Role.WORKER))
    if not number:
        raise ConfigError("no host takes workers: every one has role=server; add a host, or change a role")
    return number


def _has_room(host: Host, role: Role, taken: int) -> bool:
    return host.takes(role) and (role is not Role.WORKER or host.slots is None or taken < host.slots)


def _require_room(hosts: Sequence[Host], role: Role, number: int) -> None:
    willing = [host for host in hosts if host.takes(role)]
    if number and not willing:
        other = Role.SERVER if role is Role.WORKER else Role.WORKER
        raise ConfigError(
            f"no host takes {role}s: every one has role={other}; add a host, or change a role to role=any"
        )
    slots = [host.slots for host in willing if host.slots is not None]
    if role is Role.WORKER and len(slots) == len(willing) and sum(slots) < number:
        sums = _some([f"{host}: {host.slots}" for host in willing])
        raise ConfigError(
            f"-n asks for {number} workers, but the hosts have {sum(slots)} slots ({sums}); add slots or hosts, or ask"
            f" for -n {sum(slots)}"
        )


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
