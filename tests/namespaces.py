"""Hosts for tests: two network namespaces, joined by a pair of virtual cards of a given speed.

They need root and the programs ip and tc; `link` skips the test, with the reason, where they cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CARD = "card"
NO_CARD = "02:00:00:00:00:01"
"""A hardware address that no card has: a packet to it leaves, and is dropped where it arrives."""
BURST_KILOBYTES = 32
LATENCY_MS = 50
"""How long a packet may wait in the queue of a limited card, which is about what a real card's queue holds."""


@dataclass(frozen=True)
class Host:
    """One network namespace.

    Attributes:
        namespace: its name.
        address: at which the other host reaches it.
    """

    namespace: str
    address: str

    def inside(self, *command: str) -> list[str]:
        """The same command as a process of this host; ``ip netns exec`` replaces itself by it, so pids are the same."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def limit(self, mbit: float) -> None:
        """Send no more than this many megabits per second from now on."""
        rate = ["rate", f"{mbit}mbit", "burst", f"{BURST_KILOBYTES}kb", "latency", f"{LATENCY_MS}ms"]
        run("tc", "-n", self.namespace, "qdisc", "replace", "dev", CARD, "root", "tbf", *rate)

    def set_link(self, up: bool) -> None:
        """Plug the cable in, or pull it out."""
        run("ip", "-n", self.namespace, "link", "set", CARD, "up" if up else "down")

    def lose_large_packets(self) -> None:
        """Drop every packet of more than 1,000 bytes from now on, without a word, as a tunnel with a small MTU may."""
        rate = ["rate", "1000mbit", "burst", "1000", "latency", f"{LATENCY_MS}ms"]
        run("tc", "-n", self.namespace, "qdisc", "replace", "dev", CARD, "root", "tbf", *rate)

    def retransmitted(self) -> int:
        """How many segments this host's TCP has sent again."""
        names, values = (line.split() for line in self._read("/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def traffic(self) -> tuple[int, int]:
        """The bytes that the card has sent and received."""
        folder = Path("/sys/class/net") / CARD / "statistics"
        return int(self._read(folder / "tx_bytes")), int(self._read(folder / "rx_bytes"))

    def send_to_card(self, address: str, card: str) -> None:
        """Take a card, by its hardware address, for that of another host from now on."""
        run("ip", "-n", self.namespace, "neigh", "replace", address, "lladdr", card, "dev", CARD, "nud", "permanent")

    @property
    def card(self) -> str:
        """The hardware address of its card."""
        return self._read(Path("/sys/class/net") / CARD / "address").strip()

    def _read(self, path: Path | str) -> str:
        return run(*self.inside("cat", str(path)))


@contextlib.contextmanager
def link(mbit: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link of `mbit` megabits per second in each direction between them, or an unlimited one."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("NO NETWORK NAMESPACES CAN BE MADE HERE: they need root and iproute2's ip and tc")
    tag = uuid.uuid4().hex[:8]
    hosts = Host(f"kvdist-{tag}-a", "10.213.7.1"), Host(f"kvdist-{tag}-b", "10.213.7.2")
    try:
        for host in hosts:
            made = subprocess.run(["ip", "netns", "add", host.namespace], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"NO NETWORK NAMESPACES CAN BE MADE HERE: {made.stderr.strip()}")
        first, second = (["name", CARD, "netns", host.namespace] for host in hosts)
        run("ip", "link", "add", *first, "type", "veth", "peer", *second)
        for host in hosts:
            run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CARD)
            for interface in ("lo", CARD):
                run("ip", "-n", host.namespace, "link", "set", interface, "up")
            if mbit is not None:
                host.limit(mbit)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


@contextlib.contextmanager
def outage(hosts: tuple[Host, Host]) -> Iterator[None]:
    """Lose every packet between the hosts, without a word to who sent it: cards and routes stay as they are.

    Raises:
        AssertionError: nothing was lost that had to be sent again.
    """
    near, far = hosts
    before = [host.retransmitted() for host in hosts]
    cards = {far.address: far.card, near.address: near.card}
    try:
        near.send_to_card(far.address, NO_CARD)
        far.send_to_card(near.address, NO_CARD)
        yield
    finally:
        near.send_to_card(far.address, cards[far.address])
        far.send_to_card(near.address, cards[near.address])
    for host, count in zip(hosts, before, strict=True):
        assert host.retransmitted() > count, f"{host.address} has sent nothing again: nothing was lost"


def run(*command: str) -> str:
    """Run a tool; what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
