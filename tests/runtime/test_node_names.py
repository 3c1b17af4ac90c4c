"""A node holds every message against the name of its connection: what does not match changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.machine import Effect
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.core.worker.requests import Register
from kvdist.core.worker.worker import Worker
from kvdist.errors import AuthenticationError, ConfigError, FencedError
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import SCHEDULER, UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol.messages import Ack, Hello, OnLoss, Packet, Peer, Ready, Rejected, Roster, Stamp, Welcome
from kvdist.protocol.wire import decode, encode
from kvdist.runtime.node import GARBAGE_REPORTS_MAX, Node
from kvdist.transport.base import (
    Arrived,
    Buffer,
    Connected,
    DialRefused,
    Disconnected,
    Event,
    MemoryShared,
    Route,
    Transport,
)
from kvdist.version import __version__

JOB = 7
TOKEN = 12345


class Scripted(Transport):
    """Reports what the test has put there, and keeps what is said."""

    strangers_refused = 0

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.said: list[tuple[Route, Packet]] = []
        self.dialled: list[tuple[str, NodeId | None]] = []

    def bind(self, endpoint: str) -> str:
        return endpoint

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        self.dialled.append((endpoint, to))
        return endpoint

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        self.said.append((to, decode([memoryview(bytes(frame)) for frame in frames])))

    def hang_up(self, route: Route) -> None:
        """Nobody is a stranger here."""

    def recv(self, timeout_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def wake(self) -> None:
        pass

    def close(self, linger_s: float = 0.0) -> None:
        pass


def message(source: Member, said: object, to: int = 0) -> list[memoryview]:
    seq = int(said.SEQUENCED)  # type: ignore[attr-defined]
    packet = Packet(Stamp(JOB, 0, source, to, seq, 0, 0), said)  # type: ignore[arg-type]
    return [memoryview(bytes(frame)) for frame in encode(packet)]


def hello(role: Role, wanted: int, sender: NodeId | None, route: Route = "route", token: int = TOKEN) -> Arrived:
    said = Hello(wanted, "host", 1, "" if role is Role.WORKER else "tcp://127.0.0.1:9", 2, 1, __version__)
    return Arrived(route, message(Member(NodeId(role, UNRANKED), token), said), sender)


@pytest.fixture
def node() -> Iterator[Node]:
    """A scheduler's, for two workers and a server."""
    config = ClusterConfig(Role.SCHEDULER, "127.0.0.1", 9, 2, 1)
    made = Node(Scheduler(config, 0.0, 100), Scripted(), JOB, 10.0, clock=lambda: 0.0)
    yield made
    made.finish()


def heard(node: Node, *events: Event) -> list[tuple[Route, Packet]]:
    """What the node says when this has happened."""
    transport = node.transport
    assert isinstance(transport, Scripted)
    transport.events += events
    transport.said.clear()
    node.turn(0.0)
    return transport.said


@pytest.mark.parametrize("sender", [worker(1), None], ids=["verified", "unverified"])
def test_a_process_gets_the_seat_of_its_key(node, sender):
    ((_, answer),) = heard(node, hello(Role.WORKER, 1, sender))
    assert answer.message == Welcome(1, 100)
    assert node.forgeries == 0


@pytest.mark.parametrize(
    ("role", "wanted", "sender", "signed"),
    [
        (Role.WORKER, 0, worker(1), "worker-0"),
        (Role.SERVER, 0, worker(0), "server-0"),
        (Role.WORKER, 0, server(0), "worker-0"),
        (Role.WORKER, -1, worker(0), "worker-?"),
        (Role.WORKER, 0, SCHEDULER, "worker-0"),
    ],
)
def test_a_process_that_asks_for_another_seat_is_told_and_gets_none(node, caplog, role, wanted, sender, signed):
    ((_, answer),) = heard(node, hello(role, wanted, sender))
    assert isinstance(answer.message, Rejected)
    sentence = f"the key of this connection is that of {sender}, but what it says is signed {signed}"
    assert sentence in answer.message.reason and "KVDIST_RANK" in answer.message.reason
    assert answer.stamp.destination == TOKEN
    assert node.forgeries == 1 and f"scheduler dropped a forged message: {sentence}" in caplog.text
    assert isinstance(node.machine, Scheduler) and not node.machine.membership.peers


