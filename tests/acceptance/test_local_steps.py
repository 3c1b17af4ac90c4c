"""Policies of local steps: each worker's own optimizer between two exchanges, and an outer one on the servers."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kvdist
from kvdist import QueueSampler, SplitSampler, Trainer, kv
from tests.acceptance.together import Together, same
from tests.cases import each

two = Together(2, 2, MXNET_KVSTORE_BIGARRAY_BOUND="10", KVDIST_CHECKPOINT_ROOT="/")
DATA = torch.from_numpy(np.random.default_rng(5).normal(size=(64, 6)).astype(np.float32))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def backward(net, inputs):
    net.zero_grad()
    ((net(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().backward()


def batch(rank, step, count=4):
    begin = (7 * step + 13 * rank) % 50
    return DATA[begin : begin + count]


class Reference:
    """All workers' steps in one process, with torch alone."""

    def __init__(self, workers, rate=1.0, momentum=0.0):
        self.weights = network()
        self.outer = torch.optim.SGD(self.weights.parameters(), rate, momentum=momentum, nesterov=momentum > 0)
        self.nets = [network() for _ in range(workers)]
        self.optimizers = [torch.optim.AdamW(net.parameters(), 0.05) for net in self.nets]

    def step(self, rank, inputs):
        backward(self.nets[rank], inputs)
        self.optimizers[rank].step()

    def exchange(self, shares):
        owns = [list(net.parameters()) for net in self.nets]
        for i, weight in enumerate(self.weights.parameters()):
            changes = [weight.detach() - own[i].detach() for own in owns]
            weight.grad = sum(share * change for share, change in zip(shares, changes, strict=True))
        self.outer.step()
        for own in owns:
            for weight, mine in zip(self.weights.parameters(), own, strict=True):
                mine.data.copy_(weight.data)


class Streamed:
    """The same with fragments and a delay: what a worker changes while a fragment is under way is kept."""

    def __init__(self, workers, fragments, every, delay, rate, momentum):
        self.nets = [network() for _ in range(workers)]
        self.optimizers = [torch.optim.AdamW(net.parameters(), 0.05) for net in self.nets]
        self.shared = list(network().parameters())
        self.outers = [
            torch.optim.SGD([self.shared[place] for place in places], rate, momentum=momentum, nesterov=momentum > 0)
            for places in fragments
        ]
        self.fragments, self.delay, self.steps = fragments, delay, 0
        self.times = [every * number // len(fragments) for number in range(1, len(fragments) + 1)]
        self.under_way = []

    def step(self, batches, shares):
        for net, optimizer, inputs in zip(self.nets, self.optimizers, batches, strict=True):
            backward(net, inputs)
            optimizer.step()
        self.steps += 1
        for one in [one for one in self.under_way if one[0] == self.steps]:
            self.land(*one)
        for number, time in enumerate(self.times):
            if self.steps % self.times[-1] == time % self.times[-1]:
                self.push(number, shares)

    def push(self, number, shares):
        places = self.fragments[number]
        at_push = [[list(net.parameters())[place].detach().clone() for place in places] for net in self.nets]
        for index, place in enumerate(places):
            changes = [self.shared[place].detach() - own[index] for own in at_push]
            self.shared[place].grad = sum(share * change for share, change in zip(shares, changes, strict=True))
        self.outers[number].step()
        new = [self.shared[place].detach().clone() for place in places]
        self.under_way.append((self.steps + self.delay, places, new, at_push))
        if not self.delay:
            self.land(*self.under_way[-1])

    def land(self, when, places, new, at_push):
        for net, own in zip(self.nets, at_push, strict=True):
            for index, place in enumerate(places):
                list(net.parameters())[place].data.add_(new[index] - own[index])
        self.under_way = [one for one in self.under_way if one[0] != when or one[1] is not places]


def equal(net, other):
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def differ(net, other):
    return any(not torch.equal(mine, its) for mine, its in zip(net.parameters(), other.parameters(), strict=True))


@two.each("local_sgd", "diloco", "diloco by samples")
def test_weights_are_what_torch_makes_of_the_same_steps(word):
    policy = kvdist.local_sgd(3) if word == "local_sgd" else kvdist.diloco(3, learning_rate=0.7, momentum=0.9)
    with kv.create("dist", policy=policy) as store:
        net, reference = network(), Reference(2, policy.learning_rate, policy.momentum)
        trainer = Trainer(net.parameters(), torch.optim.AdamW(net.parameters(), 0.05), kvstore=store)
        sizes = (2, 6) if "samples" in word else (4, 4)
        for step in range(9):
            for rank in range(2):
                reference.step(rank, batch(rank, step, sizes[rank]))
            backward(net, batch(store.rank, step, sizes[store.rank]))
            trainer.step(samples=sizes[store.rank] if "samples" in word else None)
            if step % 3 == 2:
                reference.exchange([size / sum(sizes) for size in sizes])
                equal(net, reference.weights)
            equal(net, reference.nets[store.rank])
            assert trainer.version == step + 1
        before = copy.deepcopy(net)
        backward(net, batch(store.rank, 9))
        trainer.step(samples=sizes[store.rank] if "samples" in word else None)
        assert differ(net, before)
        trainer.exchange(), trainer.exchange()  # the second one has nothing to do
        assert trainer.version == 10
        pulled = store.pull(0)
        same(next(net.parameters()), pulled)


@two
def test_a_worker_that_skips_steps_is_at_the_exchange_too_and_changes_nothing():
    with kv.create("dist", policy="local_sgd:2") as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        for step in range(2):
            if store.rank:
                trainer.skip_step()
            else:
                backward(net, batch(0, step))
                trainer.step(samples=4)
        alone = network()
        torchs = torch.optim.SGD(alone.parameters(), 0.1)
        for step in range(2):
            backward(alone, batch(0, step))
            torchs.step()
        equal(net, alone)


@two
def test_a_checkpoint_has_all_steps_and_the_place_in_the_data_that_belongs_to_them():
    with kv.create("dist", policy="local_sgd:4") as store:
        folder = Path(tempfile.gettempdir(), f"kvdist-local-steps-{os.getppid()}")
        net = network()
        sampler = SplitSampler(48, 2, store.rank, seed=1)
        loader = torch.utils.data.DataLoader(DATA[:48], 4, sampler=sampler)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05}, kvstore=store)
        visited = []
        for inputs in trainer.batches(loader):
            backward(net, inputs)
            trainer.step()
            visited.append(sampler.state_dict()["visited"])
        assert visited == [0, 0, 0, 16, 16, 16]
        store.barrier()
        assert trainer.samples_seen == 32, "of what was exchanged"
        trainer.save_checkpoint(folder, 6).result()
        assert trainer.samples_seen == 48
        assert trainer.version == 6 and sampler.state_dict()["epoch"] == 1
        saved = copy.deepcopy(net)
        backward(net, DATA[:4])
        trainer.step()
        assert differ(net, saved)
        trainer.load_checkpoint(folder)
        equal(net, saved)
        store.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@two
