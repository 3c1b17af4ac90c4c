"""Sums and updates on a device for arrays of the host: the bits of the host, and no byte over the bus too many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Optimizer, Updater, create
from kvdist.optimizer.base import Piece
from kvdist.optimizer.offload import SUMMED_BYTES_MIN, DeviceUpdater, arithmetic_on, offloaded
from kvdist.optimizer.states import Part
from tests.cases import each
from tests.devices import NumpyDevice
from tests.optimizer.formulas import NO_DECAY, TABLE, shape_of

F32 = DType.FLOAT32
SIZE = 1000
EVERY = [case for case in TABLE if case[0] != "sgld"]
ELEMENTWISE = [("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {"clip_gradient": 2.0}), ("ftrl", {}), ("test", {})]


def stored(values, dtype):
    narrow = np.asarray(values).astype(np.float32)
    return REFERENCE.from_float32(narrow, dtype) if dtype is DType.BFLOAT16 else narrow.astype(dtype.storage)


def drawn(seed, dtype=F32, size=SIZE):
    return stored(np.random.default_rng(seed).standard_normal(size), dtype)


def updated(updater, weight, seed, dtype=F32, index="w", count=2, rates=(0.05, 0.1), extent=None, kept=None):
    """One update as a server makes it: into another array than the present one. Returns that."""
    out = np.full_like(weight, 77) if kept is None else kept
    grads = [drawn(1000 * seed + i, dtype, weight.size) for i in range(count)]
    extent = Extent(index, (weight.size,)) if extent is None else extent
    updater.update_together([Piece(index, weight, grads, [0.5, 1.0, 0.25][:count], out, extent)], dtype, *rates)
    return out


def require_equal_states(one, other):
    assert set(one.states) == set(other.states)
    for index, state in other.states.items():
        own = one.states[index]
        assert (own.count, own.scalars) == (state.count, state.scalars)
        pairs = [*zip(own.arrays, state.arrays, strict=True)]
        if state.master is not None:
            pairs.append((own.master, state.master))
        for found, wanted in pairs:
            assert type(found) is type(wanted) is np.ndarray
            assert found.tobytes() == wanted.tobytes()


@each("name, numbers, formula", EVERY)
@each("dtype, masters", [(DType.FLOAT32, False), (DType.FLOAT16, True), (DType.BFLOAT16, False)])
def test_every_rule_gives_the_bits_and_states_of_the_host(name, numbers, formula, dtype, masters):
    rule = create(name, clip_gradient=0.5, multi_precision=masters, **numbers)
    here, there = Updater(rule), DeviceUpdater(rule, NumpyDevice())
    ours = theirs = drawn(0, dtype)
    for turn, count in enumerate((2, 3, 1, 2)):
        rates = (0.05 / (turn + 1), 0.0 if name in NO_DECAY else 0.1)
        ours = updated(there, ours, turn, dtype, count=count, rates=rates, extent=Extent("w", shape_of(SIZE)))
        theirs = updated(here, theirs, turn, dtype, count=count, rates=rates, extent=Extent("w", shape_of(SIZE)))
        assert ours.tobytes() == theirs.tobytes()
    require_equal_states(there, here)


@each("size", [0, 1, 7, 65])
def test_awkward_sizes_do_not_disturb_each_other(size):
    rule = create("adam")
    here, there = Updater(rule), DeviceUpdater(rule, NumpyDevice())
    weights = {n: (drawn(n, size=n), drawn(n, size=n)) for n in (size, 130, 64)}
    for turn in range(3):
        for n, (ours, theirs) in weights.items():
            weights[n] = (updated(there, ours, turn, index=n), updated(here, theirs, turn, index=n))
            assert weights[n][0].tobytes() == weights[n][1].tobytes()


def test_no_contribution_is_a_gradient_of_zeros_there_too():
    out = np.empty(3, np.float32)
    updater = DeviceUpdater(create("sgd", learning_rate=0.5, wd=0.5), NumpyDevice())
    updater.update_together([Piece("a", np.ones(3, np.float32), [], [], out, Extent("a", (3,)))], F32)
    np.testing.assert_array_equal(out, np.full(3, 0.75))


# What crosses the bus.


def test_contributions_go_up_and_one_weight_comes_down_and_nothing_else():
    device = NumpyDevice()
    updater = DeviceUpdater(create("adam", multi_precision=True), device)
    weight, nbytes = drawn(0), 4 * SIZE
    weight = updated(updater, weight, 1, count=3)
    assert (device.uploaded_bytes, device.downloaded_bytes) == ((3 + 1) * nbytes, nbytes)
    for turn in range(2, 5):
        weight = updated(updater, weight, turn, count=3)
    assert (device.uploaded_bytes, device.downloaded_bytes) == ((4 * 3 + 1) * nbytes, 4 * nbytes)


def test_two_buffers_that_take_turns_are_known_and_memory_is_used_again():
    device = NumpyDevice()
    updater, here = DeviceUpdater(create("adam"), device), Updater(create("adam"))
    ours, spare, theirs = drawn(0), np.empty(SIZE, np.float32), drawn(0)
    ours, spare = updated(updater, ours, 0, kept=spare), ours
    theirs = updated(here, theirs, 0)
    allocated, uploaded = device.allocated_bytes, device.uploaded_bytes
    for turn in range(1, 6):
        ours, spare = updated(updater, ours, turn, kept=spare), ours
        theirs = updated(here, theirs, turn)
        assert ours.tobytes() == theirs.tobytes()
    assert device.allocated_bytes == allocated
    assert device.uploaded_bytes == uploaded + 5 * 2 * 4 * SIZE


def test_another_weight_than_was_left_there_is_uploaded():
    device = NumpyDevice()
    updater, here = DeviceUpdater(create("sgd", momentum=0.9), device), Updater(create("sgd", momentum=0.9))
    updated(updater, drawn(0), 0)
    updated(here, drawn(0), 0)
    loaded = drawn(9)
    before = device.uploaded_bytes
    assert updated(updater, loaded, 1).tobytes() == updated(here, loaded, 1).tobytes()
    assert device.uploaded_bytes == before + 3 * 4 * SIZE


def test_nothing_is_under_way_when_a_call_has_returned_or_refused():
    device = NumpyDevice()
    updater = DeviceUpdater(create("adam"), device)
    weight = updated(updater, drawn(0), 0)
    assert not device.pending
    with pytest.raises(ValueError, match="not finite"):
        updated(updater, weight, 1, rates=(float("nan"), 0.0))
    assert updater.states["w"].count == 1
    updater.restore("w", updater.states["w"])
    offloaded(device, REFERENCE).weighted_sum([drawn(0, size=1 << 18)] * 2, [1.0, 1.0], F32, drawn(1, size=1 << 18))
    assert not device.pending


@each(
    "changes, error, words",
    [
        ({"dtype": DType.INT32}, TypeError, "optimizers update floating types only"),
        ({"out": np.ones(4, np.float32)}, ValueError, "3 elements, the array for the new one 4"),
        ({"contributions": [np.ones(2, np.float32)]}, ValueError, "a gradient has 2 elements, the weight 3"),
        ({"contributions": [np.ones(3, np.float16)]}, TypeError, "not float16"),
        ({"lr": float("inf")}, ValueError, "learning rate inf"),
    ],
)
def test_a_refused_update_changes_nothing_and_the_next_one_is_right(changes, error, words):
    here, there = Updater(create("adam")), DeviceUpdater(create("adam"), NumpyDevice())
    weight = np.ones(3, np.float32)
    ours, theirs = updated(there, weight, 0), updated(here, weight, 0)
    numbers = {"dtype": F32, "lr": None} | {name: changes[name] for name in ("dtype", "lr") if name in changes}
    arrays = {"weight": ours, "contributions": [weight], "scales": [1.0], "out": np.ones_like(weight)}
    arrays |= {name: value for name, value in changes.items() if name in arrays}
    with pytest.raises(error, match=words):
        there.update_together([Piece("w", **arrays, extent=Extent("w", (3,)))], **numbers)
    require_equal_states(there, here)
    assert updated(there, ours, 1).tobytes() == updated(here, theirs, 1).tobytes()


def test_a_refused_first_update_leaves_no_state():
    updater = DeviceUpdater(create("adam"), NumpyDevice())
    with pytest.raises(ValueError, match="not finite"):
        updated(updater, drawn(0), 0, rates=(float("nan"), 0.0))
    assert not updater.states and len(updater.states) == 0


# Parameters of several pieces, and arrays that go on as one.


@each("name, numbers", [("lars", {"momentum": 0.9}), ("lamb", {}), ("lans", {}), ("adam", {})])
def test_the_pieces_of_a_parameter_are_updated_together(name, numbers):
    here, there = Updater(create(name, **numbers)), DeviceUpdater(create(name, **numbers), NumpyDevice())
    sizes, starts = (5, 1, 300), (0, 5, 6)
    present = {side: [drawn(i, size=size) for i, size in enumerate(sizes)] for side in (here, there)}
    for turn in range(3):
        for side, weights in present.items():
            outs = [np.empty_like(weight) for weight in weights]
            pieces = [
                Piece(i, old, [drawn(10 * turn + i, size=old.size)] * 2, [0.5, 0.5], new, Extent("w", (306,), start))
                for i, (old, new, start) in enumerate(zip(weights, outs, starts, strict=True))
            ]
            side.update_together(pieces, F32, 0.1, 0.01)
            present[side] = outs
        assert [a.tobytes() for a in present[here]] == [a.tobytes() for a in present[there]]
    require_equal_states(there, here)


PARTS = (Part("a", 0, 3), Part("b", 4, 1), Part("c", 6, 0), Part("d", 6, 5))


@each("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@each("name, numbers", ELEMENTWISE)
def test_states_are_joined_and_split_as_on_the_host(name, numbers, dtype):
    rule = create(name, multi_precision=True, **numbers)
    here, there = Updater(rule), DeviceUpdater(rule, NumpyDevice())
    present = {side: {part.index: drawn(part.start, dtype, part.count) for part in PARTS} for side in (here, there)}

    def train_apart(turn):
        for side, weights in present.items():
            for index in weights:
                weights[index] = updated(side, weights[index], turn, dtype, index)

    def train_joined(turn):
        for side, weights in present.items():
            assert side.joinable(weights)
            whole = np.zeros(12, dtype.storage)
            for part in PARTS:
                whole[part.start : part.start + part.count] = weights[part.index]
            side.join("all", PARTS, 12, dtype)
            for more in range(2):
                whole = updated(side, whole, turn + more, dtype, "all")
            side.split("all", PARTS)
            for part in PARTS:
                weights[part.index] = whole[part.start : part.start + part.count]

    for turn in (0, 10, 20):
        train_apart(turn)
        train_joined(turn + 1)
        require_equal_states(there, here)
        assert all(present[there][i].tobytes() == present[here][i].tobytes() for i in present[here])
    assert not there.joinable(["a", "nobody"])


def test_what_was_joined_or_split_holds_no_memory_of_the_device_for_former_arrays():
    updater = DeviceUpdater(create("sgd"), NumpyDevice())
    for part in PARTS:
        updated(updater, drawn(0, size=part.count), 0, index=part.index)
    updater.join("all", PARTS, 12, F32)
    assert not updater._residents
    updated(updater, drawn(0, size=12), 1, index="all")
    updater.split("all", PARTS)
    assert not updater._residents


# Saving.


@each("dtype", [DType.FLOAT32, DType.BFLOAT16])
@each("name, numbers", [*ELEMENTWISE, ("nadam", {}), ("lars", {"momentum": 0.5})])
@each("to_device", [False, True])
def test_states_move_between_host_and_device(name, numbers, dtype, to_device):
    rule = create(name, multi_precision=True, **numbers)
    here, there = Updater(rule), DeviceUpdater(rule, NumpyDevice())
    first, second = (here, there) if to_device else (there, here)
    weight = drawn(0, dtype)
    for turn in range(3):
        weight = updated(first, weight, turn, dtype)
    second.restore("w", first.states["w"].copy())
    require_equal_states(second, first)
    assert updated(second, weight, 5, dtype).tobytes() == updated(first, weight, 5, dtype).tobytes()


def test_a_restored_state_goes_with_a_weight_that_is_uploaded():
    device = NumpyDevice()
    updater = DeviceUpdater(create("adam"), device)
    weight = updated(updater, drawn(0), 0)
    updater.restore("w", None)
    assert not updater.states
    before = device.uploaded_bytes
    out = updated(updater, weight, 1)
    assert device.uploaded_bytes == before + 3 * 4 * SIZE
    assert out.tobytes() == updated(Updater(create("adam")), weight, 1).tobytes()


def test_states_are_shown_as_copies_that_stay_as_they_were():
    updater = DeviceUpdater(create("sgd", momentum=0.5), NumpyDevice())
    weight = updated(updater, drawn(0), 0)
    seen = updater.states["w"]
    before = seen.arrays[0].copy()
    updated(updater, weight, 1)
    assert seen.arrays[0].tobytes() == before.tobytes() != updater.states["w"].arrays[0].tobytes()
    with pytest.raises(TypeError):
        updater.states["w"] = None
    assert updater.states.get("nobody") is None


# Rules and devices that do not fit, and memory that is full.


def test_a_rule_that_needs_the_host_is_refused():
    with pytest.raises(DeviceError, match="sgld cannot run on cuda:0"):
        arithmetic_on(NumpyDevice(), REFERENCE).new_updater(create("sgld"))


def test_a_device_whose_memory_is_full_says_so():
    with pytest.raises(DeviceError, match="cuda:0 has no memory left for"):
        updated(DeviceUpdater(create("adam"), NumpyDevice(memory_bytes_max=5 * SIZE)), drawn(0), 0)


@dataclass(kw_only=True, eq=False)
class Greedy(Optimizer):
    """Wants more memory than there is, as a library says it."""

    name: ClassVar[str] = "greedy"
    state_names: ClassVar[tuple[str, ...]] = ()

    def apply(self, weight, grad, out, state, scratch, step):
        raise MemoryError("out of memory allocating 512 bytes")


def test_a_rule_that_finds_the_memory_full_is_told_in_a_sentence():
    with pytest.raises(DeviceError, match="cuda:0 has no memory left to update key 'w': out of memory allocating 512"):
        updated(DeviceUpdater(Greedy(), NumpyDevice()), drawn(0), 0)


# Sums without an optimizer.

LONG = SUMMED_BYTES_MIN // 4


@each("dtype", list(DType))
@each("wide", [False, True])
def test_long_sums_are_made_on_the_device_with_the_bits_of_the_host(dtype, wide):
    device = NumpyDevice()
    kernels = offloaded(device, REFERENCE)
    generator, size = np.random.default_rng(0), SUMMED_BYTES_MIN // dtype.itemsize + 3
    sources = [generator.integers(-9, 9, size) for _ in range(3)]
    sources = [stored(one, dtype) if dtype.is_floating else one.astype(dtype.storage) for one in sources]
    scales = [0.5, 0.5, 1.0] if dtype.is_floating else [1.0] * 3
    kind = dtype.accumulate if wide else dtype.storage
    ours, theirs = np.full(size, 77).astype(kind), np.empty(size, kind)
    for _ in range(2):
        kernels.weighted_sum(sources, scales, dtype, ours)
    REFERENCE.weighted_sum(sources, scales, dtype, theirs)
    assert ours.tobytes() == theirs.tobytes()
    assert device.uploaded_bytes == 2 * sum(one.nbytes for one in sources)
    assert device.downloaded_bytes == 2 * ours.nbytes
    assert device.allocated_bytes < 2 * (sum(one.nbytes for one in sources) + ours.nbytes), "memory is used again"


@each("size, count", [(LONG - 1, 2), (LONG, 1), (0, 2), (LONG, 0)])
def test_sums_that_are_not_worth_the_trip_stay_on_the_host(size, count):
    device = NumpyDevice()
    sources = [drawn(i, size=size) for i in range(count)]
    ours, theirs = np.empty(size, np.float32), np.empty(size, np.float32)
    offloaded(device, REFERENCE).weighted_sum(sources, [1.0] * count, F32, ours)
    REFERENCE.weighted_sum(sources, [1.0] * count, F32, theirs)
    assert ours.tobytes() == theirs.tobytes()
    assert device.uploaded_bytes == 0


@each(
    "sources, scales, dtype, error",
    [
        ([np.ones(LONG, np.float32), np.ones(LONG + 1, np.float32)], [1.0, 1.0], F32, ValueError),
        ([np.ones(LONG, np.float32), np.ones(LONG)], [1.0, 1.0], F32, TypeError),
        ([np.ones(LONG, np.float32)] * 2, [1.0], F32, ValueError),
        ([np.ones(LONG, np.int32)] * 2, [0.5, 0.5], DType.INT32, ValueError),
    ],
)
def test_wrong_sums_are_refused_before_anything_crosses_the_bus(sources, scales, dtype, error):
    device, out = NumpyDevice(), np.full(LONG, 7, dtype.storage)
    with pytest.raises(error):
        offloaded(device, REFERENCE).weighted_sum(sources, scales, dtype, out)
    assert (out == 7).all() and device.uploaded_bytes == 0


def test_everything_but_sums_stays_the_hosts():
    kernels = offloaded(NumpyDevice(index=2), REFERENCE)
    assert replace(kernels, name=REFERENCE.name, weighted_sum=REFERENCE.weighted_sum) == REFERENCE
    assert kernels.name == "numpy, sums on cuda:2"
