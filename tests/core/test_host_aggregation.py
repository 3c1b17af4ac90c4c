"""Workers of one host that push together: machines wired back to back, with literal times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.machine import PeerDisconnected
from kvdist.errors import OptimizerMismatch, PeerLostError
from kvdist.nodes import Member, worker
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import Contributor, Flag, JoinedPush, Lease, Packet, Stamp
from tests.cases import each
from tests.core.wired import JOB, NAN, Wired

WIDE = {"w": [1.0, 2.0, 3.0], "b": [5.0]}


def cluster(hosts: str, **options: Any) -> Wired:
    """Two keys, and a worker on the host of each letter; the server is elsewhere."""
    made = Wired(len(hosts), 1, hosts=list(hosts), **{"local_reduce": "on", **options})
    made.initialise(WIDE)
    made.log.clear()
    return made


def said(wired: Wired, text: str) -> list[str]:
    return [line for line in wired.log if text in line]


def ranks(line: str) -> list[int]:
    """Whose pushes are in a sum."""
    return [int(rank) for rank in re.findall(r"worker-(\d+)", line[line.index("contributors=") : line.index("runs=")])]


def closed(wired: Wired) -> int:
    """Rounds of the key b."""
    return wired.servers[0].shard.blocks.of(wired.infos["b"].slices[0].number)[0].version


def test_the_pushes_of_a_host_cross_once_and_everybody_gets_the_sum() -> None:
    wired = cluster("xxx")
    asked = [wired.pushpull(rank, {"w": [1, 10, 100 * rank], "b": [rank]}) for rank in range(3)]
    wired.settle()
    assert [wired.value(one, "w") for one in asked] == [[3, 30, 300]] * 3
    assert [wired.value(one, "b") for one in asked] == [[3]] * 3
    assert len(said(wired, "worker-0 -> server-0: JoinedPush(")) == 1
    assert not said(wired, "-> server-0: Push(")
    assert len(said(wired, "server-0 -> worker-0: Values(")) == 1
    assert not said(wired, "server-0 -> worker-1: Values(")
    assert len(said(wired, "worker-0 -> worker-2: Values(")) == 1


def test_a_sum_stands_first_in_the_place_of_the_lowest_rank_with_a_gradient() -> None:
    wired = cluster("xxx")
    wired.push(0, {"b": None})
    wired.push(1, {"b": [4]})
    wired.push(2, {"b": [6]})
    wired.deliver(2)
    (line,) = said(wired, "JoinedPush(")
    assert ranks(line) == [1, 2, 0] and "flags=[0]" in line and "arrays=[[10.0]]" in line


def test_an_average_divides_by_all_who_contributed_and_not_by_hosts() -> None:
    wired = cluster("xxyz")
    asked = [wired.pushpull(rank, {"b": [8 * (rank + 1)]}, flag=Flag.AVERAGE) for rank in range(3)]
    asked.append(wired.pushpull(3, {"b": None}, flag=Flag.AVERAGE))
    wired.settle()
    assert [wired.value(one, "b") for one in asked] == [[(8 + 16 + 24) / 4]] * 4


@each("samples", [(1, 2, 3, 4), (2, 2, 2, 4), (3, 3, 1, 0)])
def test_a_mean_over_samples_is_that_of_all_workers_whatever_a_host_sums(samples: tuple[int, ...]) -> None:
    wired = cluster("xxyx")
    given = [None if number == 0 else [10.0 * rank] for rank, number in enumerate(samples)]
    asked = [
        wired.pushpull(rank, {"b": given[rank]}, flag=Flag.WEIGHTED, samples=number)
        for rank, number in enumerate(samples)
    ]
    wired.settle()
    assert bool(said(wired, "JoinedPush(")) is (samples[:2] != (1, 2))
    mean = sum(10 * rank * number for rank, number in enumerate(samples)) / sum(samples)
    assert [wired.value(one, "b") for one in asked] == [[pytest.approx(mean)]] * 4


def test_a_worker_alone_on_its_host_pushes_to_the_server() -> None:
    wired = cluster("xy")
    for rank in range(2):
        wired.push(rank, {"b": [1]})
    wired.settle()
    assert not said(wired, "JoinedPush(") and closed(wired) == 1


@each("setting, summed", [("off", []), ("auto", ["large"]), ("on", ["large", "small"])])
def test_the_setting_decides_which_slices_are_summed_first(setting: str, summed: list[str]) -> None:
    wired = Wired(2, 1, hosts=["x", "x"], local_reduce=setting)
    values = {"large": [1.0] * 16384, "small": [2.0] * 16381}
    wired.initialise(values)
    wired.log.clear()
    asked = [wired.pushpull(rank, values) for rank in range(2)]
    wired.settle()
    numbers = [wired.infos[name].slices[0].number for name in summed]
    assert all(any(f"ids=[{number}]" in line for line in said(wired, "JoinedPush(")) for number in numbers)
    assert len(said(wired, "JoinedPush(")) == len(summed)
    assert {wired.value(one, "large")[-1] for one in asked} == {2.0}


def test_servers_of_the_same_host_get_the_pushes_of_each_worker() -> None:
    wired = Wired(2, 1, hosts=["x", "x"], servers_on="x")
    values = {"large": [1.0] * 16384}
    wired.initialise(values)
    for rank in range(2):
        wired.push(rank, values)
    wired.settle()
    assert not said(wired, "JoinedPush(") and len(said(wired, "-> server-0: Push(")) == 2


def test_an_asynchronous_push_goes_to_the_server_at_once() -> None:
    wired = Wired(2, 1, hosts=["x", "x"], local_reduce="on")
    wired.initialise(WIDE, mode="async")
    wired.set_optimizer(0, "test")
    wired.settle()
    done = wired.push(1, {"b": [1]})
    wired.settle()
    assert done in wired.completed
    assert not said(wired, "JoinedPush(")


def test_a_push_without_a_result_is_told_that_it_counted_though_a_neighbour_wants_the_value() -> None:
    wired = cluster("xx")
    read = wired.pushpull(1, {"w": [1, 1, 1], "b": [1]})
    done = wired.push(0, {"b": [2], "w": [2, 2, 2]})
    wired.settle()
    assert done in wired.completed
    assert wired.value(read, "w") == [3, 3, 3] and wired.value(read, "b") == [3]


def test_lists_of_keys_in_another_order_and_in_other_groups_meet_slice_by_slice() -> None:
    wired = cluster("xx")
    asked = [wired.pushpull(0, {"w": [1, 2, 3], "b": [4]})]
    asked += [wired.pushpull(1, {"b": [40]}), wired.pushpull(1, {"w": [10, 20, 30]})]
    wired.settle()
    assert wired.value(asked[0], "w") == wired.value(asked[2], "w") == [11, 22, 33]
    assert wired.value(asked[1], "b") == [44]


def test_workers_that_disagree_on_the_learning_rate_are_named_and_not_summed() -> None:
    wired = cluster("xx")
    asked = [wired.push(rank, {"b": [1]}, setting=(0.1 * (rank + 1), 0.0, 1.0)) for rank in range(2)]
    wired.settle()
    assert not said(wired, "JoinedPush(") and len(said(wired, "-> server-0: Push(")) == 2
    for one in asked:
        error = wired.failed[one]
        assert isinstance(error, OptimizerMismatch)
        assert str(error).startswith("server-0 refused: ") and "worker-1 says lr 0.2" in str(error)


def test_halves_travel_by_themselves_because_their_sum_would_be_rounded() -> None:
    wired = Wired(2, 1, hosts=["x", "x"], local_reduce="on")
    for rank in range(2):
        wired.declare(rank, {"h": (1,)}, dtype="float16")
    wired.settle()
    wired.give(0, {"h": [0]})
    wired.settle()
    asked = [wired.pushpull(rank, {"h": [40000 if rank else -39999]}) for rank in range(2)]
    wired.settle()
    assert not said(wired, "JoinedPush(") and not said(wired, "worker-1 -> worker-0: Push(")
    assert wired.value(asked[0], "h") == wired.value(asked[1], "h") == [0]  # -39999 is -40000 as float16


def test_who_does_not_agree_with_the_first_pushes_alone_and_the_others_are_summed() -> None:
    wired = cluster("xxxy")
    samples = (2, 2, 3, 1)
    asked = [wired.pushpull(rank, {"b": [rank]}, flag=Flag.WEIGHTED, samples=samples[rank]) for rank in range(4)]
    wired.settle()
    assert [ranks(line) for line in said(wired, "JoinedPush(")] == [[0, 1]]
    assert said(wired, "worker-0 -> worker-2: HandedBack(") and not said(wired, "worker-0 -> worker-1: HandedBack(")
    assert [wired.value(one, "b") for one in asked] == [[pytest.approx((2 + 6 + 3) / 8)]] * 4
    again = [wired.pushpull(rank, {"b": [1]}) for rank in range(4)]
    wired.settle()
    assert [wired.value(one, "b") for one in again] == [[4]] * 4
    assert ranks(said(wired, "JoinedPush(")[-1]) == [0, 1, 2], "together again"


def test_a_slice_that_stays_incomplete_is_handed_back_and_the_server_names_the_late_worker() -> None:
    wired = cluster("xxx")
    first = [wired.pushpull(rank, {"b": [1]}) for rank in (0, 1)]
    wired.advance(4.9)
    assert not said(wired, "Push(")[2:]
    wired.advance(0.2)
    assert said(wired, "worker-0 -> worker-1: HandedBack(") and len(said(wired, "-> server-0: Push(")) == 2
    wired.advance(20.0)
    assert "for worker-2 (host-2)" in str(wired.workers[1].explain(wired.now))
    late = wired.pushpull(2, {"b": [5]})
    wired.settle()
    assert [wired.value(one, "b") for one in (*first, late)] == [[7]] * 3
    assert not said(wired, "JoinedPush("), "what comes later of that push is handed back at once"
    again = [wired.pushpull(rank, {"b": [2]}) for rank in range(3)]
    wired.settle()
    assert [wired.value(one, "b") for one in again] == [[6]] * 3
    assert said(wired, "JoinedPush("), "the next push is summed again"


def test_who_waits_is_told_that_its_push_goes_through_another_worker() -> None:
    wired = cluster("xy" * 2)
    for rank in (0, 2):
        wired.push(rank, {"b": [1]})
    wired.settle()
    text = "waiting 1.5 s for server-0 (host-0)"
    wired.advance(1.5)
    assert wired.workers[0].explain(wired.now) == f"worker-0: {text} to answer push of key 'b'"
    through = "through worker-0 (host-0) that pushes for its host"
    assert wired.workers[2].explain(wired.now) == f"worker-2: {text}, {through}, to answer push of key 'b'"


def test_a_pull_that_waits_for_what_the_leader_holds_is_told_that_the_server_has_to_answer() -> None:
    wired = cluster("xxxx")
    wired.advance(20.0)  # servers look for rounds that wait
    wired.push(2, {"b": [1]})
    read = wired.pull(2, "b")
    wired.settle()
    wired.advance(4.5)
    who = "server-0 (host-0), through worker-0 (host-0) that pushes for its host,"
    assert wired.workers[2].explain(wired.now) == f"worker-2: waiting 4.5 s for {who} to answer push of key 'b'"
    for rank in (0, 1, 3):
        wired.push(rank, {"b": [1]})
    wired.settle()
    assert wired.value(read, "b") == [4]


def test_a_leader_that_is_late_itself_is_named_too() -> None:
    wired = cluster("xx")
    read = wired.pushpull(1, {"b": [1]})
    wired.advance(30.0)
    assert "for worker-0 (host-0)" in str(wired.workers[1].explain(wired.now))
    own = wired.pushpull(0, {"b": [2]})
    wired.settle()
    assert wired.value(read, "b") == wired.value(own, "b") == [3]


def test_a_follower_that_leaves_is_not_waited_for_and_what_it_pushed_counts() -> None:
    wired = cluster("xxy")
    asked = [wired.push(1, {"b": [1]}), wired.push(2, {"b": [100]})]
    left = wired.leave(1)
    wired.advance(0.1)
    assert left in wired.completed, "leaving does not wait for the round"
    read = wired.pushpull(0, {"b": [10]})
    wired.settle()
    assert wired.value(read, "b") == [111] and closed(wired) == 1
    assert asked[1] in wired.completed
    alone = wired.pushpull(0, {"b": [7]})
    wired.push(2, {"b": [1]})
    wired.settle()
    assert wired.value(alone, "b") == [8]


def test_a_follower_whose_push_is_forwarded_may_leave_before_the_round_closes() -> None:
    wired = cluster("xxy")
    for rank in range(2):
        wired.push(rank, {"b": [1]})
    left = wired.leave(1)
    wired.advance(0.1)
    assert said(wired, "JoinedPush(") and left in wired.completed and closed(wired) == 0
    read = wired.pushpull(2, {"b": [1]})
    wired.settle()
    assert wired.value(read, "b") == [3]


def test_a_leader_that_leaves_hands_back_and_its_followers_push_to_the_server() -> None:
    wired = cluster("xxx")
    wired.push(0, {"b": [1]})
    second = wired.pushpull(1, {"b": [10]})
    left = wired.leave(0)
    wired.advance(0.1)
    assert left in wired.completed
    assert said(wired, "worker-1 -> server-0: Push(")
    third = wired.pushpull(2, {"b": [100]})
    wired.settle()
    assert wired.value(second, "b") == wired.value(third, "b") == [111]


def test_what_a_leader_has_forwarded_before_it_leaves_is_counted_once_and_answered() -> None:
    wired = cluster("xxy")
    wired.push(0, {"b": [1]})
    second = wired.pushpull(1, {"b": [10]})
    wired.settle()
    assert said(wired, "JoinedPush(")
    left = wired.leave(0)
    wired.advance(0.1)
    assert left in wired.completed and closed(wired) == 0, "leaving does not wait for the round"
    assert len(said(wired, "worker-1 -> server-0: Push(")) == 1, "what was not answered is said again"
    third = wired.pushpull(2, {"b": [100]})
    wired.settle()
    assert wired.value(second, "b") == wired.value(third, "b") == [111]


def test_a_leader_that_leaves_while_an_answer_is_under_way_costs_nobody_the_answer() -> None:
    wired = cluster("xx")
    wired.push(0, {"b": [1]})
    second = wired.pushpull(1, {"b": [10]})
    wired.deliver(2)  # worker-1's push, and the joined one: the answer to worker-0 is under way
    assert closed(wired) == 1
    wired.leave(0)
    wired.wire.pop()  # and never arrives
    wired.advance(30.0)
    assert wired.value(second, "b") == [11]


def test_a_leader_that_leaves_while_a_refusal_is_under_way_costs_nobody_the_refusal() -> None:
    wired = cluster("xxy")
    wired.push(2, {"b": [1]}, setting=(0.2, 0.0, 1.0))
    wired.settle()
    second = [wired.push(rank, {"b": [1]}, setting=(0.1, 0.0, 1.0)) for rank in range(2)][1]
    wired.deliver(3)  # worker-1's push, the joined one, and the refusal, which worker-0 passes on
    assert closed(wired) == 1 and said(wired, "worker-0 -> worker-1: Refused(")
    assert wired.lose() == 2  # and which never arrives, nor that to worker-2
    wired.leave(0)
    wired.advance(30.0)
    assert len(said(wired, "worker-1 -> server-0: Push(")) == 1, "worker-1 asks for itself"
    assert isinstance(wired.failed.get(second), OptimizerMismatch)
    third = wired.pushpull(1, {"b": [10]})
    wired.push(2, {"b": [5]})
    wired.settle()
    assert wired.value(third, "b") == [15], "what comes after it is not refused"


def test_a_regular_leave_is_no_lost_connection() -> None:
    wired = cluster("xxx")
    for rank in range(3):
        wired.push(rank, {"b": [1]})
    wired.settle()
    member = wired.member("worker-1")
    wired.leave(1)
    wired.observe("worker-0", PeerDisconnected(member, "closed"))
    wired.settle()
    wired.observe("worker-0", PeerDisconnected(member, "closed"))
    wired.advance(60.0)
    assert "worker-0" not in wired.stopped


def test_a_connection_between_neighbours_that_does_not_come_back_ends_the_job_in_a_sentence() -> None:
    wired = cluster("xx")
    wired.observe("worker-1", PeerDisconnected(wired.member("worker-0"), "reset"))
    wired.advance(10.0)
    assert "worker-1" not in wired.stopped
    wired.advance(1.0)
    error = wired.stopped["worker-1"]
    assert isinstance(error, PeerLostError) and "worker-0 (host host-0) was lost" in str(error)


def test_several_rounds_over_several_hosts_are_exact() -> None:
    wired = cluster("xyxyx", limits=Limits(slice_bytes=8))
    total = np.zeros(3)
    for turn in range(4):
        grads = [np.array([rank, turn, 10 * rank + turn], float) for rank in range(5)]
        asked = [wired.pushpull(rank, {"w": grads[rank].tolist()}) for rank in (4, 1, 0, 3, 2)]
        wired.settle()
        total = np.sum(grads, axis=0)
        assert [wired.value(one, "w") for one in asked] == [total.tolist()] * 5
    assert len(said(wired, "JoinedPush(")) == 16, "two slices, two hosts, four turns"


# Losses that the others survive.


def going_on(hosts: str) -> Wired:
    made = cluster(hosts, on_loss="continue")
    made.set_optimizer(0, "test")
    made.settle()
    return made


def deliver_only(wired: Wired, *to: str) -> None:
    """What is under way to these arrives, with all that they say to each other; the rest stays under way."""
    while due := [one for one in wired.wire if one[1] in to]:
        wired.wire.remove(due[0])
        wired.wire.appendleft(due[0])
        wired.deliver()


def test_a_sum_with_a_lost_follower_goes_and_the_others_of_its_host_send_their_own_once_more() -> None:
    wired = going_on("xxxy")
    reads = [wired.pushpull(rank, {"b": [2 * 10**rank]}, flag=Flag.AVERAGE) for rank in range(3)]
    wired.settle()
    assert said(wired, "JoinedPush(") and closed(wired) == 0
    wired.kill("worker-1")
    wired.advance(1.0)
    assert said(wired, "server-0 -> worker-0: HandedBack(") and said(wired, "worker-0 -> worker-2: HandedBack(")
    reads.append(wired.pushpull(3, {"b": [2000]}, flag=Flag.AVERAGE))
    wired.settle()
    wanted = 5 + (2 + 200 + 2000) / 3
    assert [wired.value(reads[rank], "b") for rank in (0, 2, 3)] == [[pytest.approx(wanted)]] * 3
    again = [wired.pushpull(rank, {"b": [1]}) for rank in (0, 2, 3)]
    wired.settle()
    assert [wired.value(one, "b") for one in again] == [[pytest.approx(wanted + 3)]] * 3
    assert ranks(said(wired, "JoinedPush(")[-1]) == [0, 2], "the rest of the host goes on to sum"


def test_a_sum_with_a_lost_leader_goes_and_its_followers_push_by_themselves() -> None:
    wired = going_on("xxxy")
    reads = [wired.pushpull(rank, {"b": [10**rank]}) for rank in range(3)]
    wired.settle()
    assert said(wired, "JoinedPush(") and closed(wired) == 0
    wired.kill("worker-0")
    wired.advance(1.0)
    reads.append(wired.pushpull(3, {"b": [1000]}))
    wired.settle()
    assert [wired.value(reads[rank], "b") for rank in (1, 2, 3)] == [[5 + 1110]] * 3


def test_what_a_leader_has_not_forwarded_goes_on_without_the_lost_one() -> None:
    wired = going_on("xxxy")
    for rank in (0, 1):
        wired.push(rank, {"b": [10**rank]})
    wired.settle()
    wired.kill("worker-1")
    wired.advance(1.0)
    reads = [wired.pushpull(rank, {"b": [10**rank]}) for rank in (2, 3)]
    wired.settle()
    assert [wired.value(one, "b") for one in reads] == [[5 + 1101]] * 2
    assert ranks(said(wired, "JoinedPush(")[0]) == [0, 2] and not said(wired, "HandedBack(")


def test_a_sum_that_comes_after_what_a_follower_has_pushed_by_itself_is_not_taken() -> None:
    """The follower has heard sooner than the server that its leader is lost."""
    wired = going_on("xxxy")
    reads = [wired.pushpull(rank, {"b": [10**rank]}) for rank in range(3)]
    deliver_only(wired, "worker-0")
    (late,) = [one for one in wired.wire if isinstance(one[2].message, JoinedPush)]
    wired.wire.remove(late)
    wired.kill("worker-0")
    wired.processes["scheduler"].tick(1.0)
    wired.now = 1.0
    wired.tick()
    news = [one for one in wired.wire if one[0] == "scheduler" and one[1] == "server-0"]
    wired.wire = type(wired.wire)([one for one in wired.wire if one not in news])
    deliver_only(wired, "worker-1", "worker-2")
    deliver_only(wired, "server-0")
    assert len(said(wired, "-> server-0: Push(")) == 2
    wired.wire.append(late)
    deliver_only(wired, "server-0")
    assert said(wired, "server-0 -> worker-0: HandedBack("), "it was not known to be lost"
    wired.wire.extend(news)
    reads.append(wired.pushpull(3, {"b": [1000]}))
    wired.advance(5.0)
    assert [wired.value(reads[rank], "b") for rank in (1, 2, 3)] == [[5 + 1110]] * 3


@each("rests", [0, 1])
def test_who_has_no_data_is_not_waited_for_by_the_others_of_its_host(rests: int) -> None:
    wired = cluster("xxx")
    lease = (0, 0, 6, 1, False, 0, 1, 1, 0, 0, True)
    wired.push((rests + 1) % 3, {"b": [1]})
    wired.ask(rests, lambda number: Lease(number, *lease))
    wired.push((rests + 2) % 3, {"b": [1]})
    wired.settle()
    assert len(said(wired, "-> server-0: Push(")) == 2, "at once, each by itself"
    wired.push(rests, {"b": [1]})
    wired.settle()
    again = [wired.pushpull(rank, {"b": [2]}) for rank in range(3)]
    wired.settle()
    assert [wired.value(one, "b") for one in again] == [[6]] * 3
    assert len(said(wired, "JoinedPush(")) == 1, "together again"


# What a server believes of a joined push.


def joined(wired: Wired, steps: Sequence[int], pushers: Sequence[int] = (0, 1), **change: Any) -> JoinedPush:
    """What worker 0 says of slice 1, the key b."""
    members = [
        wired.member(f"worker-{rank}") if rank < len(wired.workers) else Member(worker(rank), 9) for rank in pushers
    ]
    contributors = tuple(
        Contributor(member.node.rank, member.incarnation, step, 0) for member, step in zip(members, steps, strict=True)
    )
    arrays, zeros = Arrays(np.ones(1, np.uint8), np.ones(1, np.uint32), bytes(8)), np.zeros(1, np.uint8)
    ids, runs = np.array([change.get("number", 1)], np.uint32), np.array([77], np.uint32)
    return JoinedPush(True, contributors, runs, ids, np.zeros(1, np.uint32), zeros, ((NAN, NAN, NAN),), zeros, arrays)


def refusal(wired: Wired, message: JoinedPush, rank: int = 0) -> str:
    """What the server answers; '' if nothing, or a value."""
    link = wired.processes[f"worker-{rank}"].links[wired.member("server-0")]
    stamp = Stamp(JOB, 1, wired.member(f"worker-{rank}"), wired.member("server-0").incarnation, link.next_seq, 0, 0)
    wired.log.clear()
    link.next_seq += 1
    wired.hear("server-0", Packet(stamp, message))
    return "; ".join(said(wired, "Refused("))


@each("told, sentence", [
        ({"steps": [0, 0], "pushers": (0, 2)}, "the sender speaks for worker-2, and may speak for itself and the"),
        ({"steps": [0, 0], "pushers": (0, 9)}, "the sender speaks for worker-9"),
        ({"steps": [0], "pushers": (1,)}, "the sender speaks for others only"),
        ({"steps": [0, 1]}, "worker-1 sent its push 1 of key 'b', but only 0 of its pushes have been counted"),
        ({"steps": [0, 0], "number": 99}, "slice 99 is not kept by server-0"),
        ({"steps": [0, 0], "number": 0}, "slice 0 has another size or dtype than was declared"),
    ])  # fmt: skip
def test_a_server_refuses_once_and_in_a_sentence(told: dict[str, Any], sentence: str) -> None:
    wired = cluster("xxy")
    message = joined(wired, **told)
    answer = refusal(wired, message)
    assert sentence in answer and "runs=[77]" in answer
    assert closed(wired) == 0 and not wired.servers[0].shard.blocks.of(1)[0].round.slots


def test_a_server_takes_no_sum_for_an_asynchronous_key() -> None:
    wired = Wired(2, 1, hosts=["x", "x"], local_reduce="on")
    wired.initialise(WIDE, mode="async")
    assert "asynchronous" in refusal(wired, joined(wired, [0, 0]))


def test_a_worker_without_neighbours_speaks_for_itself_alone() -> None:
    wired = Wired(2, 1)
    wired.initialise(WIDE)
    assert "speaks for worker-1" in refusal(wired, joined(wired, [0, 0]))


def test_a_joined_push_that_was_counted_is_answered_and_not_added_again() -> None:
    wired = cluster("xx")
    for rank in range(2):
        wired.push(rank, {"b": [1]})
    wired.settle()
    assert refusal(wired, joined(wired, [0, 0])) == ""
    assert len(said(wired, "server-0 -> worker-0: Values(")) == 1 and closed(wired) == 1


def test_a_stranger_is_refused_by_a_leader() -> None:
    wired = cluster("xx")
    stranger = Member(worker(1), 4711)
    leader = wired.workers[0]
    assert "not a server" in str(leader.refuses(stranger, joined(wired, [0], [0])))
    assert leader.refuses(wired.member("worker-1"), joined(wired, [0], [0])) is None


def test_the_memory_of_a_sum_is_kept_until_it_is_counted_and_not_only_received() -> None:
    """A server of the leader's own host reads it where it lies, for as long as the round is open."""
    wired = cluster("xxy", servers_on="x")
    for rank in (0, 1):
        wired.push(rank, {"b": [rank + 1]})
    wired.settle()
    assert said(wired, "JoinedPush") and closed(wired) == 0
    leader = wired.workers[0]
    assert list(leader.aggregation._forwarded) == [wired.infos["b"].slices[0].number]
    wired.push(2, {"b": [10]})
    wired.settle()
    assert closed(wired) == 1 and not leader.aggregation._forwarded
