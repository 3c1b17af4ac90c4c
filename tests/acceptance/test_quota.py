"""Quotas: a version of each so many examples, whichever worker has made them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kvdist
from kvdist import QueueSampler, Trainer, kv
from tests.acceptance.together import Together, exchanged, folder

three = Together(3, 2, MXNET_KVSTORE_BIGARRAY_BOUND="10", KVDIST_CHECKPOINT_ROOT="/")
DATA = torch.from_numpy(np.random.default_rng(5).normal(size=(64, 6)).astype(np.float32))
SLOWNESS = (0.0, 0.004, 0.03)
"""Seconds of a step of each worker, so that they make different numbers of them."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def backward(net, inputs):
    net.zero_grad()
    ((net(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().backward()


def batch(rank, step):
    begin = (7 * step + 13 * rank) % 50
    return DATA[begin : begin + 2 + rank].double()


def watch_pushes(steps, made, now):
    """Note which steps are in each push: `now` ends with the present one."""
    add, push, open_ = steps.add, steps._begin_push, []

    def adds(grads, samples):
        open_.append(now[-1])
        add(grads, samples)

    def pushes(*given):
        made.append(list(open_))
        open_.clear()
        return push(*given)

    steps.add, steps._begin_push = adds, pushes


def gradients_again(history, net, rate):
    """Make the versions again in one process, from what was in each: (rank, step, version of its weights)."""
    kept = [[weight.detach().clone() for weight in net.parameters()]]
    for contributions in history:
        total = sum(len(batch(rank, step)) for rank, step, _ in contributions)
        new = [weight.clone() for weight in kept[-1]]
        for rank, step, seen in contributions:
            for weight, old in zip(net.parameters(), kept[seen], strict=True):
                weight.data.copy_(old)
            backward(net, batch(rank, step))
            for value, weight in zip(new, net.parameters(), strict=True):
                value -= rate * len(batch(rank, step)) / total * weight.grad
        kept.append(new)
    return kept


@three.each("exact", "overlapped")
def test_each_version_is_the_step_of_one_process_with_the_examples_in_it(word):
    quota = kvdist.quota(16, exact=word == "exact")
    with kv.create("dist", policy=quota) as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        made, now = [], []
        for step in range(1000):
            if trainer.version >= 12:
                break
            seen = trainer.version
            time.sleep(SLOWNESS[store.rank])
            backward(net, batch(store.rank, step))
            if not step:
                trainer._start()
                watch_pushes(trainer._steps, made, now)
            now.append((store.rank, step, seen))
            trainer.step(samples=2 + store.rank)
        trainer.exchange()
        found = exchanged(store, word, [made, [weight.tolist() for weight in net.parameters()]])
        versions = max(len(own) for own, _ in found)
        history = [
            [tuple(one) for own, _ in found for one in (own[number] if number < len(own) else ())]
            for number in range(versions)
        ]
        delays = [number - seen for number, contributions in enumerate(history) for _, _, seen in contributions]
        assert min(delays) >= 0 and (max(delays) == 0) == (word == "exact"), delays
        sizes = [sum(2 + rank for rank, _, _ in contributions) for contributions in history[:11]]
        assert min(sizes) >= 16, sizes
        counts = [len(contributions) for contributions in history[:11]]
        assert max(counts) > 3, "some worker has more than one step in some version"
        *_, last = gradients_again(history, network(), 0.1)
        for own in found:
            for weight, wanted in zip(own[1], last, strict=True):
                torch.testing.assert_close(torch.tensor(weight).double(), wanted, rtol=1e-6, atol=1e-8)


@three
def test_steps_of_one_worker_at_a_time_are_those_of_large_batches_to_the_bit():
    with kv.create("dist", policy=kvdist.quota(12, exact=True)) as store, kv.create("dist") as plain:
        weight, replay = (nn.Parameter(torch.zeros(23)) for _ in range(2))
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.1}, kvstore=store)
        in_step = Trainer([replay], "sgd", {"learning_rate": 0.1}, kvstore=plain)
        trainer.broadcast_parameters()  # who makes no step in the first turn waits for it, too
        for turn in range(12):
            grads = [(torch.arange(23.0) * (7 * turn + step + 1)) % 101 - 40 for step in range(3)]
            for grad in grads if store.rank == turn % 3 else ():
                weight.grad = grad
                trainer.step(samples=4)
            trainer.exchange()
            if store.rank == turn % 3:
                replay.grad = sum(4 * grad for grad in grads) / 12
                in_step.step(samples=12)
            else:
                in_step.skip_step()
            assert torch.equal(weight, replay), turn
        assert weight.abs().max() > 1 and in_step.version == 12 <= trainer.version


@three.each("exact", "overlapped")
def test_local_steps_end_with_the_same_weights_everywhere_and_none_is_lost(word):
    quota = kvdist.quota(16, local_steps=True, exact=word == "exact")
    with kv.create("dist", policy=quota) as store:
        weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        trainer = Trainer([weight], torch.optim.SGD([weight], 1.0), kvstore=store)
        made, now = [], []
        for step in range(1000):
            if trainer.version >= 12:
                break
            time.sleep(SLOWNESS[store.rank])
            weight.grad = torch.full_like(weight, -1.0)
            if not step:
                trainer._start()
                watch_pushes(trainer._steps, made, now)
            now.append((store.rank, step, 0))
            before, version = weight.detach().clone(), trainer.version
            trainer.step(samples=2 + store.rank)
            if trainer.version == version:
                assert torch.equal(weight, before + 1), "a step of its own is made at once"
        trainer.exchange()
        found = exchanged(store, word, [made, weight.tolist()])
        versions = max(len(own) for own, _ in found)
        total = 0.0
        for number in range(versions):
            shares = [own[number] if number < len(own) else [] for own, _ in found]
            samples = [len(share) * (2 + rank) for rank, share in enumerate(shares)]
            total += sum(len(share) * own for share, own in zip(shares, samples, strict=True)) / (sum(samples) or 1)
        for own in found:
            assert own[1] == pytest.approx([total] * 4), "the mean of what all have changed, weighted by samples"


@three.each("gradients", "local steps")
def test_what_few_bits_lose_comes_with_the_next_push(word):
    rates = np.float32([1e-3, 0.3, 1.0, -0.011])
    quota = kvdist.quota(1_000_000, local_steps=word == "local steps", bits=4)
    with kv.create("dist", policy=quota) as store:
        weight = nn.Parameter(torch.zeros(4))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for _ in range(100):
            weight.grad = torch.from_numpy(-(1 + store.rank) * rates)
            trainer.step(samples=1 + store.rank)
            trainer.exchange()
        mean = (1 * 1 + 2 * 2 + 3 * 3) / (1 + 2 + 3)
        off = np.abs(store.pull(0) - 100 * mean * rates)
        assert (off > 0).any(), "they do lose something"
        assert off.max() <= 3.0 / 7, "no more than one push can lose"


@three
def test_a_worker_in_a_long_step_holds_nobody_up():
    with kv.create("dist", policy="quota:4") as store:
        net = nn.Linear(1, 1, bias=False)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.01}, kvstore=store)
        sign = Path(folder("long"), "done")
        for step in range(1000):
            if store.rank == 2 and step == 2:
                until = time.monotonic() + 60
                while not sign.exists() and time.monotonic() < until:
                    time.sleep(0.01)
                assert sign.exists(), "versions come while this worker is in its step"
            if trainer.version >= 30 or (store.rank == 2 and step == 5):
                break
            net.zero_grad()
            net(torch.ones(2, 1)).sum().backward()
            trainer.step(samples=2)
        if store.rank == 0:
            sign.touch()
        trainer.exchange()
        store.barrier()
        shutil.rmtree(sign.parent, ignore_errors=True)


