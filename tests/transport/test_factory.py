"""What the configuration makes of keys and ports."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvdist.config.settings import ClusterConfig, Limits
from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, Role, server, worker
from kvdist.transport.endpoints import AddressInUse, bind_error, owner_of_port
from kvdist.transport.factory import bind_port, credentials_of, open_sockets
from kvdist.transport.inproc import InprocNetwork
from tests.cases import each

CONFIG = ClusterConfig(Role.SERVER, "127.0.0.1", 9, 2, 3, rank=1, security="none")


@pytest.fixture
def encrypted(tmp_path: Path) -> ClusterConfig:
    path = tmp_path / "secret"
    path.write_bytes(bytes(40))
    path.chmod(0o600)
    return replace(CONFIG, security=None, secret_file=str(path))


def test_a_job_without_a_secret_has_no_keys():
    assert credentials_of(CONFIG) is None


def test_keys_are_those_of_the_cluster(encrypted):
    made = credentials_of(encrypted)
    assert made is not None and made.me == server(1)
    assert made.peers == {SCHEDULER, server(0), server(1), server(2), worker(0), worker(1)}
    scheduler = credentials_of(replace(encrypted, role=Role.SCHEDULER, rank=None))
    assert scheduler is not None and scheduler.me == SCHEDULER


def test_a_process_without_a_rank_has_no_key(encrypted):
    with pytest.raises(ConfigError, match=r"KVDIST_RANK is not set.*KVDIST_SECRET_FILE.*kvdist-launch sets it"):
        credentials_of(replace(encrypted, rank=None))


class Taken(InprocNetwork):
    """A network where some ports are taken; remembers which were tried."""

    def __init__(self, *taken: int) -> None:
        super().__init__()
        self.tried: list[int] = []
        self.transport_ = self.transport()

        def bind(endpoint: str) -> str:
            self.tried.append(int(endpoint.rpartition(":")[2]))
            if self.tried[-1] in taken:
                raise AddressInUse("taken")
            return endpoint

        self.transport_.bind = bind  # type: ignore[method-assign]


@each(
    "role, rank, order",
    [
        (Role.SCHEDULER, 0, [50, 51, 52, 53, 54, 55, 56]),
        (Role.SERVER, 0, [51, 52, 53, 54, 55, 56, 50]),
        (Role.SERVER, 2, [53, 54, 55, 56, 50, 51, 52]),
        (Role.WORKER, 0, [54, 55, 56, 50, 51, 52, 53]),
        (Role.WORKER, 1, [55, 56, 50, 51, 52, 53, 54]),
    ],
)
def test_every_process_begins_at_a_port_of_its_own_and_tries_all(role, rank, order):
    config = replace(CONFIG, role=role, rank=rank, port_range=(50, 56))
    network = Taken(*range(50, 57))
    with pytest.raises(ConfigError, match=r"every port of ::1 from 50 to 56 is in use \(KVDIST_PORT_RANGE\)"):
        bind_port(network.transport_, config, "::1")
    assert network.tried == order


def test_the_first_free_port_is_taken():
    network = Taken(52, 53)
    assert bind_port(network.transport_, replace(CONFIG, port_range=(50, 56)), "127.0.0.1") == "tcp://127.0.0.1:54"


def test_without_a_rank_any_port_may_be_the_first_but_all_are_tried():
    network = Taken(50, 51)
    with pytest.raises(ConfigError):
        bind_port(network.transport_, replace(CONFIG, rank=None, port_range=(50, 51)), "127.0.0.1")
    assert sorted(network.tried) == [50, 51]


def test_without_a_range_the_system_chooses():
    network = Taken()
    bind_port(network.transport_, CONFIG, "127.0.0.1")
    assert network.tried == [0]


def test_an_address_that_cannot_be_bound_is_told_with_its_port_and_number():
    error = bind_error("tcp://192.0.2.1:77", errno.EADDRNOTAVAIL, "")
    assert "tcp://192.0.2.1:77" in str(error) and "(errno 99, EADDRNOTAVAIL)" in str(error)
    assert not isinstance(error, AddressInUse)


def test_a_range_with_taken_ports_is_walked_without_a_look_at_whose_they_are(monkeypatch):
    monkeypatch.setattr("kvdist.transport.endpoints.owner_of_port", lambda port: pytest.fail(f"asked for {port}"))
    with contextlib.closing(open_sockets(CONFIG)) as taken, contextlib.closing(open_sockets(CONFIG)) as transport:
        port = int(taken.bind("tcp://127.0.0.1:0").rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"every port of 127\.0\.0\.1 from {port} to {port} is in use"):
            bind_port(transport, replace(CONFIG, port_range=(port, port)), "127.0.0.1")


def test_the_process_that_holds_a_port_is_named():
    with contextlib.closing(open_sockets(CONFIG)) as transport:
        port = int(transport.bind("tcp://127.0.0.1:0").rpartition(":")[2])
        assert owner_of_port(port).startswith(f"process {os.getpid()} (")
        assert f"in use by process {os.getpid()} (" in str(bind_error(f"tcp://127.0.0.1:{port}", errno.EADDRINUSE, ""))
    assert owner_of_port(port) == ""


@each("role, patience_s, probe_s", [(Role.SCHEDULER, 10.0, 0.1), (Role.SERVER, 10.0, 0.5), (Role.SERVER, 1.0, 0.125)])
def test_within_a_host_the_scheduler_probes_more_often_as_its_verdict_counts(role, patience_s, probe_s):
    config = replace(CONFIG, role=role, rank=0, limits=Limits(patience_s=patience_s))
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(open_sockets(config)) as transport:
        transport.bind(f"ipc://{folder}/socket")
        (link,) = transport._links
        assert link.socket.get(zmq.HEARTBEAT_IVL) == probe_s * 1000