def test_each_example_of_a_queue_is_used_once_and_its_end_exchanges_the_last_steps():
    with kv.create("dist", policy="local_sgd:3") as store:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        loader = torch.utils.data.DataLoader(torch.ones(50, 1), 2, sampler=QueueSampler(50, epochs=2, seed=3))
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=store)
        mine = 0
        for inputs in trainer.batches(loader):
            net.zero_grad()
            (-net(inputs)).mean().backward()
            trainer.step(samples=len(inputs))
            mine += len(inputs)
        assert store.average(float(mine)) == 50
        assert trainer.samples_seen == 100
        same(net.weight, store.pull(0))


@two
def test_examples_of_a_skipped_step_are_no_mistake_of_the_next_one():
    with kv.create("dist", policy="local_sgd:3") as store:
        net = network()
        loader = torch.utils.data.DataLoader(DATA, 2, sampler=QueueSampler(64, seed=3))
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        mine = 0
        for step, inputs in enumerate(trainer.batches(loader)):
            mine += len(inputs)
            if step % 4 == 1:
                trainer.skip_step()
                continue
            backward(net, inputs)
            trainer.step(samples=len(inputs))
        assert store.average(float(mine)) == 32


@two
@each("policy", ["local_sgd:2", "quota:8", "async:2,none"])
def test_a_policy_of_one_worker_alone_is_a_mismatch_on_all(policy):
    rank = int(os.environ["KVDIST_RANK"])
    with kv.create("dist", policy=policy if rank else None) as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", kvstore=store)
        backward(net, DATA[:4])
        with pytest.raises(
            kvdist.InitMismatch, match=rf"worker-0 says: 4 .*, trained are 0-3; worker-1 says: 4 .*, policy {policy}\."
        ):
            trainer.step(samples=4)


