"""What is said of hosts before anything starts: a sentence for each problem, one table for all."""

from __future__ import annotations

import pytest

from kvdist.errors import ConfigError
from kvdist.version import __version__
from kvdist_launch.host_pool import (
    FREE_BYTES_MIN,
    HostConnection,
    explained,
    judge,
    require_all,
    table,
)
from kvdist_launch.hosts import Host
from tests.cases import each

FACTS = {
    "version": __version__,
    "python": "/opt/bin/python",
    "python_version": "3.11.7",
    "cores": 8,
    "gpus": 2,
    "environ": {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22"},
}
PLENTY = {"folder": {"free_bytes": 10 * FREE_BYTES_MIN, "problem": ""}, "has_cwd": True, "unreachable": ""}


def judged(facts: dict[str, object] | None = None, **found: object) -> str:
    station = HostConnection(Host("d1"), None, {**FACTS, **(facts or {})}, {**PLENTY, **found})  # type: ignore[arg-type]
    judge([station], "/srv/job")
    return station.problem


def test_a_host_with_everything_has_no_problem():
    assert judged() == ""


@each(
    "problem, words",
    [
        (
            {"facts": {"version": "0.0.9"}},
            ["kvdist 0.0.9", f"this machine {__version__}", "/opt/bin/python -m pip install ./kvdist"],
        ),
        ({"folder": {"free_bytes": 12_000_000, "problem": ""}}, ["/srv/job has 12 MB free"]),
        ({"folder": {"free_bytes": 0, "problem": "/srv cannot be written to"}}, ["/srv cannot be written to"]),
        ({"unreachable": "no answer from 10.0.0.1:7"}, ["scheduler cannot be reached", "no answer from 10.0.0.1:7"]),
        ({"has_cwd": False}, ["--sync-dst-dir"]),
        ({"problem": "every port is taken"}, ["every port is taken"]),
        ({"has_port": False}, ["--port-range"]),
    ],
)
def test_each_problem_is_told_with_what_to_do(problem, words):
    said = judged(**problem)
    assert all(word in said for word in words), said


def test_devices_that_a_host_does_not_have_are_a_problem():
    station = HostConnection(Host("d1", gpus=("0", "1", "2", "MIG-7")), None, FACTS, PLENTY)  # type: ignore[arg-type]
    judge([station], None)
    assert station.problem == "gpus= names 2, and the host has 2 (counted from 0)"


def test_several_problems_of_one_host_are_told_together():
    said = judged({"version": "0.0.9"}, unreachable="no route")
    assert "0.0.9" in said and "no route" in said


def test_all_hosts_with_problems_are_named_at_once():
    stations = [HostConnection(Host(name), None, FACTS, PLENTY, problem) for name, problem in  # type: ignore[arg-type]
                (("d1", ""), ("d2", "no python"), ("d3", "no route"))]  # fmt: skip
    with pytest.raises(ConfigError, match=r"2 of 3 hosts cannot take part\n  d2: no python\n  d3: no route$"):
        require_all(stations)
    require_all(stations[:1])


@each(
    "last_words, advice",
    [
        ("ann@d1: Permission denied (publickey).", "ssh-copy-id"),
        ("Host key verification failed.", "--accept-new-host-keys"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!: Host key verification failed.", "ssh-keygen -R d1 forgets"),
        ("ssh: Could not resolve hostname d1: Name or service not known", "~/.ssh/config"),
        ("ssh: connect to host d1 port 22: Connection refused", "does an ssh daemon run there"),
        ("ssh: connect to host d1 port 22: Connection timed out", "firewall"),
        ("/usr/bin/python: Error while finding module ... No module named 'kvdist_launch'", "-m pip install ./kvdist"),
        ("ssh: connect to host d1 port 22: Operation timed out", "does a firewall block port 22?"),
        ("bash: line 1: /opt/python: No such file or directory", "--python"),
        ("sh: 1: /opt/python: not found", "--python"),
    ],
)
def test_what_ssh_complains_of_is_repeated_with_advice(last_words, advice):
    said = explained(last_words, "/opt/python", Host("d1"))
    assert said.startswith(last_words) and advice in said


def test_who_has_another_key_than_before_is_not_to_be_accepted_as_new():
    last_words = "REMOTE HOST IDENTIFICATION HAS CHANGED!: Host key verification failed."
    said = explained(last_words, "python", Host("d1", port=7))
    assert "--accept-new-host-keys" not in said and "ssh-keygen -R '[d1]:7'" in said


@each(
    "last_words, command",
    [
        ("ann@d1: Permission denied (publickey).", "ssh-copy-id -i /k/lab -p 7 ann@d1"),
        ("Host key verification failed.", "ssh -o 'UserKnownHostsFile=\"/k/hosts\"' -p 7 -i /k/lab ann@d1"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!", "ssh-keygen -R '[d1]:7' -f /k/hosts forgets"),
        ("No module named 'kvdist_launch'", "-i /k/lab' /"),
        ("No module named 'kvdist_launch'", "/ ann@d1:kvdist/ && ssh -o "),
        ("No module named 'kvdist_launch'", "-p 7 -i /k/lab ann@d1 '/opt/python -m pip install ./kvdist'"),
    ],
)
def test_advised_commands_log_in_as_the_launcher_does(last_words, command):
    host = Host("d1", port=7, user="ann", identity="/k/lab", known_hosts="/k/hosts")
    assert command in explained(last_words, "/opt/python", host)


def test_one_name_that_is_neither_a_host_nor_a_file_is_told_as_both():
    said = explained("ssh: Could not resolve hostname cluster: Name", "python", Host("cluster", is_alone=True))
    assert said.endswith(": there is neither a host nor a hostfile of the name cluster")


def test_what_nobody_knows_is_repeated_as_it_is():
    assert explained("the dog ate it", "python", Host("d1")) == "the dog ate it"


def test_the_table_has_a_line_for_each_host_also_for_those_that_did_not_answer():
    stations = [
        HostConnection(Host("d1"), None, FACTS, PLENTY),  # type: ignore[arg-type]
        HostConnection(Host("d2"), None, {}, {}, "Permission denied"),  # type: ignore[arg-type]
        HostConnection(Host("gpu-with-a-long-name"), None, FACTS, {"unreachable": "no"}),  # type: ignore[arg-type]
    ]
    lines = table(stations).splitlines()
    assert lines[0].split() == ["host", "address", "python", "kvdist", "cores", "GPUs", "free", "scheduler"]
    assert [line.split()[0] for line in lines[2:]] == ["d1", "d2", "gpu-with-a-long-name"]
    assert lines[2].split()[1:] == ["10.0.0.2", "3.11.7", __version__, "8", "2", "671", "MB", "reached"]
    assert "no connection" in lines[3] and lines[4].endswith(" no")
