"""Every example is visited by the right worker and goes to the right device."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, Subset, TensorDataset

from kvdist import Trainer, kv, quota
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.training.data import SplitSampler, split_and_load, split_data
from tests.cases import each


@each("length, num_parts", [(0, 1), (1, 1), (10, 1), (10, 3), (50_000, 7), (12, 12)])
def test_parts_are_contiguous_equal_and_disjoint_and_the_remainder_is_left_out(length, num_parts):
    parts = [SplitSampler(length, num_parts, index) for index in range(num_parts)]
    size = length // num_parts
    for index, part in enumerate(parts):
        assert len(part) == size
        assert sorted(part) == list(range(size * index, size * (index + 1)))


@each("length, num_parts", [(0, 3), (1, 4), (3, 4), (5, 4), (10, 3), (12, 4)])
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


@each("drop_last", [True, False])
@each("visited", [0, 1, 7, 33])
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


EPOCHS = 3


def epochs_of(sampler, batch_size, drop_last):
    """The loop of a training script: (epoch, batch, place after it)."""
    loader = DataLoader(TensorDataset(torch.arange(1000)), batch_size, sampler=sampler, drop_last=drop_last)
    for epoch in range(sampler.epoch, EPOCHS):
        for (batch,) in loader:
            yield epoch, batch.tolist(), through_json(sampler.state_dict())


@each("loader_drops", [False, True])
@each("batch_size", [1, 4, 7, 11])
@each("length, drop_last", [(22, True), (23, True), (21, False)])
def test_a_run_that_was_saved_at_any_step_visits_what_it_would_have_without_a_stop(
    length, drop_last, batch_size, loader_drops
):
    def begin(state):
        sampler = SplitSampler(length, 2, 1, seed=5, drop_last=drop_last)
        sampler.load_state_dict(state)
        return [*epochs_of(sampler, batch_size, loader_drops)], sampler

    start = SplitSampler(length, 2, 1, seed=5, drop_last=drop_last).state_dict()
    whole, sampler = begin(start)
    assert sampler.epoch == EPOCHS or loader_drops
    for step, (_, _, state) in enumerate([(0, [], start), *whole]):
        assert begin(state)[0] == whole[step:]


def test_the_epoch_is_that_of_the_next_example():
    sampler = SplitSampler(3, seed=1)
    seen = [sampler.epoch, *(sampler.epoch for _ in range(2) for _ in sampler), sampler.epoch]
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2]
    sampler.set_epoch(7)
    assert sampler.epoch == sampler.state_dict()["epoch"] == 7
    next(iter(sampler))
    assert sampler.epoch == sampler.state_dict()["epoch"] == 7
    with pytest.raises(AttributeError):
        sampler.epoch = 1


def test_naming_the_epoch_keeps_the_rest_of_it_and_makes_another_a_whole_one():
    def resumed():
        sampler = SplitSampler(20, seed=2)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 1, "visited": 6})
        return sampler

    orders = SplitSampler(20, seed=2)
    _, second, third = (list(orders) for _ in range(3))
    sampler = resumed()
    sampler.set_epoch(1)
    assert list(sampler) == second[6:]
    sampler.set_epoch(1)
    assert list(sampler) == second
    sampler = resumed()
    sampler.set_epoch(2)
    assert list(sampler) == third


def advance(samplers, counts):
    """Visit so many of each, and give what was visited and the places, as a checkpoint has them."""
    seen = []
    for sampler, count in zip(samplers, counts, strict=True):
        running = iter(sampler)
        seen += [next(running) for _ in range(count)]
    return seen, through_json({rank: sampler.state_dict() for rank, sampler in enumerate(samplers)})


def samplers_from(states, length, num_parts, drop_last=True):
    samplers = [SplitSampler(length, num_parts, rank, seed=3, drop_last=drop_last) for rank in range(num_parts)]
    for sampler in samplers:
        sampler.load_state_dict(states)
    return samplers


def test_a_part_that_has_ended_its_epoch_is_ahead_of_the_others():
    _, states = advance([SplitSampler(12, 2, rank, seed=3) for rank in range(2)], [6, 2])
    assert (states["0"]["epoch"], states["1"]["epoch"]) == (1, 0)
    ended, other = samplers_from(states, 12, 2)
    assert (ended.epoch, other.epoch, len(ended), len(other)) == (1, 0, 6, 4)


@each("drop_last", [True, False])
@each("ranks", ["01", "1", "0"])
def test_at_the_beginning_of_an_epoch_another_number_of_parts_begins_a_whole_epoch(ranks, drop_last):
    _, states = advance([SplitSampler(20, 2, rank, seed=3) for rank in range(2)], [10, 10])
    some = {rank: states[rank] for rank in ranks} if len(ranks) > 1 else states[ranks]
    for rank, sampler in enumerate(samplers_from(some, 20, 3, drop_last)):
        new = SplitSampler(20, 3, rank, seed=3, drop_last=drop_last)
        new.set_epoch(1)
        assert sampler.state_dict() == new.state_dict()
        assert list(sampler) == list(new)


@each("counts", [[3, 3], [10, 3], [10, 0]])
@each("num_parts, drop_last", [(3, True), (1, True), (2, False)])
def test_within_an_epoch_another_split_is_refused_with_what_to_use(counts, num_parts, drop_last):
    _, states = advance([SplitSampler(20, 2, rank, seed=3) for rank in range(2)], counts)
    sampler = SplitSampler(20, num_parts, 0, seed=3, drop_last=drop_last)
    saved, here = "num_parts=2 and drop_last=True", f"num_parts={num_parts} and drop_last={drop_last}"
    with pytest.raises(ValueError, match=f"within epoch 0 with {saved}, .* has {here}: .* use a QueueSampler"):
        sampler.load_state_dict(states)
    assert sampler.state_dict() == SplitSampler(20, num_parts, 0, seed=3, drop_last=drop_last).state_dict()


SAVED_BY_0_2_0 = json.loads(
    '{"length": 20, "shuffle": true, "seed": 3, "num_parts": 2, "part_index": 1, "drop_last": true,'
    ' "epoch": 1, "visited": 4, "generations": []}'
)
"""State of the second of two workers, as commit 850ea04 saved it."""


def test_a_state_of_0_2_0_goes_on_in_its_order():
    sampler = SplitSampler(20, 2, 1, seed=3)
    sampler.load_state_dict(SAVED_BY_0_2_0)
    assert list(sampler) == [15, 18, 16, 10, 11, 14]


@each("by_rank", [False, True])
def test_a_state_of_0_2_0_of_an_epoch_that_was_split_again_is_refused_with_what_to_use(by_rank):
    state = {**SAVED_BY_0_2_0, "generations": [{"drop_last": True, "visited": [2, 2, 2]}]}
    with pytest.raises(ValueError, match=r"that was divided again for another number of workers.* use a QueueSampler"):
        SplitSampler(20, 2, 1, seed=3).load_state_dict({1: state} if by_rank else state)


def test_a_place_is_told_without_making_the_order_again(monkeypatch):
    sampler = SplitSampler(20, 2, 1, seed=1)
    running = iter(sampler)
    next(running)
    monkeypatch.setattr(random.Random, "shuffle", lambda *_: pytest.fail("the order was made again"))
    assert sampler.state_dict()["visited"] == 1
    assert sampler.state_dict(visited=0)["visited"] == 0
    assert sampler.epoch == 0


def test_examples_that_were_read_ahead_can_be_left_out():
    sampler = SplitSampler(20, seed=2)
    order = list(SplitSampler(20, seed=2))
    running = iter(sampler)
    for _ in range(10):
        next(running)
    resumed = SplitSampler(20, seed=2)
    resumed.load_state_dict(sampler.state_dict(visited=6))
    assert list(resumed) == order[6:]  # all of it is read ahead now, and the number counts from the epoch's beginning
    assert resumed.state_dict()["epoch"] == 1
    resumed.load_state_dict(resumed.state_dict(visited=6 + 3))
    assert resumed.state_dict()["visited"] == 9
    assert list(resumed) == order[9:]
    for wrong in (8, 21):
        with pytest.raises(ValueError, match=f"visited is {wrong}; it counts .* epoch 0, and this worker began at 9"):
            resumed.state_dict(visited=wrong)
    assert resumed.state_dict(visited=20) == {**sampler.state_dict(), "epoch": 1, "visited": 0}


def test_before_the_first_example_none_can_have_been_visited():
    sampler = SplitSampler(20, seed=2)
    assert sampler.state_dict(visited=0) == sampler.state_dict()
    assert sampler.state_dict()["epoch"] == 0
    with pytest.raises(ValueError, match="visited is 1; it counts .* epoch 0, and this worker began at 0"):
        sampler.state_dict(visited=1)


def test_a_number_of_any_integer_type_can_be_saved():
    sampler = SplitSampler(20, seed=2)
    list(sampler)
    assert through_json(sampler.state_dict(visited=np.int64(6)))["visited"] == 6


def places(**changes):
    """The states of two workers at the same step, by rank; the second with changes."""
    _, states = advance([SplitSampler(20, 2, rank, seed=1) for rank in range(2)], [3, 3])
    return {0: states["0"], 1: {**states["1"], **changes}}


HOW = r"sampler.load_state_dict\(\{rank: state\[\"sampler\"\] for rank, state in checkpoint.states.items\(\)\}\)"


@each(
    "state, message",
    [
        (None, "the state is None: that worker saved no state"),
        (3, "the state is of type int"),
        ({}, r"the state lacks length, shuffle, .*visited \(it has nothing\)"),
        ({"part_index": 0}, r"the state lacks length, .* \(it has part_index\)"),
        ({"epoch": 1, "sampler": places()[0]}, r"the state lacks length, .* \(it has epoch, sampler\)"),
        ({0: None, 1: places()[1]}, "the state of rank 0 is None: that worker saved no state"),
        ({"0": {"epoch": 0, "sampler": places()[0]}}, r"the state of rank 0 lacks .* \(it has epoch, sampler\)"),
        ({0: places()[0], 1: places()[0]}, "2 states belong to 1 parts"),
        (places(visited=-5), "rank 1 has visited=-5, which must be a whole number of at least 0"),
        (places(visited=11), "part 1 has visited=11, but the part had 10 examples"),
        (places(visited=1000)[1], "part 1 has visited=1000, but the part had 10 examples"),
        (places(visited=2.5), "rank 1 has visited=2.5"),
        (places(visited=True), "rank 1 has visited=True"),
        (places(epoch="1"), "rank 1 has epoch='1'"),
        (places(num_parts=0), "rank 1 has num_parts=0, which must be a whole number of at least 1"),
        (places(part_index=2), "rank 1 is of part_index=2, but num_parts is 2"),
        (places(drop_last=1), "rank 1 has drop_last=1, which must be true or false"),
        (places(num_parts=3), "of different times: num_parts is 2 in that of part 0 and 3 in that of part 1"),
        (places(drop_last=False), "of different times: drop_last is True in that of part 0 and False in"),
        (places(epoch=1), "of different times: epoch is 0 in that of part 0 and 1 in that of part 1"),
        (places(epoch=2, visited=0), "of different times: epoch is 0 in that of part 0 and 2 in that of part 1"),
    ],
)
@each("num_parts", [2, 3])
def test_what_is_no_state_is_refused_with_what_to_give(state, message, num_parts):
    sampler = SplitSampler(20, num_parts, 1, seed=1)
    with pytest.raises(ValueError, match=f"{message}.*{HOW}"):
        sampler.load_state_dict(state)
    assert sampler.epoch == 0 and len(sampler) == 20 // num_parts


def test_a_part_among_the_states_of_some_takes_its_state():
    _, states = advance([SplitSampler(20, 2, rank, seed=3) for rank in range(2)], [3, 3])
    own = SplitSampler(20, 2, 1, seed=3)
    own.load_state_dict({1: states["1"]})
    assert len(own) == 7


def test_a_part_whose_state_is_missing_goes_on_where_the_others_are():
    _, states = advance([SplitSampler(20, 2, rank, seed=3) for rank in range(2)], [3, 3])
    lost = SplitSampler(20, 2, 0, seed=3)
    lost.load_state_dict({1: states["1"]})
    assert lost.state_dict() == states["0"]


def test_a_place_within_an_order_that_nobody_can_make_again_is_refused():
    with pytest.raises(ValueError, match="order cannot be reproduced without a seed"):
        SplitSampler(20).load_state_dict({**SplitSampler(20).state_dict(), "visited": 3})


def test_a_place_that_does_not_belong_here_is_refused():
    running = SplitSampler(20)
    next(iter(running))
    with pytest.raises(ValueError, match="pass a seed to SplitSampler"):
        running.state_dict()
    place = SplitSampler(20, 2, 0, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"length=20, but this sampler has length=21"):
        SplitSampler(21, 2, 0, seed=1).load_state_dict(place)
    with pytest.raises(ValueError, match=r"seed=1, but this sampler has seed=2"):
        SplitSampler(20, 2, 0, seed=2).load_state_dict(place)
    with pytest.raises(ValueError, match="that of part 0 of 2, but this is part 1; give"):
        SplitSampler(20, 2, 1, seed=1).load_state_dict(place)


def test_a_data_loader_takes_the_sampler():
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(data, batch_size=2, sampler=SplitSampler(len(data), 2, 1))
    batches = [batch.tolist() for (batch,) in loader]
    assert len(loader) == len(batches) == 3
    assert sorted(index for batch in batches for index in batch) == [5, 6, 7, 8, 9]


@each(
    "arguments, message",
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


@each(
    "arguments, message",
    [
        ((TensorDataset(torch.zeros(8)), 2, 0), "length must be a whole number, not a TensorDataset; give len(data)"),
        ((torch.zeros(8, 20), 2, 0), "length must be a whole number, not a Tensor; give len(data)"),
        ((8, "2", 0), "num_parts must be a whole number, not '2' of type str"),
        ((8, 2, TensorDataset(torch.zeros(8))), "part_index must be a whole number, not a TensorDataset"),
    ],
)
def test_what_is_no_number_of_a_part_is_named(arguments, message):
    with pytest.raises(TypeError) as caught:
        SplitSampler(*arguments)
    assert str(caught.value) == message
    with pytest.raises(TypeError, match="epoch must be a whole number, not '1' of type str"):
        SplitSampler(1).set_epoch("1")  # type: ignore[arg-type]


@each("make", [np.asarray, torch.tensor])
@each("num_slice, axis", [(8, 0), (3, 1), (4, -1), (1, 0), (4, 1), (15, 0), (129, 0)])
def test_parts_of_a_batch_are_those_of_array_split(make, num_slice, axis):
    data = np.arange(128 * 33 * 4).reshape(128, 33, 4)
    parts = split_data(make(data), num_slice, axis, even_split=False)
    for part, expected in zip(parts, np.array_split(data, num_slice, axis), strict=True):
        assert type(part) is type(make(data))
        np.testing.assert_array_equal(np.asarray(part), expected)


@each(
    "data, num_slice, axis, error, message",
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


# A part for each worker does not go with workers of their own pace.


class Two(KVStore):
    """A local store that passes for that of one of two workers."""

    def __init__(self, name, own_rank=0):
        super().__init__(LocalBackend(name))
        self.own_rank = own_rank

    @property
    def num_workers(self):
        return 2

    @property
    def rank(self):
        return self.own_rank


DATA = TensorDataset(torch.ones(8, 2))


def train(store, sampler, epochs=2):
    weight = torch.nn.Parameter(torch.zeros(2))
    trainer = Trainer([weight], "sgd", {"learning_rate": 0.1}, kvstore=store)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4, sampler=sampler)
    for _ in range(epochs):
        for (inputs,) in trainer.batches(loader):
            (inputs * weight).sum().backward()
            trainer.step(samples=4)
    trainer.close()


class Own(Sampler[int]):
    """A sampler of the user's, which may be of a part."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


