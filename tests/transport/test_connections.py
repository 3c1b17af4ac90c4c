"""Descriptors that the system gives out again, and routing ids that count: told apart without a socket."""

from __future__ import annotations

from kvdist.transport.connections import Connections, is_older
from tests.cases import each


def name(number: int) -> bytes:
    return b"\0" + (number % (1 << 32)).to_bytes(4, "big")


def opened(*descriptors: int) -> Connections:
    connections = Connections()
    for descriptor in descriptors:
        connections.accepted(descriptor)
        connections.handshaken()
    return connections


def test_a_closed_descriptor_ends_the_route_that_spoke_over_it() -> None:
    connections = opened(14, 15)
    assert connections.meet(name(1), 14) is None
    assert connections.meet(name(2), 15) is None
    assert connections.closed(14) == name(1)
    assert connections.closed(15) == name(2)


def test_the_last_word_of_a_connection_that_is_over_ends_its_route_at_once() -> None:
    connections = opened(14)
    assert connections.closed(14) is None
    assert connections.meet(name(1), 14) == name(1)


def test_who_is_heard_before_he_is_said_to_be_accepted_lives() -> None:
    connections = Connections()
    assert connections.meet(name(1), 14) is None and connections.have_spoken
    assert not connections.accepted(14)
    connections.handshaken()
    assert connections.closed(14) == name(1)
    assert connections.strangers == 0
    assert connections.meet(name(2), 14) is None  # on the same descriptor again
    assert connections.closed(14) == name(2)


def test_a_stranger_leaves_no_last_word_for_the_next_owner_of_his_descriptor() -> None:
    connections = Connections()
    assert connections.accepted(14)
    connections.refused()
    assert connections.closed(14) is None
    assert connections.meet(name(1), 14) is None


def test_a_last_word_is_spoken_once() -> None:
    connections = opened(14)
    connections.closed(14)
    assert connections.meet(name(1), 14) == name(1)
    assert connections.meet(name(2), 14) is None


def test_each_of_several_guests_that_had_one_descriptor_has_a_last_word() -> None:
    connections = Connections()
    for _ in range(3):
        connections.accepted(14)
        connections.handshaken()
        connections.closed(14)
    assert [connections.meet(name(number), 14) for number in (1, 2, 3)] == [name(1), name(2), name(3)]
    assert connections.meet(name(4), 14) is None


def test_strangers_whom_several_threads_refuse_at_the_same_time_are_counted_once_each() -> None:
    connections = opened(14)
    connections.meet(name(1), 14)
    for descriptor in (15, 16):
        connections.accepted(descriptor)
    connections.refused()
    connections.refused()
    for descriptor in (14, 15, 16):  # the end of a peer lies between
        connections.closed(descriptor)
    assert connections.strangers == 2


@each("start", [7, (1 << 32) - 1])
def test_of_two_routes_on_one_descriptor_the_older_is_over_whoever_is_heard_first(start: int) -> None:
    old, new = name(start), name(start + 1)
    for order in ([old, new], [new, old]):
        connections = opened(14)
        connections.closed(14)
        connections.accepted(14)
        connections.handshaken()
        assert connections.meet(order[0], 14) is None
        assert connections.meet(order[1], 14) == old
        assert connections.closed(14) == new


def test_the_end_of_an_old_connection_does_not_touch_the_new_owner_of_its_descriptor() -> None:
    connections = opened(14)
    connections.meet(name(1), 14)
    assert connections.closed(14) == name(1)
    connections.accepted(14)
    connections.handshaken()
    assert connections.meet(name(2), 14) is None
    assert connections.closed(14) == name(2)


def test_routing_ids_are_ordered_across_their_wrap_around() -> None:
    assert is_older(name(-1), name(0)) and not is_older(name(0), name(-1))
    assert is_older(name(1), name(2)) and not is_older(name(2), name(1))


def test_only_connections_without_a_handshake_are_strangers() -> None:
    connections = opened(14)
    connections.closed(14)
    assert connections.strangers == 0
    connections.accepted(14)  # announced as failed, then closed
    connections.refused()
    connections.closed(14)
    assert connections.strangers == 1
    connections.accepted(14)  # closed without being announced
    connections.closed(14)
    assert connections.strangers == 2


def test_a_stranger_that_waits_does_not_make_a_stranger_of_the_peer_behind_it() -> None:
    connections = Connections()
    connections.accepted(14)
    connections.accepted(15)
    connections.handshaken()
    connections.meet(name(1), 15)
    assert connections.closed(15) == name(1)
    connections.refused()
    connections.closed(14)
    assert connections.strangers == 1