def test_a_member_that_speaks_for_another_changes_nothing_and_the_other_keeps_its_route(node):
    heard(node, hello(Role.WORKER, 0, worker(0), "zero", 1), hello(Role.WORKER, 1, worker(1), "one", 2))
    before = dict(node._routes)
    said = heard(node, Arrived("one", message(Member(worker(0), 100), Rejected("end")), worker(1)))
    assert [(route, type(packet.message)) for route, packet in said] == [("one", Rejected)]
    assert node._routes == before and node.forgeries == 1 and not node.stopped


def test_a_process_with_the_token_of_another_does_not_get_its_route(node):
    heard(node, hello(Role.WORKER, 0, worker(0), "zero"))
    ((route, answer),) = heard(node, hello(Role.WORKER, 1, worker(1), "one"))
    assert route == "one" and isinstance(answer.message, Rejected)
    assert node._routes[Member(worker(0), 100)] == "zero"


def test_somebody_who_goes_on_forging_is_told_once_and_not_listened_to_any_more(node):
    assert len(heard(node, *[hello(Role.WORKER, 0, worker(1)) for _ in range(9)])) == 1
    assert (node.forgeries, node.reliable.strangers_refused) == (1, 0), "who is refused once counts once"


def test_forgeries_of_many_connections_are_logged_a_few_times_and_counted(node, caplog):
    caplog.set_level(logging.WARNING)
    forged = [hello(Role.WORKER, 0, worker(1), route=number) for number in range(GARBAGE_REPORTS_MAX + 4)]
    assert len(heard(node, *forged)) == GARBAGE_REPORTS_MAX + 4
    assert node.forgeries == GARBAGE_REPORTS_MAX + 4
    assert caplog.text.count("dropped a forged message") == GARBAGE_REPORTS_MAX


@pytest.fixture
def joining() -> Iterator[Node]:
    """A worker's that has just dialled the scheduler, with the outcome of its wish to join."""
    introduced = Introduction(Role.WORKER, TOKEN, 0, "host", 1, "", 1, 1, __version__, "tcp://127.0.0.1:9")
    config = ClusterConfig(Role.WORKER, "127.0.0.1", 9, 1, 1)
    made = Node(Worker(introduced, config.limits, 0.0), Scripted(), JOB, 10.0, clock=lambda: 0.0)
    made.turn(0.0)
    yield made
    made.finish()


def test_whom_a_node_dials_it_names_to_its_transport(joining):
    assert joining.transport.dialled == [("tcp://127.0.0.1:9", SCHEDULER)]
    future = joining.submit(Register)
    roster = Roster(
        (Peer(Member(server(0), 5), "host", 1, "tcp://127.0.0.1:8"), Peer(Member(worker(0), 6), "host", 2, ""))
    )
    welcome = message(SCHEDULER_MEMBER, Welcome(0, 6), TOKEN)
    first = Packet(Stamp(JOB, 0, SCHEDULER_MEMBER, 6, 1, 0, 0), roster)
    route = "tcp://127.0.0.1:9"
    frames = [memoryview(bytes(frame)) for frame in encode(first)]
    heard(joining, Arrived(route, welcome, SCHEDULER), Arrived(route, frames, SCHEDULER))
    assert joining.transport.dialled[1:] == [("tcp://127.0.0.1:8", server(0))]
    assert future.result(timeout=0) == 0 and joining.forgeries == 0


def test_a_worker_that_forged_ends_with_the_sentence_of_the_scheduler(joining):
    future = joining.submit(Register)
    heard(joining, Arrived("tcp://127.0.0.1:9", message(SCHEDULER_MEMBER, Rejected("forged"), TOKEN), SCHEDULER))
    assert isinstance(future.exception(timeout=0), ConfigError) and "forged" in str(future.exception(timeout=0))
    assert not isinstance(future.exception(timeout=0), FencedError)


