"""One valid packet of every kind, and what it means that two packets are the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdist.nodes import UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol import messages as m
from kvdist.protocol.arrays import Arrays, Coded, offsets
from kvdist.protocol.messages import CompressedPush, Peer

NAN = math.nan


def u32(*values: int) -> Any:
    return np.array(values, np.uint32)


def u8(*values: int) -> Any:
    return np.array(values, np.uint8)


def arrays(dtypes: list[int], counts: list[int]) -> Arrays:
    """Arrays whose payload counts up, padding included."""
    total = offsets(u8(*dtypes), u32(*counts))[1]
    return Arrays(u8(*dtypes), u32(*counts), bytes(index % 251 for index in range(total)))


def messages() -> list[m.Message]:
    placement = m.Placement((0, 1), (1, m.Placement.CUT), 4 << 20)
    description = {"name": "adam", "beta1": 0.9, "clip_gradient": None, "lazy": True, "begin": -3}
    peers = (
        Peer(Member(server(0), 1 << 63), "höst", 4242, "tcp://[::1]:9000"),
        Peer(Member(worker(2), 7), "", 0, "", 1, 8),
    )
    keys: tuple[int | str, ...] = ("fc1.weight", -(1 << 63))
    return [
        m.Hello(-1, "node7", 4242, "tcp://10.0.0.7:9000", 2, 3, "0.1.0", 4),
        m.Welcome(1, (1 << 64) - 1, m.OnLoss.CONTINUE, 60.0, 1),
        m.Rejected("the seat is taken", True),
        m.Roster(peers, 3, (Member(worker(1), 7), Member(worker(4), 1 << 63)), (Member(worker(4), 1 << 63),), (2,),
                 (m.Fate(1, 1 << 63, 0, 6, 7, 2, 9, 1 << 33),), 2, (0, 3)),
        m.Declare(1 << 40, 0, "sync", keys, ((3, 0, 5), ()), (1, 4), (3, 4), ("rows", ""), 9),
        m.Seen(3, (m.Fate(1, 1 << 63, 0, 6, 7, 2, 9, 1 << 33),), u32(5, 6), True, (1 << 32) - 1, 3),
        m.Placed(5, m.Placement((0, 1), (m.Placement.CUT_AT_ROWS, m.Placement.CUT), 4 << 20), (0, 1)),
        m.Assign(6, 1, "async", keys, ((3, 5), (1 << 37,)), (8, 1), (8, 4), ("", ""), placement, 2, (1, 3)),
        m.Configure(7, 0, dict(description)),
        m.SetOptimizer(8, 0, dict(description)),
        m.Done(9),
        m.Failed(10, 1, "shapes differ"),
        m.Barrier(11, 2, "8 parameters", 1, 7, True),
        m.InitValues(u32(1, 1), u32(0, 9), arrays([1, 3], [3, 5])),
        m.Push(True, u32(4, 4, 5), u32(0, 11, 12), u32(2, 2, 0), u32(2, 2, 1), u32(32, 0, 1), u8(0, 1, 6),
               ((0.5, NAN, 0.25), (NAN, 0.0, 1.0)), u8(0, 1, 1), arrays([1, 1, 8], [3, 0, 13])),
        m.Pull(u32(1, 2), u32(3, 4), u32(5, 6), u32(7, 8)),
        m.Values(u32(1), u32(3), u32(5), arrays([7], [1])),
        m.Counted(u32(1, 1 << 31), u32(3, (1 << 32) - 1), u32(0, 8)),
        m.Refused(u32(1), u32(3), 3, "shape"),
        m.JoinedPush(True, (m.Contributor(2, 1 << 63, 1, 8), m.Contributor(0, 7, 5, 0)), u32(4, 4), u32(0, 3),
                     u32(1, 1), u8(4, 1), ((0.5, NAN, 0.25),), u8(0, 0), arrays([1, 1], [3, 0])),
        CompressedPush(True, u32(4, 4, 5), u32(0, 11, 12), u32(2, 2, 0), u32(2, 2, 1), u32(32, 0, 1), u8(0, 1, 6),
                       ((0.5, NAN, 0.25), (NAN, 0.0, 1.0)), u8(0, 1, 1),
                       Coded(u32(17, 0, 5), u32(17, 0, 5), 1, 0.5, bytes(range(16)))),
        m.HandedBack(u32(1, 2), u32(3, 4)),
        m.ReplaceValues(u32(2), u32(7), arrays([2], [3])),
        m.PullState(u32(1, 2), u32(3, 4), u32(5, 6), u8(0, 255)),
        m.ReplaceState(u32(2, 2), u32(7, 7), u8(0, 1), arrays([2, 1], [3, 5])),
        m.InitRows(u32(3, 3), u32(8, 9), u8(m.MORE, 0), arrays([7, 1, 7, 3], [2, 6, 0, 0])),
        m.PushRows(u32(4, 4, 5), u32(0, 11, 12), u32(2, 2, 0), u32(2, 2, 1), u32(32, 0, 1), u8(4, 1, 132),
                      ((0.5, NAN, 0.25), (NAN, 0.0, 1.0)), u8(0, 1, 1), arrays([7, 1, 7, 1, 7, 8], [3, 9, 0, 0, 1, 5])),
        m.PullRows(u32(1, 2), u32(3, 4), u32(5, 6), u32(7, 8), arrays([7, 7], [2, 0])),
        m.Alive(),
        m.StepTimes(3, 96, 20_000, 1_000_000, 1 << 40, 0),
        m.Ack(True),
        m.Waiting("push 'fc1' (step 8)", (0, 2), 12.5, 7),
        m.Goodbye(12, "boom"),
        m.Abort(m.ErrorCode.PEER_LOST, "worker-3", "node7", "killed by signal 9", -1, "worker-3 is gone"),
        m.Stop(),
        m.Blocked(3, "pull of key 'w'", (7, 1 << 40), (2,), 12, u32(0, 12, 14), u32(1, 2, 0), u32(0, 3, 0)),
        m.CheckBlocked(),
        m.Claim(13, 1, "/data/run/step-5", ("weights",)),
        m.Claimed(13, 2, "0123456789abcdef", ""),
        m.Prepare(14, 1, "/data/run/step-5", ("weights", "states"), "0123456789abcdef"),
        m.MarkPushes(1, 2, "/data/run/step-5", ("weights", "states"), "0123456789abcdef", 5, True, u32(3, 4),
                     u32(0, 7), 7),
        m.Save(13, 1, "/data/run/step-5", ("weights",), 2, "0123456789abcdef", 5, 3, 2,
                    m.SavedFile("worker-0-ab.json", 9, "ab"), "", 8),
        m.Saved(1, 2, m.SavedFile("", 0, ""), "the disk is full"),
        m.Load(14, 1, "/data/run/step-5", ("states",), "no such folder", 8),
        m.Restore(15, 1, "/data/run/step-5", ("weights", "states")),
        m.TakeRestored(16, 1, 2),
        m.DropRestored(17, 1),
        m.Join(19, 3, (0, 2)),
        m.Counters(u32(3, 4), u32(8, m.LATER), u32(0, 200)),
        m.Ready(1),
        m.Command(13, 7, "größer"),
        m.Perform(14, (1 << 32) - 1, ""),
        m.Lease(18, 1, 2, 1 << 33, 3, True, 7, 32, 128, 96, 40, False),
        m.Leased(18, 2, 64, 1 << 33, False, 41, True, u32(0, 2), u32(1, 1)),
        m.Used(20, 1 << 33, True),
        m.Progress(3, 40, 1 << 33, m.DueWhen.QUORUM, 512, False, True),
        m.Due(3, 40, True, 1 << 33),
        m.NotDue(3, 40, (1, 2)),
        m.TakeSnapshot(1, 40, "/data/run/step-40", "0123456789abcdef"),
        m.SnapshotTaken("/data/run/step-40", m.SavedFile("", 0, ""), "disk full", (m.Trained(1 << 63, 1 << 33),)),
        m.Rewind(2, 40, "server-1 was lost"),
        m.Quiet(2),
        m.Rewound(2, u32(3, 4), u32(40, 0)),
        m.Replicate(u32(0, 11), 7, (m.Contributor(2, 1 << 63, 6, 32), m.Contributor(3, 9, 6, 0)), ((0.5, NAN, 1.0),),
                    -1, "", False, True, arrays([1, 1], [3, 5])),
        m.Fill(u32(4, 4), u8(0, 254), 7, (m.Standing(2, 8, 1 << 40, m.LATER, 5, 7, 3, "not finite"),), 8, -3, True,
               "zeros", True, arrays([2, 1], [2, 3])),
        m.Replicated(1 << 33),
    ]  # fmt: skip


def stamped(message: m.Message) -> m.Packet:
    source = Member(NodeId(Role.SERVER, UNRANKED), 0x0123456789ABCDEF)
    return m.Packet(m.Stamp(0x1A2B3C4D, 2, source, 3, 7 if message.SEQUENCED else 0, 6, 9), message)


def difference(ours: Any, theirs: Any) -> str:
    """Where two values differ, types included; '' when they do not."""
    if isinstance(ours, np.ndarray):
        same = isinstance(theirs, np.ndarray) and ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
        return "" if same else f"{ours!r} is not {theirs!r}"
    if isinstance(ours, bytes | bytearray | memoryview):
        return "" if bytes(ours) == bytes(theirs) else "payloads differ"
    if type(ours) is not type(theirs):
        return f"{type(ours)} is not {type(theirs)}"
    if dataclasses.is_dataclass(ours):
        pairs = [
            (field.name, getattr(ours, field.name), getattr(theirs, field.name)) for field in dataclasses.fields(ours)
        ]
    elif isinstance(ours, tuple) and len(ours) == len(theirs):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, dict):
        pairs = [("names", tuple(ours), tuple(theirs))] + [(name, ours[name], theirs.get(name)) for name in ours]
    else:
        equal = ours == theirs or (ours != ours and theirs != theirs)
        return "" if equal else f"{ours!r} is not {theirs!r}"
    found = [(name, difference(left, right)) for name, left, right in pairs]
    return "; ".join(f"{name}: {text}" for name, text in found if text)


@pytest.fixture(scope="session", name="difference")
def difference_fixture() -> Callable[[Any, Any], str]:
    """The function that says where two packets differ."""
    return difference


@pytest.fixture(scope="session", name="stamped")
def stamped_fixture() -> Callable[[m.Message], m.Packet]:
    """The function that puts a valid stamp on a message."""
    return stamped


@pytest.fixture(scope="session")
def examples() -> dict[str, m.Packet]:
    """A valid packet of each kind, by the name of its class."""
    return {type(message).__name__: stamped(message) for message in messages()}