@three.each("gradients", "local steps")
def test_each_example_of_a_queue_is_used_once(word):
    quota = kvdist.quota(8, local_steps=word == "local steps")
    with kv.create("dist", policy=quota) as store:
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
        found = exchanged(store, word.replace(" ", "-"), [visited, net.weight.tolist()])
        assert sorted(number for own, _ in found for number in own) == sorted([*range(60)] * 2)
        assert len({str(weights) for _, weights in found}) == 1


@three.each(*(f"quota:8{how}" for how in ("", ",exact", ",local_steps")), "local_sgd:2,quorum=2")
def test_all_come_to_an_exchange_after_the_end_of_the_data(word):
    # The workers without examples rest before the others' last pushes, and count fewer rounds than these.
    with kv.create("dist", policy=word) as store:
        path = folder(word)
        weight = nn.Parameter(torch.zeros(4))
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.01}, kvstore=store)
        loader = torch.utils.data.DataLoader(torch.ones(40, 4), 2, sampler=QueueSampler(40))
        for turn in range(2):
            for inputs in trainer.batches(loader):
                weight.grad = None
                (inputs @ weight).mean().backward()
                trainer.step(samples=len(inputs))
                time.sleep(SLOWNESS[(store.rank + turn) % 3] / 3)
            trainer.exchange()
            trainer.save_checkpoint(path, turn + 1).result()
            found = exchanged(store, f"{word}-{turn}", [trainer.version, weight.tolist()])
            assert len({str(one) for one in found}) == 1, found
            assert trainer.samples_seen == 40 * (turn + 1)
        store.barrier()
        shutil.rmtree(path, ignore_errors=True)


