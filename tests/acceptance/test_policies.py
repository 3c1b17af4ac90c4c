"""Policies under which no version waits for all workers' gradients, or workers push alone: jobs of real processes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import kvdist
from kvdist import QueueSampler, Trainer, kv
from tests.acceptance.together import Together, exchanged, folder

three = Together(3, 2, MXNET_KVSTORE_BIGARRAY_BOUND="10")
SLOWNESS = (0.0, 0.002, 0.03)
"""Seconds of a step of each worker, so that they make different numbers of them."""


def weight_of(store):
    """A weight of zeros that two servers share, trained with a learning rate of 1."""
    weight = nn.Parameter(torch.zeros(24, dtype=torch.float64))
    return weight, Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)


def note_pushes(trainer):
    """Note what each push has: its first number and its examples, or None."""
    steps, pushes = trainer._steps, []
    push = steps._begin_push

    def noted(grads, average, samples, out):
        pushes.append(None if grads[0] is None else (grads[0][0][0].item(), samples))
        return push(grads, average, samples, out)

    steps._begin_push = noted
    return pushes


@contextlib.contextmanager
def told():
    """The warnings of this process meanwhile."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("kvdist").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("kvdist").removeHandler(handler)


@three
def test_a_quorum_exchanges_without_the_slow_one_and_nothing_that_it_makes_is_lost():
    with kv.create("dist", policy=kvdist.local_sgd(5, quorum=2)) as store:
        weight = nn.Parameter(torch.zeros(24, dtype=torch.float64))
        trainer = Trainer([weight], torch.optim.SGD([weight], 1.0), kvstore=store)
        trainer._start()
        pushes, made = note_pushes(trainer), 0
        while trainer.version < 12:
            time.sleep(SLOWNESS[store.rank])
            weight.grad = torch.full_like(weight, -1.0)
            trainer.step(samples=1 + store.rank)
            made += 1
        trainer.exchange()
        found = exchanged(store, "quorum", [pushes, weight.tolist(), made])
        wanted = 0.0
        for version in range(max(len(own[0]) for own in found)):
            present = [one for own in found for one in own[0][version : version + 1] if one is not None]
            total = sum(samples for _, samples in present)
            assert len(present) >= 2 or version >= 12, "a quorum"
            wanted -= sum(change * samples for change, samples in present) / (total or 1)
        for rank, own in enumerate(found):
            assert own[1] == pytest.approx([wanted] * 24, rel=1e-12)
            steps = [(-change, samples) for one in own[0] if one is not None for change, samples in [one]]
            assert sum(step for step, _ in steps) == pytest.approx(own[2]), "each step is in an exchange"
            assert all(samples == pytest.approx(step * (1 + rank)) for step, samples in steps), (rank, steps)
            assert all(step > 4.5 for step, _ in steps[:-2]), "nothing before it was enough"
        assert None in found[2][0][:12], "the slow one was late"


@three
def test_gradients_that_are_too_late_are_dropped_on_all_servers_and_counted():
    with kv.create("dist", policy=kvdist.asynchronous(3)) as store:
        weight, trainer = weight_of(store)
        made, warned = 0, []
        sign, until = Path(folder("late-sign"), "done"), time.monotonic() + 60
        while not sign.exists() and time.monotonic() < until:
            time.sleep((0.001, 0.001, 0.1)[store.rank])
            weight.grad = torch.full_like(weight, -1.0)
            with told() as said:
                trainer.step(samples=1)
            warned += said
            made += 1
            if trainer.samples_dropped >= 10 and store.rank == 2:
                sign.touch()
        dropped = trainer.samples_dropped
        found = exchanged(store, "late", [made, dropped])
        total = store.pull(0)
        assert found[2][1] > 0, "the slow one is late"
        assert len(warned) == (store.rank == 2), "and is told once"
        assert all(
            "10 of the " in one and "too late and were dropped, under the policy async:3" in one for one in warned
        )
        assert total.tolist() == [float(sum(own[0] - own[1] for own in found))] * 24
        store.barrier()
        shutil.rmtree(folder("late-sign"), ignore_errors=True)


