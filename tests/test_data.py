"""Every example is visited by the right worker and goes to the right device."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kvdist.data import SplitSampler, split_and_load, split_data


@pytest.mark.parametrize(("length", "num_parts"), [(0, 1), (1, 1), (10, 1), (10, 3), (50_000, 7), (12, 12)])
def test_parts_are_contiguous_equal_and_disjoint_and_the_remainder_is_left_out(length, num_parts):
    parts = [SplitSampler(length, num_parts, index) for index in range(num_parts)]
    size = length // num_parts
    for index, part in enumerate(parts):
        assert len(part) == size
        assert sorted(part) == list(range(size * index, size * (index + 1)))


@pytest.mark.parametrize(("length", "num_parts"), [(0, 3), (1, 4), (3, 4), (5, 4), (10, 3), (12, 4)])
def test_padded_parts_are_equal_and_lose_no_example(length, num_parts):
    parts = [list(SplitSampler(length, num_parts, index, shuffle=False, drop_last=False)) for index in range(num_parts)]
    assert {len(part) for part in parts} == {-(-length // num_parts)}
    visited = [index for part in parts for index in part]
    assert visited[:length] == list(range(length))
    assert visited[length:] == [index % max(length, 1) for index in range(len(visited) - length)]


def test_each_epoch_has_another_order_and_a_seed_makes_runs_alike():
    def run(seed):
        sampler = SplitSampler(100, 2, 1, seed=seed)
        return [list(sampler) for _ in range(3)]

    orders = run(5)
    assert orders == run(5) and orders != run(6) and orders[0] != orders[1] != orders[2]
    resumed = SplitSampler(100, 2, 1, seed=5)
    resumed.set_epoch(1)
    assert [list(resumed), list(resumed)] == orders[1:]


def test_without_a_seed_every_order_is_new():
    assert list(SplitSampler(100)) != list(SplitSampler(100))


def test_without_shuffling_the_order_is_ascending():
    assert list(SplitSampler(10, 2, 1, shuffle=False)) == [5, 6, 7, 8, 9]


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("visited", [0, 1, 7, 33])
def test_a_sampler_goes_on_where_another_stopped_in_the_same_order(visited, drop_last):
    def sampler():
        return SplitSampler(100, 3, 1, seed=5, drop_last=drop_last)

    whole, first = sampler(), sampler()
    expected = [list(whole) for _ in range(3)]
    assert list(first) == expected[0]
    running = iter(first)
    begun = [next(running) for _ in range(visited)]
    resumed = sampler()
    resumed.load_state_dict(through_json(first.state_dict()))
    assert len(resumed) == (len(expected[1]) - visited or len(expected[2]))
    rest = list(resumed)
    if visited == len(expected[1]):
        assert rest == expected[2]  # the end of an epoch is the beginning of the next
    else:
        assert begun + rest == expected[1]
        assert list(resumed) == expected[2] and len(resumed) == len(expected[2])


def test_an_epoch_can_be_gone_on_with_twice():
    whole = list(SplitSampler(50, 2, 0, seed=1))
    state, seen = SplitSampler(50, 2, 0, seed=1).state_dict(), []
    for count in (5, 8, 12):
        sampler = SplitSampler(50, 2, 0, seed=1)
        sampler.load_state_dict(through_json(state))
        running = iter(sampler)
        seen += [next(running) for _ in range(count)]
        state = sampler.state_dict()
    assert seen == whole
    assert (state["epoch"], state["visited"]) == (1, 0)


def test_with_another_number_of_parts_every_example_that_is_left_is_visited_once():
    def visit(samplers, count):
        runs = [iter(sampler) for sampler in samplers]
        seen = [next(run) for run in runs for _ in range(count)]
        return seen, {rank: through_json(sampler.state_dict()) for rank, sampler in enumerate(samplers)}

    def parts(count, states):
        samplers = [SplitSampler(60, count, rank, seed=3) for rank in range(count)]
        for sampler in samplers:
            sampler.load_state_dict(states)
        return samplers

    seen, states = visit([SplitSampler(60, 3, rank, seed=3) for rank in range(3)], 5)
    more, states = visit(parts(5, states), 4)
    samplers = parts(1, states)
    assert len(samplers[0]) == 25
    rest = list(samplers[0])
    assert sorted(seen + more + rest) == list(range(60))
    assert sorted(samplers[0]) == list(range(60)) and len(samplers[0]) == 60


def test_examples_that_were_read_ahead_can_be_left_out():
    sampler = SplitSampler(20, seed=2)
    order = list(SplitSampler(20, seed=2))
    running = iter(sampler)
    for _ in range(10):
        next(running)
    resumed = SplitSampler(20, seed=2)
    resumed.load_state_dict(sampler.state_dict(visited=6))
    assert list(resumed) == order[6:]
    with pytest.raises(ValueError, match="visited is 21"):
        sampler.state_dict(visited=21)


def test_a_place_that_does_not_belong_here_is_refused():
    running = SplitSampler(20)
    next(iter(running))
    with pytest.raises(ValueError, match="give SplitSampler a seed"):
        running.state_dict()
    place = SplitSampler(20, 2, 0, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"length=20, but this sampler has length=21"):
        SplitSampler(21, 2, 0, seed=1).load_state_dict(place)
    with pytest.raises(ValueError, match=r"seed=1, but this sampler has seed=2"):
        SplitSampler(20, 2, 0, seed=2).load_state_dict(place)
    with pytest.raises(ValueError, match="part 0 of 2, and this is part 1 of 2: give those of all parts"):
        SplitSampler(20, 2, 1, seed=1).load_state_dict(place)


def test_a_data_loader_takes_the_sampler():
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(data, batch_size=2, sampler=SplitSampler(len(data), 2, 1))
    batches = [batch.tolist() for (batch,) in loader]
    assert len(loader) == len(batches) == 3
    assert sorted(index for batch in batches for index in batch) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "length is -1"),
        ((10, 0), "num_parts is 0"),
        ((10, 2, 2), "part_index is 2; with num_parts=2 it must be from 0 to 1"),
        ((10, 2, -1), "part_index is -1"),
        ((3, 4, 0), "3 examples in 4 equal parts leave every part empty"),
    ],
)
def test_impossible_parts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SplitSampler(*arguments)
    with pytest.raises(ValueError, match="the epoch is -1"):
        SplitSampler(1).set_epoch(-1)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(("num_slice", "axis"), [(8, 0), (3, 1), (4, -1), (1, 0), (4, 1), (15, 0), (129, 0)])
def test_parts_of_a_batch_are_those_of_array_split(make, num_slice, axis):
    data = np.arange(128 * 33 * 4).reshape(128, 33, 4)
    parts = split_data(make(data), num_slice, axis, even_split=False)
    for part, expected in zip(parts, np.array_split(data, num_slice, axis), strict=True):
        assert type(part) is type(make(data))
        np.testing.assert_array_equal(np.asarray(part), expected)


@pytest.mark.parametrize(
    ("data", "num_slice", "axis", "error", "message"),
    [
        (np.zeros((128, 33)), 4, 1, ValueError, "a batch of 33 along axis 1 cannot be split evenly into 4 parts"),
        (np.zeros((128, 33)), 0, 0, ValueError, "cannot split into 0 parts"),
        (np.zeros((128, 33)), 2, 2, ValueError, r"data of shape \(128, 33\) has no axis 2"),
        (torch.zeros(()), 1, 0, ValueError, r"data of shape \(\) has no axis 0"),
        ([1, 2], 2, 0, TypeError, "not list"),
    ],
)
def test_impossible_splits_are_refused(data, num_slice, axis, error, message):
    with pytest.raises(error, match=message):
        split_data(data, num_slice, axis)


def test_parts_go_to_their_devices_and_there_is_a_list_also_for_one_device():
    batch = torch.arange(5)
    assert [part.tolist() for part in split_and_load(batch, ["cpu"])] == [[0, 1, 2, 3, 4]]
    parts = split_and_load(batch, ["cpu", torch.device("meta")], even_split=False)
    assert parts[0].tolist() == [0, 1, 2]
    assert parts[1].device.type == "meta" and parts[1].shape == (2,)


def test_arrays_stay_arrays_on_the_host():
    parts = split_and_load(np.arange(4), ["cpu", torch.device("cpu")])
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"a NumPy array cannot move to cuda:0; give torch.from_numpy"):
        split_and_load(np.arange(4), ["cpu", "cuda:0"])