@three
def test_a_checkpoint_has_what_all_have_made_and_training_goes_on_from_it():
    with kv.create("dist", policy="quota:12,local_steps") as store:
        path = folder("checkpoint")
        weight = nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for _ in range(4 + store.rank):
            weight.grad = -torch.ones(3)
            trainer.step(samples=1)
        trainer.save_checkpoint(path, 1).result()
        saved = weight.detach().clone()
        assert len({str(one) for one in exchanged(store, "saved", saved.tolist())}) == 1
        weight.grad = -torch.ones(3)
        trainer.step(samples=1)
        trainer.load_checkpoint(path)
        assert torch.equal(weight, saved)
        weight.grad = -torch.ones(3)
        trainer.step(samples=1)
        trainer.exchange()
        assert weight.tolist() == pytest.approx((saved + 1).tolist())
        store.barrier()
        shutil.rmtree(path, ignore_errors=True)


@three
def test_what_does_not_go_with_a_quota_is_told():
    with kv.create("dist", policy="quota:8") as store:
        weight = nn.Parameter(torch.zeros(3))
        trainer = Trainer([weight], "sgd", kvstore=store)
        weight.grad = torch.ones(3)
        with pytest.raises(ValueError, match=r"quota:8, which counts examples: call step\(samples=n\)"):
            trainer.step()
        with pytest.raises(kvdist.ConfigError, match="quota:8"), trainer.join():
            pass
        store.barrier()
    for wrong in ("quota", "quota:0", "quota:8,0.5,0.9", "quota:8,fast", "quota:2.5"):
        with pytest.raises(ValueError, match=f"policy {wrong!r}"):
            kv.create("dist", policy=wrong)


@three
def test_learning_rates_that_workers_change_at_their_own_pace_need_not_agree():
    with kv.create("dist", policy="quota:12") as store:
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for step in range(60):
            if step:
                trainer.set_learning_rate(1.0 + 0.01 * step * (1 + store.rank))
            time.sleep(SLOWNESS[store.rank] / 4)
            weight.grad = torch.full_like(weight, -1.0)
            trainer.step(samples=2)
        trainer.exchange()
        found = exchanged(store, "rates", [weight.tolist(), trainer.version])
        assert all(own == found[0] for own in found)
        assert trainer.version < weight[0] < 3 * trainer.version, "each version had the rate of one of them"
