"""Blocks of rows against dense parameters: the same rounds, densified, through the dense updater, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from kvdist.core.server.table_rows import obstacle
from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create
from kvdist.optimizer.initializer import Constant, Normal, Zeros
from tests.cases import each, pairs
from tests.core.dense_rows import (
    BF16,
    F16,
    F32,
    F64,
    PARTIAL,
    TYPES,
    VARIANTS,
    Dense,
    all_rows,
    as_bits,
    as_float,
    assert_equal_snapshots,
    assert_same,
    block_of,
    every_rule,
    ids_of,
    image_of,
    rounds_of,
    scales_of,
    stored,
    wd_of,
)


def run_both(name, numbers, dtype, multi_precision, lazy_update, initializer, wd, chunk_rows=None, seed=0):
    rng = np.random.default_rng(seed)
    shape, first, stop = (40, 3), 5, 28
    optimizer = create(name, multi_precision=multi_precision, lazy_update=lazy_update, clip_gradient=2.0, **numbers)
    block = block_of(shape, dtype, first, stop, initializer)
    if chunk_rows is not None:
        block._rows_max = chunk_rows
    if initializer is None:
        weight = stored(rng.standard_normal((stop - first) * 3), dtype)
        block.put(np.arange(first, stop), weight)
    else:
        weight = initializer.rows(np.arange(first, stop), 3, dtype)
    dense = Dense("w", shape, dtype, first, stop, optimizer, weight)
    for step, contributions in enumerate(rounds_of(rng, dtype, first, stop, 3)):
        scales, lr = scales_of(contributions), 0.1 if step < 4 else 0.05
        block.update(contributions, scales, optimizer, lr, wd)
        dense.update(contributions, scales, lr, wd, touched_only=lazy_update)
        block.validate()
        assert_same(block, dense)
    return block, dense


@each("rule, kind, wd", pairs(VARIANTS, TYPES, [0.0, 0.1]))
def test_a_block_without_lazy_update_is_a_dense_parameter(rule, kind, wd):
    run_both(*rule, *kind, False, None, wd_of(rule[0], wd), chunk_rows=4)


@each("rule, kind, wd, initializer", pairs(PARTIAL, TYPES, [0.0, 0.1], [None, Normal(0.5, 3)]))
def test_with_lazy_update_only_pushed_rows_are_touched_whether_given_or_made_when_touched(rule, kind, wd, initializer):
    run_both(*rule, *kind, True, initializer, wd_of(rule[0], wd), chunk_rows=4)


@pytest.mark.parametrize("initializer", [None, Normal(0.5, 3)], ids=["given", "made when touched"])
@every_rule
def test_compiled_kernels_and_whole_chunks_give_the_same_bits(name, numbers, initializer):
    """Rows of a length that is no power of 2, several chunks, some of which follow each other."""
    rng = np.random.default_rng(4)
    shape, in_place = (9000, 17), []
    optimizer = create(name, lazy_update=name != "sgld", **numbers)
    if why := obstacle(optimizer, "w", shape, initializer is not None):
        pytest.skip(why)
    compiled = choose("numba")

    def update_rows(*args):
        in_place.append(compiled.update_rows(*args))
        return in_place[-1]

    noting = replace(compiled, update_rows=update_rows)
    blocks = [block_of(shape, F32, 0, 9000, initializer, kernels) for kernels in (REFERENCE, noting)]
    everything = np.arange(9000)
    lists = [
        [everything, everything],
        [everything[100:8000], everything[100:8000]],
        *[[np.concatenate([everything[:5000], ids_of(rng, 5000, 9000, 700)]), ids_of(rng, 0, 9000, 3000)]] * 2,
    ]
    lists = lists if initializer is None else lists[::-1]  # rows that are made in another order than that of their ids
    for ids in lists:
        contributions = [(one, rng.standard_normal(len(one) * 17).astype(np.float32)) for one in ids]
        for block in blocks:
            block.update(contributions, [0.5, 0.5], optimizer, 0.1, 0.0)
    np.testing.assert_array_equal(as_bits(all_rows(blocks[0])), as_bits(all_rows(blocks[1])))
    assert_equal_snapshots(*(image_of(block, optimizer) for block in blocks))
    assert any(in_place) or name not in ("sgd", "adam", "adagrad"), "rows that lie anywhere are updated there"


# Rules that move every element, and rules that cannot work on rows.


@each("dtype", [F32, F64, BF16])
def test_sgld_sweeps_all_rows_and_draws_the_noise_of_each_place(dtype):
    rng = np.random.default_rng(0)
    optimizer = create("sgld", seed=5)
    block = block_of((40, 3), dtype, 5, 28)
    block._rows_max = 4
    dense = Dense("w", (40, 3), dtype, 5, 28, optimizer, np.zeros(69, dtype.storage))
    for contributions in rounds_of(rng, dtype, 5, 28, 3):
        scales = scales_of(contributions)
        block.update(contributions, scales, optimizer, 0.1, 0.1)
        dense.update(contributions, scales, 0.1, 0.1)
        assert_same(block, dense)


@each(
    "optimizer, lazy, wd, said",
    [
        (create("lamb"), False, None, "lamb needs the norm of the whole parameter, and the table 'w' is cut by rows"),
        (create("sgld"), True, None, "sgld changes every element in every update"),
        (create("sgld", lazy_update=True), False, None, "lazy_update must be False"),
        (create("adam"), True, None, r"adam\(\) with weight decay 0 changes rows .* pass lazy_update=True, or choose"),
        (create("sgd", wd=0.5), True, None, r"with weight decay 0.5 changes rows that have no gradient"),
        (create("sgd"), True, 0.5, r"sgd\(\) with weight decay 0.5"),
        (create("sgd", momentum=0.9), True, None, r"sgd\(momentum=0.9\) with weight decay 0"),
        (create("groupadagrad", wd=0.1), False, None, "groupadagrad knows no weight decay"),
        (create("ftrl", learning_rate=0, lazy_update=True), True, None, None),
        (create("adam", lazy_update=True), True, 0.5, None),
        (create("adam"), False, 0.5, None),
        (create("sgld"), False, None, None),
        (create("adagrad"), True, None, None),
        (create("test", wd=0.5), True, None, None),
    ],
)
def test_an_obstacle_is_named_before_anything_is_pushed_and_again_when_it_is(optimizer, lazy, wd, said):
    found = obstacle(optimizer, "w", (10, 2), lazy, wd)
    if said is None:
        assert found is None
        return
    block = block_of((10, 2), F32, 0, 10, Zeros() if lazy else None)
    with pytest.raises(ValueError, match=said):
        block.update([(np.array([1]), np.ones(2, np.float32))], [1.0], optimizer, None, wd)
    assert found is not None
    assert block.updates == 0
    assert not all_rows(block).any()
    assert block.rows_touched == (0 if lazy else 10)


def test_group_adagrad_needs_a_matrix():
    assert "updates matrices" in obstacle(create("groupadagrad"), "w", (10,), False)
    assert obstacle(create("groupadagrad"), "w", (10, 1), False) is None


# Without an optimizer the sum replaces the value.


@each("dtype, lazy", product(DType, [False, True]))
def test_without_an_optimizer_the_sum_is_the_whole_value(dtype, lazy):
    rng = np.random.default_rng(1)
    block = block_of((40, 3), dtype, 5, 28, Constant(1) if lazy else None)
    block._rows_max = 4
    start = stored(rng.integers(-5, 5, 69), dtype)
    block.put(np.arange(5, 28), start)
    dense = Dense("w", (40, 3), dtype, 5, 28, None, start)
    for contributions in rounds_of(rng, dtype, 5, 28, 3):
        scales = scales_of(contributions) if dtype.is_floating else [1.0] * len(contributions)
        block.update(contributions, scales, None)
        dense.update(contributions, scales, None, None)
        block.validate()
        np.testing.assert_array_equal(as_float(all_rows(block), dtype), as_float(dense.weight, dtype))
        touched = len(np.unique(np.concatenate([ids for ids, _ in contributions])))
        assert block.rows_touched == (touched if lazy else 23)


def test_replacing_costs_the_rows_that_were_there_and_those_that_come():
    block = block_of((10**9, 4), F32, 0, 10**9)
    for start in (0, 7, 500_000_000):
        ids = np.array([start, start + 3, 10**9 - 1])
        block.update([(ids, np.ones(12, np.float32))], [2.0], None)
        assert block._nonzero.tolist() == ids.tolist()
    out = np.empty(16, np.float32)
    block.gather(np.array([0, 7, 500_000_000, 10**9 - 1]), out)
    assert out.reshape(4, 4)[:, 0].tolist() == [0, 0, 2, 2]
    block.put(np.array([7]), np.full(4, 9, np.float32))
    block.update([(np.zeros(0, np.int64), np.zeros(0, np.float32))], [1.0], None)
    block.gather(np.array([0, 7, 500_000_000, 10**9 - 1]), out)
    assert not out.any()


def test_after_an_optimizer_any_row_may_be_other_than_zeros():
    block = block_of((6, 1), F32, 0, 6)
    ids, ones = np.array([4]), np.ones(1, np.float32)
    block.update([(ids, ones)], [1.0], create("test"))
    block.update([(np.array([1]), ones)], [1.0], None)
    block.validate()
    assert all_rows(block).tolist() == [0, 1, 0, 0, 0, 0]


def test_a_scale_on_integers_is_refused_and_changes_nothing():
    block = block_of((6, 1), DType.INT32, 0, 6)
    block.put(np.arange(6), np.arange(6, dtype=np.int32))
    with pytest.raises(ValueError, match="cannot be scaled"):
        block.update([(np.array([4]), np.ones(1, np.int32))], [0.5], None)
    with pytest.raises(TypeError, match="optimizers update floating types only"):
        block.update([(np.array([4]), np.ones(1, np.int32))], [1.0], create("test"))
    assert all_rows(block).tolist() == [0, 1, 2, 3, 4, 5]


# Lazy rows.


def test_reading_creates_no_row_and_gives_first_values():
    block = block_of((100, 3), F32, 10, 90, Normal(1.0, 7))
    expected = Normal(1.0, 7).rows(np.arange(10, 90), 3, F32)
    np.testing.assert_array_equal(all_rows(block), expected)
    assert block.rows_touched == 0
    block.put(np.array([20, 50]), np.zeros(6, np.float32))
    expected.reshape(80, 3)[[10, 40]] = 0
    np.testing.assert_array_equal(all_rows(block), expected)
    assert block.rows_touched == 2
    block.validate()


def test_a_terabyte_is_declared_and_memory_follows_the_rows_that_are_touched():
    rows, row_length = 4_000_000_000, 64
    block = block_of((rows, row_length), F32, 0, rows, Zeros())
    optimizer = create("adagrad")
    rng = np.random.default_rng(0)
    for _ in range(6):
        ids = np.unique(rng.integers(0, rows, 3000))
        grad = np.ones(len(ids) * row_length, np.float32)
        block.update([(ids, grad), (ids[::3], grad[: len(ids[::3]) * row_length])], [1.0, 1.0], optimizer)
        # Values and history, and at most 24 bytes of index.
        assert block.nbytes <= block.rows_touched * (2 * 4 * row_length + 24)
        # What is mapped, used or not, is at most twice as much.
        assert len(block._weight.rows) <= max(64, 2 * block.rows_touched)
    assert block.rows_touched > 17_000
    block.validate()


def test_growing_moves_memory_and_copies_nothing():
    """No view of the old memory is left anywhere, or the mapping could not be enlarged where it is."""
    block = block_of((10**9, 8), F32, 0, 10**9, Zeros())
    optimizer = create("adam", lazy_update=True)
    mappings = set()
    for start in range(0, 40_000, 1000):
        ids = np.arange(start, start + 1000)
        block.update([(ids * 3, np.ones(8000, np.float32))], [1.0], optimizer)
        mappings.add(id(block._weight._mapping))
    assert len(mappings) == 1


def test_first_states_come_from_first_values_even_if_a_row_is_put_before_it_is_pushed():
    """The earlier weight of dcasgd is what a dense parameter would have kept from its first update on."""
    optimizer = create("dcasgd", lazy_update=True, multi_precision=True, lamda=1.0)
    first = Normal(1.0, 2)
    lazy, eager = block_of((9, 2), F16, 0, 9, first), block_of((9, 2), F16, 0, 9)
    eager.put(np.arange(9), first.rows(np.arange(9), 2, F16))
    for block in (lazy, eager):
        block.update([(np.array([1]), np.ones(2, np.float16))], [1.0], optimizer)
        block.put(np.array([4]), np.full(2, 5, np.float16))
        block.update([(np.array([4, 6]), np.ones(4, np.float16))], [1.0], optimizer)
    np.testing.assert_array_equal(all_rows(lazy), all_rows(eager))
    mine, theirs = image_of(lazy, optimizer).state, image_of(eager, optimizer).state
    np.testing.assert_array_equal(mine.arrays[0], theirs.arrays[0].reshape(9, 2)[[1, 4, 6]].reshape(-1))


# Counts, sizes, and what is refused.


def test_rounds_without_rows_count_and_rows_share_the_count():
    optimizer = create("adam", lazy_update=True)
    block = block_of((5, 1), F64, 0, 5)
    nothing, one = (np.zeros(0, np.int64), np.zeros(0)), (np.array([3]), np.ones(1))
    for contribution in (nothing, nothing, one):
        block.update([contribution], [1.0], optimizer, 0.1, 0.0)
    assert block.updates == 3
    dense, weight = Updater(create("adam")), np.zeros(1)
    for grad in (0.0, 0.0, 1.0):
        dense.update("w", weight, [np.array([grad])], [1.0], F64, weight, 0.1, 0.0)
    assert all_rows(block)[3] == weight[0]


@each("name, lazy", product(["adagrad", "adam", None], [False, True]))
@pytest.mark.parametrize(
    ("shape", "first", "stop"),
    [((4,), 0, 4), ((4, 1, 2), 1, 3), ((4, 0), 0, 4), ((4, 3), 2, 2), ((0, 3), 0, 0), ((3, CHUNK_ELEMENTS + 1), 0, 3)],
    ids=str,
)
def test_awkward_shapes(shape, first, stop, lazy, name):
    block = block_of(shape, F32, first, stop, Zeros() if lazy else None)
    optimizer = None if name is None else create(name, lazy_update=True)
    ids = np.arange(first, stop)[::2]
    values = np.ones(len(ids) * block.row_length, np.float32)
    for _ in range(2):
        block.update([(ids, values), (ids[:1], values[: len(ids[:1]) * block.row_length])], [1.0, 1.0], optimizer)
    block.validate()
    restored = block_of(shape, F32, first, stop, Zeros() if lazy else None)
    restored.load(image_of(block, optimizer), optimizer)
    np.testing.assert_array_equal(all_rows(restored), all_rows(block))
    expected = np.zeros((stop - first, block.row_length), bool)
    expected[::2] = True
    np.testing.assert_array_equal(all_rows(block) != 0, expected.reshape(-1))


def test_values_may_be_read_only_and_lie_at_odd_addresses():
    memory = np.zeros(8 * 4 + 1, np.uint8)
    values = memory[1:].view(np.float32)
    values[:] = np.arange(8)
    values.flags.writeable = False
    for optimizer in (None, create("test"), create("adam", lazy_update=True)):
        odd, even = (block_of((9, 2), F32, 0, 9) for _ in range(2))
        ids = np.array([1, 2, 5, 8])
        odd.put(ids, values)
        odd.update([(ids, values), (ids[:1], values[:2])], [1.0, 1.0], optimizer)
        even.put(ids, values.copy())
        even.update([(ids, values.copy()), (ids[:1], values[:2].copy())], [1.0, 1.0], optimizer)
        np.testing.assert_array_equal(all_rows(odd), all_rows(even))


@each(
    "ids, values, error, said",
    [
        ([1, 2], np.ones(4, "f4"), ValueError, "row 1 of 'w' is not among the rows 2 to 7 here"),
        ([2, 8], np.ones(4, "f4"), ValueError, "row 8 of 'w' is not among the rows 2 to 7"),
        ([-1, 2], np.ones(4, "f4"), ValueError, "row -1 of 'w'"),
        ([3, 3], np.ones(4, "f4"), ValueError, "must increase strictly: sort them and sum what is repeated"),
        ([3, 9, 4], np.ones(6, "f4"), ValueError, "must increase strictly"),
        ([3, 4], np.ones(3, "f4"), ValueError, "2 rows of 'w' have 4 elements, not 3"),
        ([3, 4], np.ones(4, "f8"), TypeError, "values of float32, not int64 and float64"),
        ([3.0, 4.0], np.ones(4, "f4"), TypeError, "int64 ids"),
        ([3, 4], np.ones((2, 2), "f4"), ValueError, "one-dimensional and contiguous"),
        ([3, 4], np.ones(8, "f4")[::2], ValueError, "one-dimensional and contiguous"),
    ],
)
def test_rows_that_are_not_what_they_should_be_are_refused(ids, values, error, said):
    given = np.array(ids)
    good = (np.array([5]), np.ones(2, np.float32))
    for block in (block_of((10, 2), F32, 2, 8), block_of((10, 2), F32, 2, 8, Zeros())):
        before, touched = all_rows(block), block.rows_touched
        for call in (
            partial(block.put, given, values),
            partial(block.gather, given, values),
            partial(block.update, [good, (given, values)], [1.0, 1.0], None),
            partial(block.update, [good, (given, values)], [1.0, 1.0], create("test")),
        ):
            with pytest.raises(error, match=said):
                call()
        np.testing.assert_array_equal(all_rows(block), before)
        assert block.rows_touched == touched


@each(
    "lr, wd, scale, said",
    [(np.inf, 0.0, 1.0, "not finite"), (0.1, np.nan, 1.0, "not finite"), (0.1, 0.0, np.inf, "finite scales")],
)
def test_numbers_that_are_refused_leave_everything_as_it_was(lr, wd, scale, said):
    optimizer = create("adam", lazy_update=True)
    block = block_of((10, 2), F32, 0, 10, Zeros())
    block.update([(np.array([5]), np.ones(2, np.float32))], [1.0], optimizer, 0.1, 0.0)
    before = image_of(block, optimizer)
    with pytest.raises(ValueError, match=said):
        block.update([(np.array([5, 7]), np.ones(4, np.float32))], [scale], optimizer, lr, wd)
    assert_equal_snapshots(image_of(block, optimizer), before)
