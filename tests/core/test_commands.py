"""Commands to servers: who runs what, and what the caller hears. See `test_wire` for their bytes."""

from __future__ import annotations

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import Send
from kvdist.errors import KvdistError
from kvdist.protocol.messages import HEAD_OF_USERS_MAX, Command
from tests.cases import each
from tests.core.wired import Wired


def send(wired: Wired, rank: int, head: int, body: str = "") -> int:
    request = wired.ask(rank, lambda number: Command(number, head, body))
    wired.settle()
    return request


def test_every_server_has_run_the_handler_once_when_the_caller_is_told() -> None:
    ran: list[tuple[int, str, int]] = []
    wired = Wired(2, 3, handlers={7: lambda *told: ran.append(told)})
    request = wired.ask(1, lambda number: Command(number, 7, "größer"))
    while len(ran) < 3:
        assert request not in wired.completed
        wired.deliver()
    wired.settle()
    assert sorted(ran) == [(7, "größer", 0), (7, "größer", 1), (7, "größer", 2)]
    assert wired.completed[request] is None and not wired.failed


def test_what_a_handler_raises_is_raised_at_the_caller_and_the_others_have_run() -> None:
    ran: list[int] = []

    def handler(head: int, body: str, rank: int) -> None:
        ran.append(rank)
        if rank == 1:
            raise LookupError(f"no such thing as {body!r}")

    wired = Wired(1, 3, handlers={0: handler})
    failure = wired.failed[send(wired, 0, 0, "w")]
    assert type(failure) is KvdistError
    assert str(failure) == "server-1: command 0 failed with LookupError: no such thing as 'w'"
    assert sorted(ran) == [0, 1, 2]
    assert send(wired, 0, 0) in wired.failed, "the server goes on after a failure"
    assert not wired.stopped


def test_a_handler_that_would_end_the_server_has_failed() -> None:
    def handler(head: int, body: str, rank: int) -> None:
        if body == "end":
            raise SystemExit(3)

    wired = Wired(1, 1, handlers={7: handler})
    assert str(wired.failed[send(wired, 0, 7, "end")]) == "server-0: command 7 failed with SystemExit: 3"
    assert send(wired, 0, 7) in wired.completed and not wired.stopped


@each(
    "ranks, share",
    [
        ("12", "2 of 3 servers failed: server-1, server-2"),
        ("012", "all 3 servers failed: server-0, server-1, server-2"),
    ],
)
def test_all_servers_that_failed_are_named_with_one_reason_in_full(ranks: str, share: str) -> None:
    def handler(head: int, body: str, rank: int) -> None:
        if str(rank) in body:
            raise LookupError(f"on {rank}")

    wired = Wired(1, 3, handlers={0: handler})
    failure = wired.failed[send(wired, 0, 0, ranks)]
    assert str(failure) == f"server-{ranks[0]}: command 0 failed with LookupError: on {ranks[0]} ({share})"


def test_a_long_wait_names_the_servers_that_have_not_answered() -> None:
    wired = Wired(1, 3, handlers={7: lambda head, body, rank: None})
    request = wired.ask(0, lambda number: Command(number, 7, ""))
    told = []
    while request not in wired.completed:
        wired.now += wired.limits.explain_after_s
        for effect in wired.scheduler.tick(wired.now):
            assert isinstance(effect, Send)
            wired.workers[0].handle(SCHEDULER_MEMBER, effect.message, wired.now)
        told.append(str(wired.workers[0].explain(wired.now)).partition(" for ")[2].partition(" (")[0])
        wired.deliver()
    assert "server-0, server-1, server-2 to finish the command, in command 7 to the servers" in told
    assert "server-1, server-2 to finish the command, in command 7 to the servers" in told
    assert told[-2:] == ["server-2 to finish the command, in command 7 to the servers"] * 2
    wired.settle()
    assert wired.workers[0].explain(wired.now) is None


def test_an_unknown_command_is_an_error_that_lists_the_known_ones_but_not_the_reserved() -> None:
    reserved = HEAD_OF_USERS_MAX + 1
    wired = Wired(1, 2, handlers={12: print, 3: print, reserved: print})
    failure = wired.failed[send(wired, 0, 4)]
    assert "no handler is registered for command 4; known are: 3, 12. " in str(failure)
    assert "server-0: " in str(failure) and "--server-module" in str(failure)


def test_servers_without_handlers_say_that_there_are_none() -> None:
    wired = Wired(1, 1)
    assert "known are: none" in str(wired.failed[send(wired, 0, 4)])


def test_commands_of_two_workers_are_answered_each_to_its_own() -> None:
    def handler(head: int, body: str, rank: int) -> None:
        if body == "bad":
            raise ValueError(body)

    wired = Wired(2, 2, handlers={1: handler})
    good = wired.ask(0, lambda number: Command(number, 1, "good"))
    bad = wired.ask(1, lambda number: Command(number, 1, "bad"))
    wired.settle()
    assert good in wired.completed and bad in wired.failed


def test_a_request_in_line_has_a_label_for_people() -> None:
    wired = Wired(1, 1, handlers={5: print})
    wired.ask(0, lambda number: Command(number, 5, ""))
    wired.lose()
    wired.now += 3.0
    assert "waiting 3.0 s for the scheduler to answer command 5 to the servers" in str(
        wired.workers[0].explain(wired.now)
    )


@each("head", [HEAD_OF_USERS_MAX + 1, (1 << 32) - 1])
def test_a_reserved_command_runs_like_any_other(head: int) -> None:
    ran: list[int] = []
    wired = Wired(1, 1, handlers={head: lambda head, body, rank: ran.append(head)})
    assert send(wired, 0, head) in wired.completed
    assert ran == [head]
