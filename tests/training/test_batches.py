"""`Trainer.batches`: what a sampler says after steps, whatever the loader has prepared; and where a run goes on."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from kvdist import SplitSampler, Trainer, kv
from tests.cases import each, pairs

EPOCHS, LENGTH = 3, 41


class Pairs(Sampler):
    """A batch sampler of somebody else."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        order = iter(self.sampler)
        while batch := list(itertools.islice(order, 2)):
            yield batch


class Run:
    """A worker of some, with a network of one weight; it records the examples of each step."""

    def __init__(self, state=None, ranks=1, rank=0, length=LENGTH, by="size", drop_last=False, kvstore=None, **loader):
        self.net = torch.nn.Linear(1, 1)
        self.trainer = Trainer(self.net.parameters(), "sgd", {"learning_rate": 0.0}, kvstore=kvstore)
        self.sampler = SplitSampler(length, ranks, rank, seed=3)
        data = TensorDataset(torch.arange(length, dtype=torch.float32).reshape(-1, 1))
        if by == "size":
            loader |= {"batch_size": 4, "sampler": self.sampler, "drop_last": drop_last}
        elif by == "batch_sampler":
            loader["batch_sampler"] = BatchSampler(self.sampler, 4, drop_last)
        elif by == "sampler of batches":
            loader |= {"batch_size": None, "sampler": BatchSampler(self.sampler, 4, drop_last)}
        elif by == "single":
            loader |= {"batch_size": None, "sampler": self.sampler}
        else:
            loader["batch_sampler"] = Pairs(self.sampler)
        self.loader = DataLoader(data, **loader)
        self.steps = []
        """(epoch, examples) of each."""
        if state is not None:
            self.sampler.load_state_dict(state)

    def backward(self, inputs):
        self.net(inputs.reshape(-1, 1)).mean().backward()
        return inputs.flatten().int().tolist()

    def train(self, stop=None, passes=1, epochs=EPOCHS):
        """Train to the end, or up to a step; returns the state then."""
        for epoch in range(self.sampler.epoch, epochs):
            pending = []
            for number, (inputs,) in enumerate(self.trainer.batches(self.loader), 1):
                pending += self.backward(inputs)
                if number % passes == 0:
                    self.step(epoch, pending)
                    pending = []
                    if len(self.steps) == stop:
                        return self.sampler.state_dict()
        return self.sampler.state_dict()

    def steps_of(self, epoch):
        """The examples of an epoch, in the order of their use."""
        return [one for number, batch in self.steps if number == epoch for one in batch]

    def step(self, epoch, pending):
        self.trainer.step()
        self.net.zero_grad()
        self.steps.append((epoch, pending))


PLAIN = {"num_workers": 0}
AHEAD = {"num_workers": 2}
KEPT = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}


@each(
    "loader, by, drop_last",
    pairs([PLAIN, AHEAD, KEPT], ["size", "batch_sampler", "sampler of batches"], [False, True]),
)
def test_a_run_that_is_stopped_and_goes_on_makes_the_steps_of_one_that_is_not(loader, by, drop_last):
    whole = Run(by=by, drop_last=drop_last, **loader)
    end = whole.train()
    per_epoch = 10 if drop_last else 11
    assert len(whole.steps) == EPOCHS * per_epoch
    assert (end["epoch"], end["visited"]) == (EPOCHS, 0)
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 1):
        first = Run(by=by, drop_last=drop_last, **loader)
        second = Run(first.train(stop), by=by, drop_last=drop_last, **PLAIN)
        assert second.train() == end
        assert first.steps + second.steps == whole.steps, f"stopped after {stop}"


@each("loader", [PLAIN, AHEAD])
def test_batches_count_when_the_step_with_their_gradient_is_made(loader):
    whole = Run(**loader)
    whole.train(passes=3)
    for stop in range(1, len(whole.steps)):
        first = Run(**loader)
        state = first.train(stop, passes=3)
        second = Run(state, **PLAIN)
        second.train(passes=3)
        assert first.steps + second.steps == whole.steps, f"stopped after {stop}"


@each("by", ["single", "pairs"])
def test_batches_of_any_sampler_count_without_worker_processes(by):
    whole = Run(by=by, length=7)
    whole.train()
    first = Run(by=by, length=7)
    second = Run(first.train(2), by=by, length=7)
    second.train()
    assert first.steps + second.steps == whole.steps


@each("loader", [{"by": "pairs"}, {"in_order": False}])
def test_where_the_batches_are_not_known_only_the_end_of_an_epoch_is_saved(loader):
    run = Run(num_workers=1, **loader)
    with pytest.raises(RuntimeError, match="a batch sampler of its own, or in_order=False"):
        run.train(2)
    assert run.sampler.state_dict(visited=4)["visited"] == 4
    run.steps.clear()
    assert run.train(epochs=2)["visited"] == 0


def test_a_loop_that_was_left_goes_on_with_the_batches_that_no_step_has_used():
    run = Run(length=20, **AHEAD)
    for number, (inputs,) in enumerate(run.trainer.batches(run.loader)):
        if number == 2:  # handed out, and not used
            break
        run.step(0, run.backward(inputs))
    assert run.sampler.state_dict()["visited"] == 8
    assert run.sampler.epoch == 0
    run.train(epochs=2)
    assert Counter(run.steps_of(0)) == Counter(range(20))
    assert Counter(run.steps_of(1)) == Counter(range(20))