@two
def test_workers_with_other_policies_and_what_does_not_go_with_one_are_told():
    with kv.create("dist", policy=kvdist.local_sgd(2 + int(os.environ["KVDIST_RANK"]))) as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", kvstore=store)
        backward(net, DATA[:4])
        with pytest.raises(kvdist.KvdistError, match=r"local_sgd:2.*local_sgd:3"):
            trainer.step()
    for wrong in ("local_sgd", "local_sgd:0", "local_sgd:3,1,0", "diloco:3,0,0.9", "diloco:3,1", "diloco:a", "quick:3"):
        with pytest.raises(ValueError, match=f"policy {wrong!r}"):
            kv.create("dist", policy=wrong)
    for wrong in ("local_sgd:3,fragments=4", "local_sgd:3,fragments=a", "quota:3,delay=1", "diloco:3,delay=3,bits=8",
                  "diloco:3,bits=5"):  # fmt: skip
        with pytest.raises(ValueError, match=f"policy {wrong!r}"):
            kv.create("dist", policy=wrong)
    for wrong in (kvdist.local_sgd, 20):
        with pytest.raises(TypeError, match=r"write kvdist.local_sgd\(20\)"):
            kv.create("dist", policy=wrong)
    with pytest.raises(kvdist.ConfigError, match="synchronous stores on servers: use 'dist', not 'dist_async'"):
        kv.create("dist_async", policy="diloco:10")
    with kv.create("dist", policy="diloco:10") as store:
        with pytest.raises(kvdist.ConfigError, match="'rows' needs an update in each step"):
            kvdist.Embedding(10, 2, store, "rows")
        net = network()
        trainer = Trainer(net.parameters(), "sgd", kvstore=store, clip_norm=1.0)
        backward(net, DATA[:4])
        with pytest.raises(kvdist.ConfigError, match="diloco:10.*does not work with clip_norm"):
            trainer.step()


@two.each("2", "4", "2 by samples", "2 at once", "1 late")
def test_fragments_are_exchanged_by_turns_and_what_a_worker_does_meanwhile_is_kept(word):
    fragments = {"1": [[0, 1, 2, 3]], "2": [[0], [1, 2, 3]], "4": [[0], [1], [2], [3]]}[word[0]]
    delay = 0 if "at once" in word else 3 if "late" in word else None
    policy = kvdist.diloco(5, fragments=len(fragments), delay=delay)
    with kv.create("dist", policy=policy) as store:
        net = network()
        reference = Streamed(2, fragments, 5, policy.steps_until_answer, 0.7, 0.9)
        trainer = Trainer(net.parameters(), torch.optim.AdamW(net.parameters(), 0.05), kvstore=store)
        sizes = (2, 6) if "samples" in word else (4, 4)
        for step in range(14):
            batches = [batch(rank, step, sizes[rank]) for rank in range(2)]
            reference.step(batches, [size / 8 for size in sizes])
            backward(net, batches[store.rank])
            trainer.step(samples=sizes[store.rank] if "samples" in word else None)
            equal(net, reference.nets[store.rank])
        assert trainer.version == 14
        assert differ(reference.nets[0], reference.nets[1]), "this is no moment at which all weights are equal anyway"
        trainer.exchange(), trainer.exchange()
        for key, weight in enumerate(net.parameters()):
            same(weight, store.pull(key))


@two
def test_a_checkpoint_within_a_period_has_all_fragments_and_all_go_on_from_it():
    with kv.create("dist", policy="local_sgd:4,fragments=2") as store:
        folder = Path(tempfile.gettempdir(), f"kvdist-fragments-{os.getppid()}")
        net = network()
        loader = torch.utils.data.DataLoader(DATA[:48], 4, sampler=SplitSampler(48, 2, store.rank, seed=1))
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05}, kvstore=store)
        for step, inputs in enumerate(trainer.batches(loader)):
            backward(net, inputs)
            trainer.step()
            if step == 2:
                trainer.save_checkpoint(folder, 3).result()
                assert trainer.samples_seen == 24 and loader.sampler.state_dict()["visited"] == 12
                saved = copy.deepcopy(net)
                same(next(net.parameters()), store.pull(0))
        assert trainer.version == 6 and differ(net, saved)
        trainer.load_checkpoint(folder)
        equal(net, saved)
        for step in range(7):
            backward(net, batch(store.rank, step))
            trainer.step()
        trainer.exchange()
        same(next(net.parameters()), store.pull(0))
        store.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def steps_of(store, trainer, net, numbers):
    for step in numbers:
        backward(net, batch(store.rank, step))
        trainer.step()