def test_a_node_whose_keys_nobody_knows_ends_with_the_reason_and_so_does_whoever_waits(joining):
    future = joining.submit(Register)
    heard(joining, DialRefused("tcp://127.0.0.1:9", "it does not know the key"))
    assert joining.stopped and isinstance(joining.failure, AuthenticationError)
    joining.finish()
    assert str(future.exception(timeout=0)) == "it does not know the key"


def test_what_came_while_a_message_took_long_is_heard_before_anybody_counts_as_late(monkeypatch):
    now = [0.0]
    config = ClusterConfig(Role.SCHEDULER, "127.0.0.1", 9, 2, 1)
    node = Node(Scheduler(config, 0.0, 100), Scripted(), JOB, 10.0, clock=lambda: now[0])
    receive = node.reliable.receive

    def receive_slowly(packet: Packet, at: float) -> list[Effect]:
        now[0] += 2 * config.limits.form_timeout_s
        return receive(packet, at)

    monkeypatch.setattr(node.reliable, "receive", receive_slowly)
    heard(node, hello(Role.WORKER, 0, None, "route-0", TOKEN))
    monkeypatch.undo()
    heard(node, hello(Role.WORKER, 1, None, "route-1", TOKEN + 1), hello(Role.SERVER, 0, None, "route-2", TOKEN + 2))
    assert node.machine.membership.is_complete and node.failure is None and not node.stopped
    node.finish()


def test_a_member_that_was_dialled_is_believed_only_where_it_was_dialled(joining):
    welcome = message(SCHEDULER_MEMBER, Welcome(0, 5), to=TOKEN)
    heard(joining, Arrived("another route", welcome))
    assert joining.machine.me.node.rank == UNRANKED and joining.reliable.strangers_refused == 1
    heard(joining, Arrived("tcp://127.0.0.1:9", welcome))
    assert joining.machine.me == Member(worker(0), 5)


def test_a_route_is_taken_for_that_of_a_member_only_with_its_incarnation_and_job(node):
    heard(node, hello(Role.WORKER, 0, None, route="member"))
    for job, incarnation in ((JOB + 1, 100), (JOB, 9)):
        stamp = Stamp(job, 0, Member(worker(0), incarnation), 0, 0, 0, 0)
        frames = [memoryview(bytes(frame)) for frame in encode(Packet(stamp, Ack(wanted=False)))]
        ((route, answer),) = heard(node, Arrived(stamp.job, frames))
        assert route == stamp.job and isinstance(answer.message, Rejected)
        told = answer.stamp
        assert (told.job, told.epoch, told.source.incarnation, told.destination) == (
            stamp.job, 0, 0, stamp.source.incarnation,
        )  # fmt: skip
    assert node._routes == {Member(worker(0), 100): "member"}


def test_of_a_route_that_names_one_process_after_the_other_one_name_is_kept_until_it_ends(node):
    heard(node, *[hello(Role.WORKER, rank, None, route=rank, token=1 + rank) for rank in (0, 1)])
    for token in range(50, 99):
        heard(node, hello(Role.WORKER, -1, None, token=token))
    assert len(node._routes) == 3
    heard(node, Disconnected("route", "gone"))
    assert set(node._routes) == {Member(worker(rank), 100 + rank) for rank in (0, 1)}
    assert "route" not in node._members and "route" not in node._refused_routes


def test_who_reads_the_memory_of_a_worker_stands_in_its_view_until_the_connection_breaks():
    said = Introduction(Role.WORKER, TOKEN, 0, "host", 1, "", 1, 1, __version__, "scheduler")
    made = Node(Worker(said, Limits(), 0.0), Scripted(), JOB, 10.0, clock=lambda: 0.0)
    heard(made)
    heard(made, Arrived("scheduler", message(SCHEDULER_MEMBER, Welcome(0, 100), TOKEN)))
    near, far = Member(server(0), 101), Member(server(1), 102)
    roster = Roster((Peer(near, "host", 2, "near"), Peer(far, "other", 3, "tcp://10.0.0.2:9")))
    heard(made, Arrived("scheduler", message(SCHEDULER_MEMBER, roster, 100)))
    views = [made.view]
    for event in (Connected("near"), MemoryShared("near"), Disconnected("near", "reset"), Connected("near")):
        heard(made, event)
        views.append(made.view)
    assert [view.shares_memory(0) for view in views] == [False, False, True, False, False]
    assert not views[2].shares_memory(1) and views[2].epoch == views[0].epoch
    made.finish()


