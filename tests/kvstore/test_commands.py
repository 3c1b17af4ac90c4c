"""Handlers are registered by number, and what cannot be a command is refused at the call."""

from __future__ import annotations

import pytest

from kvdist import KvdistError, StoreClosed, kv
from kvdist.kvstore import registry
from tests.cases import each


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    monkeypatch.setattr(registry, "HANDLERS", {})
    return registry.HANDLERS


def test_a_registered_function_stays_itself(handlers):
    def note(head, body, rank):
        pass

    assert kv.register_command(3)(note) is note
    assert handlers == {3: note}


def test_the_same_definition_again_replaces_the_old_one_and_another_may_not(handlers):
    def made(answer):
        @kv.register_command(3)
        def note(head, body, rank):
            return answer

        return note

    made(1)
    second = made(2)
    assert handlers[3] is second
    with pytest.raises(ValueError, match=r"command 3 belongs to .*note: choose another number"):
        kv.register_command(3)(lambda head, body, rank: None)


@each("store", ["local", "dist"])
@each(
    "head, body, error, words",
    [
        ("3", "", TypeError, "the number of a command is an int, not str"),
        (True, "", TypeError, "the number of a command is an int, not bool"),
        (-1, "", ValueError, "from 0 to 2147483647, not -1"),
        (1 << 31, "", ValueError, "from 0 to 2147483647, not 2147483648"),
        (3, b"x", TypeError, "the body of a command is a str, not bytes"),
        (3, "\udcff", ValueError, "cannot be written as UTF-8"),
        (3, "é" * 32768 + "x", ValueError, "has 65537 bytes of UTF-8, more than the limit of 65536"),
    ],
)
def test_what_is_no_command_is_refused_at_the_call(store, head, body, error, words):
    with kv.create(store) as one, pytest.raises(error, match=words):
        one.send_command_to_servers(head, body)


@each("handler", [None, "note", 3])
def test_what_cannot_be_called_is_no_handler(handler):
    with pytest.raises(TypeError, match="a command's handler is a function of"):
        kv.register_command(3)(handler)


def test_a_local_store_has_no_servers_and_does_nothing():
    store = kv.create("local")
    assert store.send_command_to_servers(3, "x") is None
    store.close()
    with pytest.raises(StoreClosed):
        store.send_command_to_servers(3, "x")


def test_the_embedded_server_runs_what_this_process_has_registered(monkeypatch):
    ran = []
    handlers = {3: lambda *told: ran.append(told)}
    monkeypatch.setattr("kvdist.runtime.cluster.HANDLERS", handlers)
    with kv.create("dist") as store:
        store.send_command_to_servers(3, "é" * 32768)
        store.send_command_to_servers(3)
        with pytest.raises(KvdistError, match=r"server-0: no handler is registered for command 4; known are: 3\. "):
            store.send_command_to_servers(4)
    assert ran == [(3, "é" * 32768, 0), (3, "", 0)]
