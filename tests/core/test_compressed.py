"""Encoded contributions between pure machines: how they leave, how they are counted, and values that come as halves."""

from __future__ import annotations

import math

import numpy as np

from kvdist.core.policy import SYNC
from kvdist.core.server.block import Block
from kvdist.core.server.decoding import decoded
from kvdist.core.sharding import cut
from kvdist.core.worker.requests import DeclareKeys, Encoded, KeyInfo, Run, RunKind, RunPart, Transfer, make_plan
from kvdist.core.worker.transfers import DECODED_BYTES_MAX, Outbox
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer.base import Extent
from kvdist.optimizer.compression import Half, TopK, TwoBit, encode
from kvdist.protocol.arrays import Coded, PayloadView, as_octets, views
from kvdist.protocol.messages import CompressedPush, Flag, Push
from tests.cases import each
from tests.core.wired import Wired

TWO_BIT = TwoBit(0.5)
OWN = ((math.nan, math.nan, math.nan),)


def encoded_run(infos, values, codec=TWO_BIT):
    """One push of these keys, all on one server; None is an empty contribution."""
    plan = make_plan(infos, 1 << 30)
    data = []
    for run in plan.runs:
        payload, entries = b"", []
        for piece in run.pieces:
            value = values[piece.index]
            part = None if value is None else value[piece.start : piece.stop]
            octets, own = (b"", 0) if part is None else encode(codec, part, np.zeros_like(part), REFERENCE)
            payload += bytes(octets)
            entries.append(own)
        flags = np.array([0 if values[i] is not None else Flag.EMPTY for i in run.key_of], np.uint8)
        how = Encoded(codec.encoding, codec.parameter, np.array(entries, np.uint32))
        data.append(Run(run, memoryview(payload), (), flags, OWN, encoded=how))
    return data


def one(number, size, codec=TWO_BIT, kind=RunKind.PUSH, value=1.0):
    """A run of one slice; slice and run have the same number."""
    info = KeyInfo(f"k{number}", (size,), DType.FLOAT32, tuple(cut(size, 4, 0, 1, number, 1 << 30)), is_compressed=True)
    (run,) = encoded_run([info], [np.full(size, value, np.float32)], codec)
    return begun(run, number, kind)


def begun(run, number, kind=RunKind.PUSH):
    steps = np.arange(number, number + len(run.plan.ids), dtype=np.uint32)
    run.begin(number, Transfer(1, kind, kind.value, [run]), steps, steps)
    return run


def plain(number, size):
    info = KeyInfo(f"k{number}", (size,), DType.FLOAT32, tuple(cut(size, 4, 0, 1, number, 1 << 30)))
    (plan,) = make_plan([info], 1 << 30).runs
    return begun(Run(plan, memoryview(bytes(plan.nbytes)), settings=OWN), number)


def taken(*runs):
    outbox = Outbox(0, 1 << 30, 1 << 20)
    for run in runs:
        outbox.add(RunPart(run))
    messages = []
    while (pair := outbox.next_message()) is not None:
        messages.append(pair[0])
    return messages


def elements(message):
    return [array.tolist() for array in views(decoded(message, REFERENCE).arrays)]


def test_encoded_runs_leave_together_and_arrive_as_their_elements():
    (message,) = taken(one(1, 3), one(2, 17, value=-2), one(3, 0))
    assert isinstance(message, CompressedPush) and message.ids.tolist() == [1, 2, 3]
    assert elements(message) == [[0.5] * 3, [-0.5] * 17, []]


def test_what_is_encoded_otherwise_leaves_in_another_message():
    messages = taken(one(1, 3), plain(2, 3), one(3, 3, TwoBit(0.25)), one(4, 3), one(5, 3, Half(DType.FLOAT16)))
    found = {tuple(message.ids.tolist()): type(message) for message in messages}
    assert found == {(1, 4): CompressedPush, (2,): Push, (3,): CompressedPush, (5,): CompressedPush}
    assert [message.pull for message in taken(one(1, 3), one(2, 3, kind=RunKind.PUSHPULL))] == [False, True]


