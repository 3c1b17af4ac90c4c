"""What is copied before a push, and what the caller's own memory is good enough for."""

from __future__ import annotations

import numpy as np

from kvdist import kv
from kvdist.core.sharding import cut
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import ALONE_BYTES_MIN, KeyInfo, make_plan
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.backend import Lending
from kvdist.kvstore.push_pull import SETS_KEPT_MAX, Staging, lend
from kvdist.kvstore.results import reaches_another
from kvdist.transport.shared_memory.allocator import HeapAllocator
from tests.cases import each

LARGE = ALONE_BYTES_MIN // 4


def plan_of(*sizes: int, slice_bytes: int = 1 << 20):
    first, infos = 0, []
    for i, size in enumerate(sizes):
        slices = tuple(cut(size, 4, 0, 1, first, slice_bytes))
        first += len(slices)
        infos.append(KeyInfo(f"k{i}", (size,), DType.FLOAT32, slices))
    return make_plan(infos, 1 << 20)


def arrays_of(plan, *factors: int):
    return [[np.arange(info.size, dtype=np.float32) * factor for factor in factors] for info in plan.keys]


def filled(staging: Staging, arrays, lent=None):
    own = staging.fill(arrays, REFERENCE, lent or [None] * len(staging.plan.runs))
    assert not own.marks
    return own.memory, own.buffers


@each("sizes", [(1,), (0, 3, 5), (2, 0, 4, 6), (7, LARGE, 2), (3 * LARGE + 1,)])
@each("factors", [(1,), (1, 2, 4)])
def test_payloads_hold_the_sum_over_devices_slice_by_slice(sizes, factors):
    plan = plan_of(*sizes, slice_bytes=ALONE_BYTES_MIN)
    arrays = arrays_of(plan, *factors)
    payloads, _ = filled(Staging(plan, HeapAllocator(), Traffic()), arrays)
    for run, payload in zip(plan.runs, payloads, strict=True):
        for piece in run.pieces:
            count = piece.stop - piece.start
            found = np.frombuffer(payload, np.float32, count, piece.offset)
            expected = np.arange(piece.start, piece.stop, dtype=np.float32) * sum(factors)
            np.testing.assert_array_equal(found, expected)


def test_buffers_are_used_again_and_a_burst_is_not_kept():
    plan = plan_of(3)
    staging = Staging(plan, HeapAllocator(), Traffic())
    sets = [filled(staging, arrays_of(plan, 1))[1] for _ in range(SETS_KEPT_MAX + 2)]
    assert len({id(buffers[0]) for buffers in sets}) == SETS_KEPT_MAX + 2
    for buffers in sets:
        staging.give_back(buffers)
    again = [filled(staging, arrays_of(plan, 1))[1] for _ in range(SETS_KEPT_MAX + 1)]
    assert len({id(buffers[0]) for buffers in again} - {id(buffers[0]) for buffers in sets}) == 1


def by_socket(rank):
    """No server shares memory."""
    return False


def test_a_large_slice_of_one_array_is_lent_and_takes_no_buffer():
    plan = plan_of(2 * LARGE)
    arrays = arrays_of(plan, 1)
    lent = [lend(run, arrays, Lending.EVERYTHING, by_socket, HeapAllocator()) for run in plan.runs]
    payloads, buffers = filled(Staging(plan, HeapAllocator(), Traffic()), arrays, lent)
    assert buffers == [None]
    assert np.shares_memory(np.frombuffer(payloads[0], np.float32), arrays[0][0])


def test_what_is_small_or_summed_or_without_padding_is_not_lent():
    for plan, factors in ((plan_of(7), (1,)), (plan_of(2 * LARGE), (1, 1)), (plan_of(2 * LARGE + 1), (1,))):
        arrays = arrays_of(plan, *factors)
        assert [lend(run, arrays, Lending.EVERYTHING, by_socket, HeapAllocator()) for run in plan.runs] == [None]


class OwnMemory(HeapAllocator):
    """Calls everything its own."""

    def owns(self, array):
        return True


@each(
    "lending, is_resident, shares, is_lent",
    [
        (Lending.EVERYTHING, False, False, True),  # the socket copies it anyway, and the caller waits
        (Lending.EVERYTHING, False, True, False),  # one copy into shared memory is cheaper
        (Lending.EVERYTHING, True, True, True),
        (Lending.RESIDENT, False, False, False),  # the caller may change it at once
        (Lending.RESIDENT, True, False, True),
        (Lending.RESIDENT, True, True, True),
        (Lending.NOTHING, True, True, False),
    ],
)
def test_what_is_lent_depends_on_who_may_change_it_and_where_it_lies(lending, is_resident, shares, is_lent):
    plan = plan_of(2 * LARGE)
    memory = OwnMemory() if is_resident else HeapAllocator()
    (payload,) = [lend(run, arrays_of(plan, 1), lending, lambda rank: shares, memory) for run in plan.runs]
    assert (payload is not None) == is_lent


def test_a_result_that_is_written_over_another_keys_array_is_seen():
    memory = np.zeros(4 * LARGE, np.float32)
    a, b = memory[: 2 * LARGE], memory[2 * LARGE :]
    assert not reaches_another([[a], [b]], [a, b])
    assert reaches_another([[a], [b]], [b, a])
    assert reaches_another([[a], [b]], [np.zeros_like(a), memory[LARGE : 3 * LARGE]])
    assert not reaches_another([[a], []], [np.zeros_like(a), b])


def test_results_may_be_written_over_each_others_gradients():
    with kv.create("dist") as store:
        store.init(["a", "b"], [np.zeros(1 << 20, np.float32)] * 2)
        a, b = np.full(1 << 20, 1, np.float32), np.full(1 << 20, 2, np.float32)
        store.pushpull(["a", "b"], [a, b], out=[b, a])
        assert (b == 1).all() and (a == 2).all()


def test_a_result_in_place_of_a_lent_array_is_right_at_every_step():
    with kv.create("dist") as store:
        store.init("w", np.zeros(3 << 20, np.float32))
        for step in range(4):
            array = np.full(3 << 20, step, np.float32)
            store.pushpull("w", array)
            assert (array == step).all()