def test_an_exception_in_the_loop_loses_no_batch():
    run = Run(length=20)
    with pytest.raises(ZeroDivisionError):
        for (inputs,) in run.trainer.batches(run.loader):
            run.step(0, run.backward(inputs))
            if len(run.steps) == 3:
                raise ZeroDivisionError
    run.train(epochs=1)
    whole = Run(length=20)
    whole.train(epochs=1)
    assert run.steps_of(0) == whole.steps_of(0)


def test_what_the_last_step_of_an_epoch_has_left_counts_with_the_next_one():
    run = Run(length=20)
    for _ in range(2):
        for number, (inputs,) in enumerate(run.trainer.batches(run.loader), 1):
            run.backward(inputs)
            if number in (2, 4):
                run.trainer.step()
                state = run.sampler.state_dict()
                run.net.zero_grad()
        assert run.sampler.state_dict() == state, "the fifth batch has reached no step"
    assert (state["epoch"], state["visited"]) == (1, 16)


def test_naming_the_epoch_gives_up_what_is_left_of_the_one_before():
    run = Run(length=20)
    for (inputs,) in run.trainer.batches(run.loader):
        run.step(0, run.backward(inputs))
        break
    run.sampler.set_epoch(1)
    assert (run.sampler.state_dict()["epoch"], run.sampler.state_dict()["visited"]) == (1, 0)
    run.train(epochs=2)
    assert len(run.steps_of(1)) == 20


def test_loaders_have_positions_of_their_own():
    run, other = Run(length=20, **AHEAD), Run(length=12)
    for (inputs,) in run.trainer.batches(run.loader):
        for _ in run.trainer.batches(other.loader):
            pass
        assert len(list(other.loader)) == 3
        run.step(0, run.backward(inputs))
        if len(run.steps) == 2:
            break
    assert run.sampler.state_dict()["visited"] == 8


def test_a_position_that_was_loaded_meanwhile_stays():
    run = Run(length=20)
    state = Run(length=20).train(3)
    for (inputs,) in run.trainer.batches(run.loader):
        run.sampler.load_state_dict(state)
        run.step(0, run.backward(inputs))
        break
    assert run.sampler.state_dict() == state


@each("call", ["skip_step", "update", "torch"])
def test_every_way_to_make_a_step_counts(call):
    run = Run(length=20, kvstore="device")
    for (inputs,) in run.trainer.batches(run.loader):
        run.backward(inputs)
        before = run.sampler.state_dict()["visited"]
        if call == "skip_step":
            run.trainer.skip_step()
        elif call == "update":
            run.trainer.allreduce_grads()
            run.trainer.update()
        else:
            run.trainer.as_torch_optimizer().step()
        assert run.sampler.state_dict()["visited"] == before + 4
        run.net.zero_grad()
        if before == 8:
            break


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_everything_else_is_only_iterated():
    run = Run(length=20)
    assert list(run.trainer.batches([1, 2, 3])) == [1, 2, 3]
    assert len(run.trainer.batches([1, 2, 3])) == 3
    assert [int(one) for one in run.trainer.batches(DataLoader(Stream(), batch_size=None))] == list(range(5))
    assert len(list(run.trainer.batches(DataLoader(range(6), 2, shuffle=True, num_workers=1)))) == 3
    assert len(run.trainer.batches(run.loader)) == 5


@each("loader", [AHEAD, KEPT])
def test_a_plain_loader_that_reads_ahead_has_no_position_to_save(loader):
    run = Run(length=20, **loader)
    beginning = run.sampler.state_dict()
    for _ in run.loader:
        with pytest.raises(RuntimeError, match=r"trainer\.batches\(loader\)"):
            run.sampler.state_dict()
        assert run.sampler.state_dict(visited=4)["visited"] == 4
    with pytest.raises(RuntimeError, match="num_workers > 0"):
        run.sampler.state_dict()
    run.sampler.load_state_dict(beginning)
    assert run.sampler.state_dict() == beginning


def test_a_plain_loader_has_a_position_unless_processes_of_any_loader_were_here_when_it_began():
    run, outer = Run(length=20), DataLoader(range(8), 4, num_workers=1)
    for _ in outer:
        for _ in run.loader:
            break
    with pytest.raises(RuntimeError, match=r"trainer\.batches\(loader\)"):
        run.sampler.state_dict()
    run.sampler.set_epoch(0)
    for _ in run.loader:
        break
    assert run.sampler.state_dict()["visited"] == 4


class Wrapper:
    """A loader of somebody else around one of torch's; its processes do not show."""

    def __init__(self, loader):
        self.loader = loader
        self.batch_sampler = loader.batch_sampler

    def __iter__(self):
        return iter(self.loader)


def test_a_loader_of_another_kind_has_a_position_unless_it_reads_ahead():
    for loader in (PLAIN, AHEAD):
        run = Run(length=20, **loader)
        for (inputs,) in run.trainer.batches(Wrapper(run.loader)):
            run.step(0, run.backward(inputs))
            break
        if loader is PLAIN:
            assert run.sampler.state_dict()["visited"] == 4
        else:
            with pytest.raises(RuntimeError, match="how many examples each batch has is not known"):
                run.sampler.state_dict()


def test_a_batch_sampler_of_somebody_else_counts_beside_processes_of_another_loader():
    run, outer = Run(by="pairs", length=20), DataLoader(range(8), 4, num_workers=1)
    for _ in outer:
        for (inputs,) in run.trainer.batches(run.loader):
            run.step(0, run.backward(inputs))
            break
        break
    assert run.sampler.state_dict()["visited"] == 2


def test_batches_work_with_a_store():
    with kv.create("dist") as store:
        run = Run(length=20, kvstore=store, **AHEAD)
        assert run.train(2)["visited"] == 8
