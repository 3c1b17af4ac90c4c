"""Who sits where: MXNet's turns, restricted by roles and slots, and ranks in the order of the hosts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, Role, worker
from kvdist_launch.hosts import Host
from kvdist_launch.plan import LAUNCHER, Placement, neighbours, place, workers_of_slots

SERVER, WORKER = Role.SERVER, Role.WORKER


def seats_by_host(hosts: list[Host], num_workers: int, num_servers: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {host.name: [] for host in hosts}
    for seat in place(hosts, num_workers, num_servers)[1:]:
        found[hosts[seat.host].name].append(str(seat.node))
    return found


def test_processes_take_turns_over_the_hosts_servers_first_and_ranks_follow_the_hosts():
    assert seats_by_host([Host("a"), Host("b"), Host("c")], 5, 2) == {
        "a": ["server-0", "worker-0", "worker-1"],
        "b": ["server-1", "worker-2"],
        "c": ["worker-3", "worker-4"],
    }


def test_hosts_that_do_not_take_a_role_are_passed_over():
    hosts = [Host("a", role=SERVER), Host("b", role=WORKER), Host("c")]
    assert seats_by_host(hosts, 3, 2) == {
        "a": ["server-0"],
        "b": ["worker-0", "worker-1"],
        "c": ["server-1", "worker-2"],
    }


def test_slots_limit_workers_and_not_servers():
    assert seats_by_host([Host("a", slots=1), Host("b")], 4, 3) == {
        "a": ["server-0", "server-1", "worker-0"],
        "b": ["server-2", "worker-1", "worker-2", "worker-3"],
    }


def test_the_scheduler_comes_first_and_sits_where_it_is_told():
    hosts = [Host("a"), Host("b")]
    assert place(hosts, 1, 1)[0] == Placement(SCHEDULER, LAUNCHER, 0)
    assert place(hosts, 1, 1, scheduler_host=1)[0] == Placement(SCHEDULER, 1, 0)


def test_without_servers_there_is_no_scheduler_either():
    assert place([Host("a"), Host("b")], 2, 0) == [Placement(worker(0), 0, 0), Placement(worker(1), 1, 0)]


@pytest.mark.parametrize(
    ("slots", "count", "rows"),
    [
        # Each row: host, local rank, local size, cross rank, cross size.
        ([2, 2], 4, [(0, 0, 2, 0, 2), (0, 1, 2, 0, 2), (1, 0, 2, 1, 2), (1, 1, 2, 1, 2)]),
        ([2, 2], 3, [(0, 0, 2, 0, 2), (0, 1, 2, 0, 1), (1, 0, 1, 1, 2)]),
        ([2, 2], 2, [(0, 0, 2, 0, 1), (0, 1, 2, 0, 1)]),
        ([1, 2], 3, [(0, 0, 1, 0, 2), (1, 0, 2, 1, 2), (1, 1, 2, 0, 1)]),
        (
            [2, 3, 1],
            6,
            [(0, 0, 2, 0, 3), (0, 1, 2, 0, 2), (1, 0, 3, 1, 3), (1, 1, 3, 1, 2), (1, 2, 3, 0, 1), (2, 0, 1, 2, 3)],
        ),
    ],
)
def test_hosts_that_are_filled_give_each_worker_its_place(slots, count, rows):
    seats = place([Host(f"h{i}", slots=n) for i, n in enumerate(slots)], count, 0, is_filled=True)
    around = neighbours(seats)
    found = [(seat.host, seat.local_rank, *dataclasses.astuple(around[seat.node])) for seat in seats]
    assert found == rows


def test_servers_take_turns_even_where_workers_fill_hosts():
    hosts = [Host("a", slots=2), Host("b", slots=2)]
    assert [seat.host for seat in place(hosts, 2, 2, is_filled=True)] == [LAUNCHER, 0, 1, 0, 0]


def test_local_ranks_count_within_role_and_host():
    seats = place([Host("a"), Host("b")], 3, 2)
    assert [(str(seat.node), seat.host, seat.local_rank) for seat in seats[1:]] == [
        ("server-0", 0, 0), ("server-1", 1, 0), ("worker-0", 0, 0), ("worker-1", 0, 1), ("worker-2", 1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([Host("a", slots=2), Host("b", slots=1)], r"-n asks for 4 workers, but the hosts have 3 slots \(a: 2, b: 1\)"),
        ([Host("a", role=SERVER)], "no host takes workers: every one has role=server"),
        ([Host("a", role=WORKER)], "no host takes servers: every one has role=worker"),
        ([Host(f"h{n}", slots=n // 9) for n in range(10)], r"h5: 0 and 4 more"),
    ],
)
def test_what_does_not_fit_is_told_with_its_sums(hosts, message):
    with pytest.raises(ConfigError, match=message):
        place(hosts, 4, 1)


def test_the_slots_give_the_number_of_workers_where_nobody_says_it():
    assert workers_of_slots([Host("a", slots=2), Host("b", role=SERVER), Host("c", slots=3)]) == 5
    with pytest.raises(ConfigError, match=r"write -n WORKERS, or slots= for every host \(b, c have none\)"):
        workers_of_slots([Host("a", slots=2), Host("b"), Host("c")])
    with pytest.raises(ConfigError, match="no host takes workers"):
        workers_of_slots([Host("b", role=SERVER)])


some_hosts = st.lists(
    st.tuples(st.none() | st.integers(1, 3), st.sampled_from([None, SERVER, WORKER])), min_size=1, max_size=6
).map(lambda kinds: [Host(f"h{i}", slots=slots, role=role) for i, (slots, role) in enumerate(kinds)])


@given(some_hosts, st.integers(1, 9), st.integers(1, 9))
def test_every_process_has_one_fitting_seat_and_ranks_rise_with_the_hosts(hosts, num_workers, num_servers):
    try:
        seats = place(hosts, num_workers, num_servers)
    except ConfigError:
        return
    for role, count in ((SERVER, num_servers), (WORKER, num_workers)):
        mine = [seat for seat in seats if seat.node.role is role]
        assert [seat.node.rank for seat in mine] == list(range(count))
        assert [seat.host for seat in mine] == sorted(seat.host for seat in mine)
        for index, host in enumerate(hosts):
            local = [seat.local_rank for seat in mine if seat.host == index]
            assert local == list(range(len(local)))
            assert not local or host.takes(role)
            assert role is SERVER or host.slots is None or len(local) <= host.slots


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_without_restrictions_each_host_has_what_mxnets_round_robin_gives_it(num_hosts, num_workers, num_servers):
    seats = place([Host(f"h{i}") for i in range(num_hosts)], num_workers, num_servers)
    expected = [(SERVER if i < num_servers else WORKER, i % num_hosts) for i in range(num_servers + num_workers)]
    assert sorted((seat.node.role.value, seat.host) for seat in seats[1:]) == sorted(
        (role.value, host) for role, host in expected
    )
