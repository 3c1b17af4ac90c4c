"""Where processes meet: the address under which a host sees the launcher, never its alias."""

from __future__ import annotations

import pytest

from kvdist.errors import ConfigError
from kvdist_launch.host_pool import HostConnection
from kvdist_launch.hosts import Host
from kvdist_launch.multi_host import is_address_of_this_machine, listening_address, root_addresses
from kvdist_launch.processes import LocalProcesses
from kvdist_launch.root_socket import listen, port_of, turn_away


class Elsewhere:
    """In place of a crew of another host."""


def station(name: str, connection: str) -> HostConnection:
    return HostConnection(Host(name), Elsewhere(), {"environ": {"SSH_CONNECTION": connection}})  # type: ignore[arg-type]


HERE = HostConnection(
    Host("localhost"), LocalProcesses(None, None), {"environ": {"SSH_CONNECTION": "9.9.9.9 1 8.8.8.8 22"}}
)  # type: ignore[arg-type]


def test_hosts_dial_the_address_under_which_they_see_the_launcher():
    stations = [station("d1", "10.0.0.1 5000 10.0.0.2 22"), station("d2", "10.1.0.1 5001 10.1.0.2 22"), HERE]
    addresses = root_addresses(stations, None, is_ours=lambda _: True)
    assert addresses == ["10.0.0.1", "10.1.0.1", "10.0.0.1"]
    assert listening_address(addresses) == "0.0.0.0", "every address at once"
    assert listening_address(["10.0.0.1", "fd00::1"]) == "::"
    assert listening_address(["10.0.0.1", "10.0.0.1"]) == "10.0.0.1"


def test_a_launcher_behind_a_router_is_told_to_put_the_scheduler_on_a_host():
    stations = [station("d1", "203.0.113.9 5000 10.0.0.2 22")]
    with pytest.raises(ConfigError, match=r"d1 sees this machine as 203\.0\.113\.9.*--scheduler-on d1"):
        root_addresses(stations, None, is_ours=lambda _: False)


def test_a_scheduler_on_a_host_has_the_address_at_which_the_launcher_reached_it():
    stations = [station("d1", "203.0.113.9 5000 10.0.0.2 22"), station("d2", "203.0.113.9 5000 10.0.0.3 22")]
    assert root_addresses(stations, stations[1], is_ours=lambda _: False) == ["10.0.0.3", "10.0.0.3"]


def test_an_interface_decides_the_address_wherever_the_scheduler_is():
    stations = [station("d1", "203.0.113.9 5000 10.0.0.2 22")]
    assert root_addresses(stations, None, "127.0.0.0/8") == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=r"198\.51\.100\.0/24"):
        root_addresses(stations, None, "198.51.100.0/24")
    stations[0].found["address"] = "10.9.0.2"
    assert root_addresses(stations, stations[0], "10.9.0.0/16") == ["10.9.0.2"]
    stations[0].found["no_interface"] = "KVDIST_INTERFACE is eth9, which is none"
    with pytest.raises(ConfigError, match="^d1: KVDIST_INTERFACE is eth9"):
        root_addresses(stations, stations[0], "eth9")


def test_a_job_of_this_machine_alone_meets_on_loopback():
    assert root_addresses([HERE], None) == ["127.0.0.1"]


def test_addresses_of_this_machine_are_known():
    assert is_address_of_this_machine("127.0.0.1") and not is_address_of_this_machine("198.51.100.1")


def test_a_port_of_the_range_is_taken_and_a_full_range_is_an_error():
    with listen("127.0.0.1") as first:
        port = port_of(first)
        with pytest.raises(ConfigError, match=f"every port from {port} to {port} of 127.0.0.1 is taken.*--port-range"):
            listen("127.0.0.1", [port])
        with listen("127.0.0.1", [port, port + 1, port + 2, port + 3]) as second:
            assert port < port_of(second) <= port + 3


def test_an_address_of_another_machine_cannot_be_listened_at():
    with pytest.raises(ConfigError, match=r"cannot listen at 198\.51\.100\.1"):
        listen("198.51.100.1")


def test_probes_are_turned_away_and_the_port_goes_on_listening():
    import socket

    with listen("127.0.0.1") as listening:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port_of(listening)), timeout=5):
                pass
        turn_away(listening)
        with socket.create_connection(("127.0.0.1", port_of(listening)), timeout=5) as real:
            real.sendall(b"x")
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
