"""What a synchronous step costs on the network: bytes over every line, and the time of the busiest. Pure arithmetic.

The model, which leaves processors out:

- Every worker pushes every gradient and gets every new value back. Bytes between processes of one host are free.
- A host's line carries both directions at once, and pushes and answers of different keys cross at the same time. A
  step therefore takes at least as long as the busiest direction of the busiest line, and one round trip.
- Workers of one host whose servers are elsewhere sum first and push once, unless their pushes are encoded or halves.
- Keys live where the scheduler puts them: large ones are cut evenly over all servers, small ones go, the largest first,
  to the server that has the least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

BIGARRAY_BOUND = 1_000_000
"""Elements from which on a key is cut over all servers (MXNET_KVSTORE_BIGARRAY_BOUND)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: how many elements it has, and bytes of each."""

    elements: int
    itemsize: int


class Scheme(Enum):
    """How gradients and values travel. Values are for people."""

    WHOLE = "none"
    FP16 = "fp16"
    TWO_BIT = "2bit"
    FP16_BOTH = "fp16, pull fp16"
    TWO_BIT_PULL_FP16 = "2bit, pull fp16"

    def push_bytes(self, elements: int, itemsize: int) -> int:
        """Of a gradient."""
        if self in (Scheme.TWO_BIT, Scheme.TWO_BIT_PULL_FP16):
            return -(-elements // 4)
        return elements * (itemsize if self is Scheme.WHOLE else min(2, itemsize))

    def pull_bytes(self, elements: int, itemsize: int) -> int:
        """Of a value."""
        is_half = self in (Scheme.FP16_BOTH, Scheme.TWO_BIT_PULL_FP16)
        return elements * (min(2, itemsize) if is_half else itemsize)


@dataclass(frozen=True)
class Layout:
    """Where processes are.

    Attributes:
        workers, servers: of each its host, by its place in `names`.
        names: of the hosts.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    names: tuple[str, ...]


def apart(num_workers: int, num_servers: int) -> Layout:
    """Each process on a machine of its own."""
    workers = tuple(range(num_workers))
    servers = tuple(range(num_workers, num_workers + num_servers))
    names = [f"worker {rank}" for rank in workers] + [f"server {rank}" for rank in range(num_servers)]
    return Layout(workers, servers, tuple(names))


@dataclass(frozen=True)
class Cost:
    """What a step costs.

    Attributes:
        push_bytes, pull_bytes: that one worker sends and gets, wherever the servers are.
        server_in_bytes, server_out_bytes: that the busiest server gets and sends, wherever the workers are.
        line_bytes: over the busiest direction of the busiest line; 0 if nothing leaves a host.
        line: that direction, for people.
        ms: at least so long.
    """

    push_bytes: int
    pull_bytes: int
    server_in_bytes: int
    server_out_bytes: int
    line_bytes: int
    line: str
    ms: float


def cost(
    tensors: Sequence[Tensor], layout: Layout, scheme: Scheme, mb_per_s: float, latency_ms: float = 0.0
) -> Cost:
    """What a step costs.

    Args:
        tensors: the parameters.
        layout: where processes are.
        scheme: how they travel.
        mb_per_s: megabytes (10⁶ bytes) per second of each line, in each direction.
        latency_ms: of a round trip.
    """
    kept = kept_by(tensors, len(layout.servers))
    pushes = [sum(scheme.push_bytes(one.elements, one.itemsize) for one in mine) for mine in kept]
    pulls = [sum(scheme.pull_bytes(one.elements, one.itemsize) for one in mine) for mine in kept]
    sums_first = scheme is Scheme.WHOLE and all(one.itemsize > 2 for one in tensors)
    leaves, arrives, servers = Counter[int](), Counter[int](), [(0, 0)] * len(kept)
    for host, count in Counter(layout.workers).items():
        for server, there in enumerate(layout.servers):
            times = 1 if sums_first and there != host else count
            pushed, pulled = pushes[server] * times, pulls[server] * times
            servers[server] = (servers[server][0] + pushed, servers[server][1] + pulled)
            if there != host:
                leaves += Counter({host: pushed, there: pulled})
                arrives += Counter({there: pushed, host: pulled})
    directions = [(bytes_, f"into {layout.names[host]}") for host, bytes_ in arrives.items()]
    directions += [(bytes_, f"out of {layout.names[host]}") for host, bytes_ in leaves.items()]
    line_bytes, line = max(directions, key=lambda one: one[0], default=(0, "nothing leaves a host"))
    ms = line_bytes / mb_per_s / 1e3 + latency_ms if line_bytes else 0.0
    into, out_of = (max(one[way] for one in servers) for way in (0, 1))
    return Cost(sum(pushes), sum(pulls), into, out_of, line_bytes, line, ms)


def kept_by(tensors: Sequence[Tensor], num_servers: int) -> list[list[Tensor]]:
    """What each server keeps: whole parameters, and its parts of those that are cut."""
    kept: list[list[Tensor]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for one in sorted(tensors, key=lambda one: -one.elements * one.itemsize):
        if one.elements >= BIGARRAY_BOUND:
            bounds = [one.elements * server // num_servers for server in range(num_servers + 1)]
            parts = [(server, bounds[server + 1] - bounds[server]) for server in range(num_servers)]
        else:
            parts = [(loads.index(min(loads)), one.elements)]
        for server, elements in parts:
            kept[server].append(Tensor(elements, one.itemsize))
            loads[server] += elements * one.itemsize
    return kept


def verdict(costs: Sequence[tuple[Scheme, Cost]], compute_ms: float) -> str:
    """What the network means for a step that computes for so long, and what would help.

    Args:
        costs: of each scheme, without compression first.
        compute_ms: of forward and backward passes.
    """
    plain = costs[0][1]
    if plain.ms <= compute_ms:
        return (
            f"The network takes {plain.ms:.0f} ms of a step and computing {compute_ms:g} ms: what overlaps with the"
            " backward pass costs little (Trainer(overlap=True))."
        )
    sentence = (
        f"The network takes {plain.ms:.0f} ms of a step and computing {compute_ms:g} ms: the network costs more, by"
        f" what goes {plain.line}."
    )
    enough = next(((scheme, one) for scheme, one in costs[1:] if one.ms <= compute_ms), None)
    scheme, best = enough or min(costs, key=lambda one: one[1].ms)
    if enough is None:
        return f"{sentence} The least is {best.ms:.0f} ms, with compression '{scheme.value}'."
    return f"{sentence} Compression '{scheme.value}' brings it down to {best.ms:.0f} ms."