def test_a_message_is_not_more_than_a_server_decodes_at_once():
    size = DECODED_BYTES_MAX // 4 // 2
    messages = taken(*(one(number, size) for number in range(5)))
    assert [len(message.ids) for message in messages] == [2, 2, 1]


def test_some_slices_of_a_run_leave_alone():
    infos = [KeyInfo(n, (size,), DType.FLOAT32, tuple(cut(size, 4, 0, 1, n, 1 << 30)), is_compressed=True)
             for n, size in enumerate([3, 40, 5, 16])]  # fmt: skip
    values = [np.full(info.size, info.key - 1.0, np.float32) for info in infos]
    values[2] = None
    (run,) = encoded_run(infos, values, TopK(0.5))
    outbox = Outbox(0, 1 << 30, 1 << 20)
    outbox.add(RunPart(begun(run, 1), [1, 2, 3]))
    (message, credit) = outbox.next_message()
    assert message.ids.tolist() == [1, 2, 3] and message.arrays.entries.tolist() == [20, 0, 8]
    assert credit.nbytes == message.arrays.nbytes == 8 * 28
    found = elements(message)
    assert found[0].count(0) == 40 and found[1] == [] and found[2].count(2) == 8


def test_padding_between_decoded_arrays_is_zero():
    (message,) = taken(one(1, 3), one(2, 1), one(3, 4))
    (frame,) = decoded(message, REFERENCE).arrays.frames
    assert np.frombuffer(frame, np.float32).tolist() == [0.5, 0.5, 0.5, 0, 0.5, 0, 0.5, 0.5, 0.5, 0.5]


def test_the_bytes_of_each_array_are_found_in_several_frames():
    first, second = (
        encode(TwoBit(0.5), np.full(n, 1, np.float32), np.zeros(n, np.float32), REFERENCE) for n in (3, 40)
    )
    counts = np.array([3, 40], np.uint32)
    coded = Coded(counts, counts, 1, 0.5, (first[0].data, second[0].data))
    assert [len(one) for one in PayloadView(as_octets(coded)).arrays(0, 2)] == [4, 12]


# Between machines.


def declared(wired, keys, pulled_as=DType.FLOAT32):
    """All workers declare, worker 0 gives zeros, and everything is settled."""
    shapes = tuple((size,) for size in keys.values())
    kinds = (DType.FLOAT32,) * len(keys)
    for rank in range(len(wired.workers)):
        narrow = (pulled_as,) * len(keys)
        wired.ask(rank, lambda n: DeclareKeys(n, 0, "sync", tuple(keys), shapes, kinds, narrow))  # noqa: B023
    wired.settle()
    wired.give(0, {key: np.zeros(size, np.float32) for key, size in keys.items()})
    wired.settle()


def pushed(wired, rank, values, kind=RunKind.PUSH, codec=TWO_BIT):
    infos = [wired.infos[key] for key in values]
    runs = encoded_run(infos, [None if v is None else np.array(v, np.float32) for v in values.values()], codec)
    return wired.ask(rank, lambda n: Transfer(n, kind, "push", runs))


def pulled(wired, rank, *keys):
    request = wired.pull(rank, *keys)
    wired.settle()
    assert request in wired.completed, wired.failed
    return [wired.results[request][key].tolist() for key in keys]


def test_encoded_and_plain_contributions_make_one_round():
    wired = Wired(3, 2)
    wired.settle()
    declared(wired, {"a": 3, "b": 5})
    pushed(wired, 0, {"a": [1, -1, 0], "b": [9] * 5})
    pushed(wired, 1, {"a": [0.1, 7, 0], "b": None})
    wired.push(2, {"a": [10, 20, 30], "b": [1, 2, 3, 4, 5]})
    wired.settle()
    assert pulled(wired, 0, "a", "b") == [[10.5, 20, 30], [1.5, 2.5, 3.5, 4.5, 5.5]]


def test_encoded_pushes_that_come_together_are_of_one_block():
    wired = Wired(2, 1)
    wired.settle()
    declared(wired, {"a": 3, "b": 5, "c": 0, "d": 1}, DType.FLOAT16)
    for step in range(1, 4):
        for rank in range(2):
            pushed(wired, rank, {"a": [1] * 3, "b": [-step] * 5, "c": [], "d": [0]}, codec=Half(DType.BFLOAT16))
        wired.settle()
        assert [(len(block), block.version) for block in wired.servers[0].shard.blocks] == [(4, step)]
        assert pulled(wired, 1, "a", "b", "c", "d") == [[2] * 3, [-2 * step] * 5, [], [0]]