@three
def test_what_is_late_is_damped():
    with kv.create("dist", policy="async:inverse") as store:
        weight, trainer = weight_of(store)
        trainer._start()
        steps, delays = trainer._steps, []
        report = steps._report

        def noted(*progress):
            future = report(*progress)
            future.add_done_callback(lambda answered: delays.append(answered.result().delay))
            return future

        steps._report = noted
        for _ in range(20):
            time.sleep(SLOWNESS[store.rank])
            weight.grad = torch.full_like(weight, -1.0)
            trainer.step()
        found = exchanged(store, "damped", delays)
        total = store.pull(0)
        assert max(found[2]) > 0
        assert total.tolist() == pytest.approx([sum(1 / (1 + delay) for own in found for delay in own)] * 24)
        store.barrier()


@three.each("local_sgd:2,quorum=2", "async:2")
def test_each_example_of_a_queue_is_handed_out_once(word):
    with kv.create("dist", policy=word) as store:
        net = nn.Linear(1, 1, bias=False)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        data = torch.arange(60.0).reshape(60, 1)
        visited = []
        for inputs in trainer.batches(torch.utils.data.DataLoader(data, 2, sampler=QueueSampler(60, epochs=2))):
            time.sleep(SLOWNESS[store.rank])
            net.zero_grad()
            net(inputs / 60).mean().backward()
            trainer.step()
            visited += inputs.flatten().int().tolist()
        mine = [visited, net.weight.tolist(), trainer.samples_dropped]
        found = exchanged(store, word.replace(":", "-"), mine)
        assert sorted(number for own in found for number in own[0]) == sorted([*range(60)] * 2)
        assert trainer.samples_seen == 120
        store.barrier()


@three
def test_what_does_not_go_with_a_policy_is_told():
    with kv.create("dist", policy="diloco:5,quorum=4") as store:
        weight, trainer = weight_of(store)
        weight.grad = torch.ones_like(weight)
        with pytest.raises(kvdist.ConfigError, match="a quorum of 4 workers, but the job has 3"):
            trainer.step(samples=1)
        store.barrier()
    for policy in ("quota:2", "async:1,none"):
        with kv.create("dist", policy=policy) as store:
            weight = nn.Parameter(torch.zeros(3))
            trainer = Trainer([weight], "sgd", kvstore=store, update_on_kvstore=False)
            weight.grad = torch.ones(3)
            with pytest.raises(kvdist.ConfigError, match=f"{policy}.*update_on_kvstore: leave"):
                trainer.step(samples=1)
            store.barrier()
    with kv.create("dist", policy="quota:2") as store:
        weight, trainer = weight_of(store)
        weight.grad = torch.ones_like(weight)
        with told() as said:
            trainer.step(samples=4)
        assert [one for one in said if "a step of 4 examples is more than a version of the policy quota:2" in one]
        trainer.exchange()
        store.barrier()
    with pytest.raises(kvdist.ConfigError, match="synchronous stores on servers: use 'dist', not 'dist_async'"):
        kv.create("dist_async", policy="quota:2")
    with pytest.raises(kvdist.ConfigError, match="use 'dist', not 'local'"):
        kv.create("local", policy="async:1")


@three
def test_a_policy_that_another_rank_does_not_have_is_an_error_that_names_both():
    mine = "async:1" if int(os.environ["KVDIST_RANK"]) == 1 else "async:2"
    with kv.create("dist", policy=mine) as store:
        weight, trainer = weight_of(store)
        weight.grad = torch.ones_like(weight)
        with pytest.raises(kvdist.KvdistError, match=r"async:2.*async:1|async:1.*async:2"):
            trainer.step()
