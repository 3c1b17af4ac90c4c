"""What a block of rows holds, copied out and taken back."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.optimizer import create
from kvdist.optimizer.initializer import Constant, Normal, Zeros
from tests.cases import each, pairs
from tests.core.dense_rows import (
    BF16,
    F32,
    VARIANTS,
    all_rows,
    assert_equal_snapshots,
    block_of,
    ids_of,
    image_of,
    stored,
)


def trained(initializer, optimizer, dtype, rounds=3, block=None, seed=0):
    rng = np.random.default_rng(seed)
    block = block_of((50, 3), dtype, 4, 44, initializer) if block is None else block
    for _ in range(rounds):
        ids = ids_of(rng, 4, 44, 15)
        block.update([(ids, stored(rng.standard_normal(45), dtype))], [1.0], optimizer, 0.1, 0.0)
    return block


@each("rule, initializer, dtype", pairs(VARIANTS, [None, Normal(0.3, 1)], [F32, BF16]))
def test_a_restored_block_goes_on_bit_by_bit(rule, initializer, dtype):
    name, numbers = rule
    optimizer = create(name, lazy_update=name != "sgld", multi_precision=True, **numbers)
    if name == "sgld":
        initializer = None
    block = trained(initializer, optimizer, dtype)
    snapshot = image_of(block, optimizer)
    other = trained(initializer, create("test"), dtype, seed=9)
    other.load(snapshot, optimizer)
    other.validate()
    assert_equal_snapshots(image_of(other, optimizer), snapshot)
    for one in (block, other):
        trained(initializer, optimizer, dtype, block=one, seed=5)
    assert_equal_snapshots(image_of(other, optimizer), image_of(block, optimizer))


def test_a_snapshot_is_a_copy_and_its_rows_are_in_order():
    optimizer = create("adam", lazy_update=True)
    block = trained(Zeros(), optimizer, F32)
    snapshot = image_of(block, optimizer)
    values, mean = snapshot.weight.copy(), snapshot.state.arrays[0].copy()
    assert (np.diff(snapshot.ids) > 0).all()
    trained(Zeros(), optimizer, F32, block=block, seed=4)
    np.testing.assert_array_equal(snapshot.weight, values)
    np.testing.assert_array_equal(snapshot.state.arrays[0], mean)


def test_a_lazy_snapshot_fits_an_eager_block_and_the_other_way_round():
    optimizer = create("adam", lazy_update=True)
    lazy = trained(Zeros(), optimizer, F32)
    eager = trained(None, create("test"), F32, seed=3)
    eager.load(image_of(lazy, optimizer), optimizer)
    np.testing.assert_array_equal(all_rows(eager), all_rows(lazy))
    back = trained(Normal(1.0), optimizer, F32, seed=8)
    back.load(image_of(eager, optimizer), optimizer)
    assert back.rows_touched == 40
    for block in (lazy, eager, back):
        trained(None, optimizer, F32, block=block, seed=6)
    np.testing.assert_array_equal(all_rows(eager), all_rows(lazy))
    np.testing.assert_array_equal(all_rows(back), all_rows(lazy))


def test_a_table_that_was_replaced_stays_zero_elsewhere_when_restored():
    block = block_of((50, 3), F32, 4, 44, Constant(2))
    block.update([(np.array([7]), np.ones(3, np.float32))], [1.0], None)
    other = block_of((50, 3), F32, 4, 44, Constant(2))
    other.load(image_of(block), None)
    assert all_rows(other).sum() == 3
    assert image_of(block).initializer == Zeros().describe()


def test_a_state_of_another_rule_is_refused_with_what_differs():
    snapshot = image_of(trained(None, create("adam"), F32), create("adam"))
    with pytest.raises(ValueError, match="2 arrays without a master, where 1 without one are kept"):
        block_of((50, 3), F32, 4, 44).load(snapshot, create("adagrad"))
    block = block_of((50, 3), F32, 4, 44)
    block.load(snapshot, None)
    assert block.updates == 0


def test_another_rule_begins_anew_and_the_same_rule_goes_on():
    block = trained(None, create("adam", learning_rate=0.1), F32)
    trained(None, create("adam", learning_rate=0.2), F32, block=block, rounds=1)
    assert block.updates == 4
    trained(None, create("adam", beta1=0.5), F32, block=block, rounds=1)
    assert block.updates == 1
    assert len(image_of(block, create("adam")).state.arrays) == 2