def test_what_is_encoded_does_not_go_to_who_sums_for_its_host():
    wired = Wired(3, 1, hosts=["one", "one", "one"], local_reduce="on")
    wired.settle()
    declared(wired, {"a": 3})
    wired.log.clear()
    for rank in range(3):
        pushed(wired, rank, {"a": [1, -1, 0]})
    wired.settle()
    sent = [line for line in wired.log if "CompressedPush" in line]
    assert len(sent) == 3 and all("-> server-0" in line for line in sent)
    assert not any("JoinedPush" in line for line in wired.log)
    assert pulled(wired, 2, "a") == [[1.5, -1.5, 0]]


def test_a_slice_of_another_size_is_refused_alone():
    wired = Wired(1, 1)
    wired.settle()
    declared(wired, {"a": 3, "b": 5})
    wrong = KeyInfo("a", (4,), DType.FLOAT32, tuple(cut(4, 4, 0, 1, wired.infos["a"].slices[0].number, 1 << 30)))
    runs = encoded_run([wrong, wired.infos["b"]], [np.ones(4, np.float32), np.ones(5, np.float32)])
    request = wired.ask(0, lambda n: Transfer(n, RunKind.PUSH, "push", runs))
    wired.settle()
    assert "another size" in str(wired.failed[request])
    assert wired.servers[0].shard.blocks.of(wired.infos["b"].slices[0].number)[0].version == 1


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_values_come_back_as_halves_and_are_widened(dtype):
    wired = Wired(2, 2)
    wired.settle()
    declared(wired, {"a": 3, "b": 70_001}, dtype)
    assert wired.infos["a"].pulled_as is dtype
    third = np.full(70_001, 1 / 3, np.float32)
    for rank in range(2):
        pushed(wired, rank, {"a": third[:3], "b": third}, RunKind.PUSH, TopK(1.0))
    wired.settle()
    expected = REFERENCE.to_float32(REFERENCE.from_float32(third[:1] * 2, dtype), dtype)[0]
    a, b = pulled(wired, 1, "a", "b")
    assert set(a) == set(b) == {float(expected)} and len(b) == 70_001


def test_workers_that_want_values_in_different_types_are_told():
    wired = Wired(2, 1)
    wired.settle()
    for rank, narrow in ((0, DType.FLOAT16), (1, DType.FLOAT32)):
        wired.ask(rank, lambda n: DeclareKeys(n, 0, "sync", ("a",), ((3,),), (DType.FLOAT32,), (narrow,)))  # noqa: B023
    wired.settle()
    texts = {str(error) for error in wired.failed.values()}
    assert len(wired.failed) == 2 and len(texts) == 1 and "come back as float16 to worker-0" in texts.pop()


class Counting:
    """Casts, and counts how often."""

    def __init__(self):
        self.casts = 0

    def from_float32(self, values, dtype, out):
        self.casts += 1
        return REFERENCE.from_float32(values, dtype, out)


def test_a_version_is_cast_once_and_what_is_read_is_not_written():
    kernels = Counting()
    extents = [Extent("a", (3,)), Extent("b", (1,))]
    block = Block.of(0, [0, 1], extents, [3, 1], DType.FLOAT32, SYNC, kernels, pulled_as=DType.FLOAT16)
    block.replace([np.array([1, 2, 3], np.float32), np.array([4], np.float32)])
    first = block.outgoing
    assert block.outgoing is first and kernels.casts == 2
    assert first.array.tolist() == [1, 2, 3, 0, 4] and len(first.payload) == 16
    first.leases += 1
    block.replace([np.full(3, 9, np.float32), np.full(1, 9, np.float32)])
    second = block.outgoing
    assert second is not first and first.array[0] == 1
    first.leases -= 1
    block.replace([np.full(3, 7, np.float32), np.full(1, 7, np.float32)])
    assert block.outgoing is first