@each(
    "options, warns",
    [
        ({"shuffle": True, "batch_size": 4}, True),
        ({"batch_size": None}, True),
        ({"sampler": Own(), "batch_size": 4}, False),
        ({"batch_sampler": BatchSampler(Own(), 4, False)}, False),
        ({"sampler": RandomSampler(range(8), replacement=True), "batch_size": 4}, False),
        ({"dataset": Subset(DATA, range(8)), "batch_size": 4}, False),
    ],
)
def test_batches_of_data_that_nothing_divides_are_warned_of_once_by_worker_0(caplog, options, warns):
    for rank in (0, 1):
        caplog.clear()
        trainer = Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=Two("dist", rank))
        for _ in range(2):
            assert list(trainer.batches(DataLoader(**{"dataset": DATA, **options})))
        said = [one.getMessage() for one in caplog.records if "no sampler of kvdist" in one.getMessage()]
        assert len(said) == (warns and rank == 0)
        if said:
            assert "each of the 2 workers reads all 8 examples" in said[0] and "QueueSampler(len(data))" in said[0]
        trainer.close()


def parts(caplog):
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("SplitSampler gives")]


def test_a_policy_of_workers_at_their_own_pace_warns_of_equal_parts_once(caplog):
    with kv.create("dist", policy=quota(8)) as store:
        train(store, SplitSampler(8))
    (said,) = parts(caplog)
    assert "under the policy quota:8 workers do not wait" in said and "QueueSampler(len(data))" in said


def test_it_warns_in_the_first_epoch_where_the_first_step_makes_the_store(caplog, monkeypatch):
    monkeypatch.setenv("KVDIST_POLICY", "quota:8")
    train("dist", SplitSampler(8), epochs=1)
    (said,) = parts(caplog)
    assert "under the policy quota:8 " in said and "QueueSampler(len(data))" in said


def test_an_asynchronous_store_of_several_workers_warns_of_equal_parts_once_on_worker_0(caplog):
    train(Two("dist_async"), SplitSampler(8))
    train(Two("dist_async", 1), SplitSampler(8))
    (said,) = parts(caplog)
    assert "on dist_async workers do not wait" in said and "QueueSampler(len(data))" in said


@each("store", ["dist_async", "dist"])
def test_a_worker_that_is_alone_and_workers_that_wait_are_not_warned_of_equal_parts(caplog, store):
    train(Two(store) if store == "dist" else store, SplitSampler(8))
    assert not parts(caplog)
