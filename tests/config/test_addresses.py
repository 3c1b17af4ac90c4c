"""The addresses of this machine: by interface, by network, and by the name that others dial."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from kvdist.config import addresses
from kvdist.config.addresses import (
    OwnAddress,
    address_of_interface,
    local_address_towards,
    own_addresses,
    own_addresses_of,
    this_machine,
)
from kvdist.config.endpoints import split_endpoint
from kvdist.errors import ConfigError
from tests.cases import each

MACHINE = [
    OwnAddress("lo", ipaddress.ip_address("127.0.0.1")),
    OwnAddress("eth0", ipaddress.ip_address("192.0.2.7")),
    OwnAddress("eth0", ipaddress.ip_address("10.1.2.3")),
    OwnAddress("ib0", ipaddress.ip_address("10.9.0.1")),
    OwnAddress("lo", ipaddress.ip_address("::1")),
    OwnAddress("eth0", ipaddress.ip_address("fd00:1::7")),
    OwnAddress("six", ipaddress.ip_address("2001:db8::1")),
]


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(addresses, "own_addresses", lambda: MACHINE)


@each(
    "text, prefers_ipv6, address",
    [
        ("eth0", False, "192.0.2.7"),
        ("eth0", True, "fd00:1::7"),
        ("six", False, "2001:db8::1"),
        ("ib0", True, "10.9.0.1"),
        ("10.0.0.0/8", False, "10.1.2.3"),
        ("10.9.1.1/16", False, "10.9.0.1"),
        ("fd00::/8", False, "fd00:1::7"),
        ("::/0", False, "fd00:1::7"),
        ("0.0.0.0/0", False, "192.0.2.7"),
        ("127.0.0.0/8", False, "127.0.0.1"),
        ("::1/128", False, "::1"),
        ("lo", True, "::1"),
        ("192.0.2.7/32", True, "192.0.2.7"),
    ],
)
def test_an_interface_or_a_network_stands_for_an_address(machine, text, prefers_ipv6, address):
    assert address_of_interface(text, prefers_ipv6) == address


@each(
    "text, says",
    [
        ("eth1", "is 'eth1', which has no address here; interfaces: lo 127.0.0.1, eth0 192.0.2.7, "),
        (
            "172.16.0.0/12",
            "is '172.16.0.0/12', and this machine has no address in it but loopback ones at most; interfaces: lo 127.",
        ),
        ("10.0.0.0/40", "is '10.0.0.0/40', which is not a network: "),
        ("eth0/24", "is 'eth0/24', which is not a network: "),
        ("127.0.0.1", "is '127.0.0.1', an address: write the name of its interface, or ADDRESS/32 "),
        ("fd00:1::7", "is 'fd00:1::7', an address: write the name of its interface, or ADDRESS/32 "),
    ],
)
def test_what_stands_for_no_address_is_refused_with_all_that_there_are(machine, text, says):
    with pytest.raises(ConfigError) as caught:
        address_of_interface(text)
    assert says in str(caught.value)
    assert "which is not a network" in says or str(caught.value).endswith("six 2001:db8::1")


def test_a_network_of_everything_does_not_mean_a_machine_that_has_only_loopback_addresses(monkeypatch):
    monkeypatch.setattr(addresses, "own_addresses", lambda: MACHINE[:1])
    with pytest.raises(ConfigError, match=r"no address in it but loopback ones at most; interfaces: lo 127\.0\.0\.1$"):
        address_of_interface("0.0.0.0/0")


def test_this_machine_has_a_loopback_address():
    assert "lo 127.0.0.1" in map(str, own_addresses())


@each("unknown", [["/proc/sys/kernel/random/boot_id"], ["/proc/self/ns/net"], ["/proc"]])
def test_machines_that_do_not_tell_their_kernel_or_namespace_are_told_apart_by_their_names(monkeypatch, unknown):
    def refusing(function):
        def call(path, *rest, **words):
            if str(path).startswith(tuple(unknown)):
                raise FileNotFoundError(path)
            return function(path, *rest, **words)

        return call

    monkeypatch.setattr(os, "stat", refusing(os.stat))
    monkeypatch.setattr(addresses.Path, "read_text", refusing(addresses.Path.read_text))
    seen = []
    for name in ("d1", "d2", "d1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        seen.append(this_machine())
    assert seen[0] == seen[2] != seen[1]


def resolving(monkeypatch, *found):
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: rows)


@each("host", ["192.0.2.9", "::1", "fe80::1%eth0", "*"])
def test_an_address_is_taken_as_it_is(machine, host):
    assert own_addresses_of(host) == [host]


@pytest.mark.parametrize(
    ("found", "preferred", "listened_at"),
    [
        (["127.0.1.1", "192.0.2.7"], None, ["127.0.1.1", "192.0.2.7"]),
        (["192.0.2.7", "fd00:1::7"], None, ["192.0.2.7", "fd00:1::7"]),
        (["127.0.0.1", "::1"], None, ["127.0.0.1", "::1"]),
        (["192.0.2.7", "10.9.0.1", "fd00:1::7"], "192.0.2.7", ["192.0.2.7", "fd00:1::7"]),
        (["192.0.2.7", "10.1.2.3"], "10.9.0.1", ["192.0.2.7", "10.1.2.3"]),
        (["203.0.113.1", "fd00:1::7"], None, ["fd00:1::7"]),
        (["127.0.0.1", "127.0.0.1"], None, ["127.0.0.1"]),
    ],
)
def test_a_name_is_listened_at_by_every_address_that_others_may_dial(
    machine, monkeypatch, found, preferred, listened_at
):
    resolving(monkeypatch, *found)
    assert own_addresses_of("node-7", preferred) == listened_at


def test_the_ipv6_loopback_address_is_left_out_where_ipv6_is_turned_off(monkeypatch):
    monkeypatch.setattr(addresses, "own_addresses", lambda: [one for one in MACHINE if one.address.version == 4])
    resolving(monkeypatch, "::1", "127.0.0.1")
    assert own_addresses_of("localhost") == ["127.0.0.1"]


def test_a_name_of_another_machine_is_refused_with_the_addresses_of_this_one(machine, monkeypatch):
    resolving(monkeypatch, "203.0.113.1")
    with pytest.raises(ConfigError, match=r"which is 203\.0\.113\.1, but the scheduler runs here.*192\.0\.2\.7"):
        own_addresses_of("node-7")


def test_a_name_that_means_nothing_is_refused(monkeypatch):
    def fail(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=r"DMLC_PS_ROOT_URI is 'node-7', a name that does not resolve here"):
        own_addresses_of("node-7")


@each("host", ["x..y", f"{'x' * 64}.example", "x" * 300])
def test_a_name_that_cannot_be_one_is_refused_in_a_sentence(host):
    with pytest.raises(ConfigError, match=rf"DMLC_PS_ROOT_URI is '{host}', a name that does not resolve here"):
        own_addresses_of(host)
    with pytest.raises(ConfigError, match=rf"no way from this machine to the scheduler at {host}:9 .*DMLC_PS_ROOT_URI"):
        local_address_towards(host, 9)


@each(
    "endpoint, parts",
    [("tcp://127.0.0.1:80", ("127.0.0.1", 80)), ("tcp://[::1]:9", ("::1", 9)), ("tcp://node:1", ("node", 1))],
)
def test_an_endpoint_is_taken_apart(endpoint, parts):
    assert split_endpoint(endpoint) == parts