@two.each("local_sgd:4", "diloco:4,fragments=2")
def test_each_workers_own_optimizer_goes_on_from_a_checkpoint_where_it_was(word):
    with kv.create("dist", policy=word) as store:
        folder = Path(tempfile.gettempdir(), f"kvdist-own-{os.getppid()}-{word[0]}")
        net = network()
        trainer = Trainer(net.parameters(), torch.optim.AdamW(net.parameters(), 0.05), kvstore=store)
        steps_of(store, trainer, net, range(6))
        trainer.save_checkpoint(folder, 6, state={"mine": store.rank}).result()
        steps_of(store, trainer, net, range(6, 9))
        wanted = copy.deepcopy(net)
        moments = trainer.as_torch_optimizer().state_dict()["state"][0]["exp_avg"]
        assert not np.array_equal(store.average(moments.numpy()), moments.numpy()), "each has its own"
        steps_of(store, trainer, net, range(20, 25))
        trainer.load_checkpoint(folder, states=False)
        steps_of(store, trainer, net, range(6, 9))
        assert differ(net, wanted), "the moments are of later steps"
        trainer.exchange()
        checkpoint = trainer.load_checkpoint(folder)
        assert trainer.version == checkpoint.step == 6 and checkpoint.state == {"mine": store.rank}
        steps_of(store, trainer, net, range(6, 9))
        assert not differ(net, wanted)
        store.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@two
def test_each_example_of_a_queue_is_used_once_with_fragments_too():
    with kv.create("dist", policy="local_sgd:5,fragments=2,delay=3") as store:
        net = network()
        loader = torch.utils.data.DataLoader(DATA[:50], 2, sampler=QueueSampler(50, epochs=2, seed=3))
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.01}, kvstore=store)
        mine = 0
        for inputs in trainer.batches(loader):
            backward(net, inputs)
            trainer.step(samples=len(inputs))
            mine += len(inputs)
        assert store.average(float(mine)) == 50
        assert trainer.samples_seen == 100
        for key, weight in enumerate(net.parameters()):
            same(weight, store.pull(key))


@two
def test_weights_that_are_replaced_while_fragments_are_under_way_are_those_of_rank_0():
    with kv.create("dist", policy="local_sgd:4,fragments=2,delay=3") as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05}, kvstore=store)
        for step in range(11):
            backward(net, batch(store.rank, step))
            trainer.step()
            if step == 4:
                with torch.no_grad():
                    for weight in net.parameters():
                        weight.fill_(store.rank + 1)
                trainer.broadcast_parameters()
                assert all((weight == 1).all() for weight in net.parameters())
        trainer.exchange()
        for key, weight in enumerate(net.parameters()):
            same(weight, store.pull(key))


@two
def test_more_fragments_than_parameters_are_refused():
    with kv.create("dist", policy="local_sgd:8,fragments=5") as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", kvstore=store)
        backward(net, DATA[:4])
        with pytest.raises(kvdist.ConfigError, match="5 fragments, but the Trainer only 4 parameters"):
            trainer.step()


@two.each("16", "8", "4")
def test_what_few_bits_lose_comes_with_the_next_push(bits):
    rates = np.float32([1e-3, 0.3, 1.0, -0.011])
    with kv.create("dist", policy=kvdist.local_sgd(2, bits=int(bits))) as store:
        weight = nn.Parameter(torch.zeros(4))
        trainer = Trainer([weight], torch.optim.SGD([weight], 1.0), kvstore=store)
        for _ in range(100):
            weight.grad = torch.from_numpy(-rates)
            trainer.step()
        off = np.abs(store.pull(0) - 100 * rates)
        assert (off > 0).any(), "they do lose something"
        scale = 2 * 2.0 / {16: 2000, 8: 127, 4: 7}[int(bits)]
        assert off.max() <= scale, "no more than one push can lose"


@two
def test_four_bits_train_as_well_as_32():
    losses = {}
    for bits in (32, 4):
        with kv.create("dist", policy=kvdist.local_sgd(5, bits=bits)) as store:
            net = network()
            trainer = Trainer(net.parameters(), torch.optim.AdamW(net.parameters(), 0.02), kvstore=store)
            for step in range(200):
                backward(net, batch(store.rank, step, 8))
                trainer.step()
            trainer.exchange()
            with torch.no_grad():
                losses[bits] = ((net(DATA) - DATA.sum(1, keepdim=True)) ** 2).mean().item()
    with torch.no_grad():
        before = ((network()(DATA) - DATA.sum(1, keepdim=True)) ** 2).mean().item()
    assert losses[32] < 0.2 * before, (losses, before)
    assert losses[4] < losses[32] + 0.02 * before, (losses, before)


@two
def test_a_policy_and_a_trainer_that_both_compress_are_told():
    with kv.create("dist", policy="local_sgd:8,bits=8") as store:
        net = network()
        trainer = Trainer(net.parameters(), "sgd", kvstore=store, compression_params={"type": "int4", "pull": "fp16"})
        backward(net, DATA[:4])
        with pytest.raises(kvdist.ConfigError, match="leave out one of them"):
            trainer.step()