def test_what_is_left_of_a_connection_that_was_replaced_is_heard_and_answered_by_the_new_one(node):
    """A ROUTER reads its connections in turn, so the last words of the old one may come after the first of the new."""
    member = Member(worker(0), 100)
    others = [hello(Role.WORKER, 1, worker(1), "other", 2), hello(Role.SERVER, 0, server(0), "server", 3)]
    heard(node, hello(Role.WORKER, 0, worker(0), "old", 1), *others)

    def said(route, message_said):
        return Arrived(route, message(member, message_said), worker(0))

    heard(node, said("new", Ack(wanted=True)))
    assert node._routes[member] == "new"
    answers = heard(node, said("old", Ack(wanted=True)), Disconnected("old", "it broke"))
    assert answers and {route for route, _ in answers} == {"new"}, "the roster, said again"
    assert node._routes[member] == "new"


def test_where_the_new_connection_ends_first_the_member_is_heard_at_the_old_one_again(node):
    member = Member(worker(0), 100)
    heard(node, hello(Role.WORKER, 0, worker(0), "old", 1))
    for route in ("new", "old"):
        heard(node, Arrived(route, message(member, Ack(wanted=True)), worker(0)))
    heard(node, Disconnected("new", "it broke"), Arrived("old", message(member, Ack(wanted=True)), worker(0)))
    assert node._routes[member] == "old"


@pytest.fixture
def serving() -> Iterator[Node]:
    """A server's that has been welcomed, and has not heard who else is there."""
    endpoint = "tcp://127.0.0.1:9"
    introduced = Introduction(Role.SERVER, TOKEN, 0, "host", 1, "tcp://127.0.0.1:8", 2, 1, __version__, endpoint)
    limits = ClusterConfig(Role.SERVER, "127.0.0.1", 9, 2, 1).limits
    made = Node(Server(introduced, limits, REFERENCE, 0.0), Scripted(), JOB, 10.0, clock=lambda: 0.0)
    made.turn(0.0)
    heard(made, Arrived(endpoint, message(SCHEDULER_MEMBER, Welcome(0, 5, OnLoss.CONTINUE), TOKEN), SCHEDULER))
    yield made
    made.finish()


def roster_of(*members: Member, seq: int, lost: tuple[Member, ...] = ()) -> Arrived:
    peers = tuple(Peer(one, "host", 1, "tcp://127.0.0.1:8" if one.node.role is Role.SERVER else "") for one in members)
    packet = Packet(Stamp(JOB, 0, SCHEDULER_MEMBER, 5, seq, 0, 0), Roster(peers, seq, lost=lost))
    return Arrived("tcp://127.0.0.1:9", [memoryview(bytes(frame)) for frame in encode(packet)], SCHEDULER)


def test_a_worker_that_speaks_before_or_after_its_time_is_no_stranger_and_another_is(serving):
    me, *workers = Member(server(0), 5), Member(worker(0), 6), Member(worker(1), 7)
    early = Arrived("one", message(workers[1], Ready(0), to=5), worker(1))
    assert heard(serving, early) == [] and serving.reliable.strangers_refused == 0
    lost = roster_of(me, workers[0], seq=2, lost=(workers[1],))
    said = heard(serving, roster_of(me, *workers, seq=1), early, lost, early, replace(early, route="another"))
    answer, again = [packet for route, packet in said if route != lost.route]
    assert again.message == answer.message
    assert isinstance(answer.message, Rejected) and "given up" in answer.message.reason
    assert serving.reliable.strangers_refused == 0
    heard(serving, Arrived("two", message(Member(worker(1), 99), Ready(0), to=5), worker(1)))
    assert serving.reliable.strangers_refused == 1
