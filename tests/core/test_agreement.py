"""Agreements: who is missing, what all are answered, under any story of speaking, repeating, leaving and dying."""

from __future__ import annotations

import random
from functools import partial

from kvdist.core.machine import Effect, Send
from kvdist.core.scheduler.agreement import Agreement, Questions
from kvdist.nodes import Member, NodeId, server, worker
from kvdist.protocol.messages import ErrorCode, Failed, Perform
from tests.cases import each


def failed(reason: str, request: int) -> Failed:
    return Failed(request, ErrorCode.INTERNAL, reason)


def live(*nodes: NodeId, incarnation: int = 1) -> dict[NodeId, Member]:
    return {node: Member(node, incarnation) for node in nodes}


def sent(effects: list[Effect]) -> list[tuple[str, object]]:
    answers = []
    for effect in effects:
        assert isinstance(effect, Send)
        answers.append((str(effect.to), effect.message))
    return answers


def test_an_agreement_of_both_waits_for_the_workers_first_and_then_for_the_servers() -> None:
    workers, servers = live(worker(0), worker(1)), live(server(1), server(0))
    agreement: Agreement[str] = Agreement("the save", "save", 2.0, workers, (workers, servers))
    agreement.ask(workers[worker(0)], 7)
    agreement.say(workers[worker(0)], "x")
    (wait,) = agreement.waits()
    assert wait.sentence(5.0) == "waiting 3.0 s for worker-1 to save"
    agreement.say(workers[worker(1)], "x")
    (wait,) = agreement.waits()
    assert wait.sentence(5.0) == "waiting 3.0 s for server-0, server-1 to finish the save" and not wait.workers
    for member in servers.values():
        agreement.say(member, "")
    assert agreement.is_complete
    (wait,) = agreement.waits()
    assert wait.sentence(5.0) == "waiting 3.0 s for the scheduler to finish the save"


def test_without_a_quorum_the_first_speaker_decides() -> None:
    workers = live(worker(0), worker(1))
    agreement: Agreement[str] = Agreement("the optimizer", "", 0.0, workers)
    agreement.say(workers[worker(1)], "sgd")
    assert agreement.is_complete


def test_members_that_differ_are_named_with_what_each_says() -> None:
    workers = live(worker(0), worker(1), worker(2))
    agreement: Agreement[str] = Agreement("barrier 0", "", 0.0, workers, (workers,))
    for rank, text in ((2, "a1"), (0, "a2"), (1, "b3")):
        agreement.say(workers[worker(rank)], text)
    assert agreement.disagreement(len) == []
    assert agreement.disagreement(lambda text: text[0]) == [(2, "a"), (0, "a"), (1, "b")]


def test_an_answered_question_of_all_servers_goes_on_once_with_the_first_failure() -> None:
    servers = live(server(1), server(0), server(2))
    workers, outcomes = live(worker(0)), []
    questions = Questions(servers)
    cause: Agreement[str] = Agreement("the command", "", 1.0, workers)
    cause.ask(workers[worker(0)], 5)

    def then(failure: str) -> list[Effect]:
        outcomes.append(failure)
        return cause.answer(partial(failed, failure))

    asked = sent(questions.ask(Perform(0, 3, ""), then, cause))
    assert [name for name, _ in asked] == ["server-0", "server-1", "server-2"]
    assert questions.answered(servers[server(2)], 1, "server-2: no") == []
    assert questions.answered(servers[server(2)], 1, "") == [], "it has answered"
    assert questions.answered(servers[server(0)], 9, "") == [], "there is no such question"
    (wait,) = cause.waits()
    assert wait.sentence(2.0) == "waiting 1.0 s for server-0, server-1 to finish the command"
    questions.answered(servers[server(0)], 1, "server-0: neither")
    effects = questions.answered(servers[server(1)], 1, "")
    assert sent(effects) == [("worker-0", Failed(5, ErrorCode.INTERNAL, "server-2: no"))]
    assert questions.answered(servers[server(1)], 1, "") == [] and outcomes == ["server-2: no"]


@each("seed", range(200))
def test_any_story_ends_with_one_answer_to_each_request_of_all_that_are_there(seed: int) -> None:
    """Members speak, ask, repeat, leave, die and come back, in any order; a plain model says what must be."""
    draw = random.Random(seed)
    workers = live(*map(worker, range(draw.randint(1, 4))))
    servers = live(*map(server, range(draw.randint(0, 3))))
    groups = draw.choice([(workers,), (servers,), (workers, servers), ()])
    agreement: Agreement[int] = Agreement("it", "act", 0.0, workers, groups)
    said: dict[Member, int] = {}
    open_requests: set[tuple[Member, int]] = set()
    answers: list[tuple[Member, int]] = []
    answer, requests = "", 0

    def note(effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Send) and isinstance(effect.message, Failed)
            assert effect.message.reason == answer, "all get one answer"
            answers.append((effect.to, effect.message.request))

    expected: set[tuple[Member, int]] = set()
    for step in range(draw.randint(1, 40)):
        members = [*workers.values(), *servers.values()]
        if not members:
            break
        member = draw.choice(members)
        group = workers if member.node in workers else servers
        match draw.choice(["speak", "speak", "repeat", "ask", "ask again", "leave", "die", "settle"]):
            case "speak":
                said[member] = draw.randint(0, 1)
                agreement.say(member, said[member])
            case "repeat" if member in said:
                agreement.say(member, said[member])
            case "ask" if group is workers:
                requests += 1
                if not answer:
                    open_requests.add((member, requests))
                else:
                    expected.add((member, requests))
                note(agreement.ask(member, requests))
            case "ask again" if open_requests and not answer:
                note(agreement.ask(*draw.choice(sorted(open_requests, key=lambda one: one[1]))))
            case "leave":
                del group[member.node]
            case "die":  # another process takes the rank
                group[member.node] = Member(member.node, 100 + step)
            case "settle" if not answer:
                answer = f"answer of step {step}"
                expected |= {one for one in open_requests if one[0] in workers.values()}
                note(agreement.answer(partial(failed, answer)))

        lacking = [[one for one in group.values() if one not in said] for group in groups]
        first = next((sorted(one.node.rank for one in lacks) for lacks in lacking if lacks), [])
        assert agreement.is_complete == (not first)
        assert [node.rank for node in agreement.missing()] == first
        waiting = set() if answer else {one for one in open_requests if one[0] in workers.values()}
        assert {(wait.member, wait.request) for wait in agreement.waits()} == waiting
        assert all([node.rank for node in wait.missing] == first for wait in agreement.waits())
        agreement.validate()
    assert len(answers) == len(set(answers)) and set(answers) == expected
