"""How parameters are split into fragments, and how policies of local steps are written."""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import Future
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import kvdist
from kvdist.config.policies import policy_from
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.optimizer.registry import create
from kvdist.protocol.messages import Due
from kvdist.training.asynchronous import DROPS
from kvdist.training.data import Feed
from kvdist.training.grad_checks import Stale
from kvdist.training.local_steps import OuterSteps, split_evenly
from kvdist.training.model import Model
from kvdist.training.parameters import collect
from kvdist.training.quota import QuorumSteps, QuotaSteps
from kvdist.training.steps import StepCall
from kvdist.training.trainer_config import check_losses
from tests.cases import each

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(SIZES, st.data())
def test_each_parameter_is_in_one_fragment_and_none_has_much_more_bytes_than_another(sizes, data):
    number = data.draw(st.integers(1, len(sizes)))
    fragments = split_evenly(sizes, number)
    assert sorted(place for places in fragments for place in places) == list(range(len(sizes)))
    assert len(fragments) == number and all(places == sorted(places) for places in fragments)
    assert all(fragments), "each has something to push"
    loads = [sum(max(sizes[place], 1) for place in places) for places in fragments]
    assert max(loads) - min(loads) <= max(*sizes, 1)


def test_layers_of_equal_size_go_to_all_fragments_by_turns():
    assert split_evenly([100, 8, 100, 8, 100, 8, 100, 8], 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_policy_of_fragments_is_what_its_text_says():
    for policy in (
        kvdist.local_sgd(20, fragments=4),
        kvdist.local_sgd(20, delay=3),
        kvdist.diloco(100, 0.5, 0.25, fragments=8, delay=0, bits=4),
        kvdist.diloco(7, bits=16),
        kvdist.quota(512, local_steps=True, learning_rate=0.7, momentum=0.9, bits=8),
        kvdist.quota(512, exact=True, bits=4),
    ):
        assert policy_from(str(policy)) == policy
    assert str(kvdist.diloco(100, fragments=4)) == "diloco:100,0.7,0.9,fragments=4"
    assert kvdist.diloco(100, fragments=4).steps_until_answer == 25
    assert kvdist.diloco(100).steps_until_answer == 0


@pytest.mark.parametrize("words", ["fragments=2", "fragments=2,delay=0", "delay=1"])
def test_nobody_promises_the_weights_of_an_undisturbed_run_where_a_lost_worker_takes_steps_with_it(words):
    store = KVStore(LocalBackend("local"))
    for on_loss in ("continue", "fail"):
        store._backend.on_loss = on_loss
        check_losses(store, policy_from(f"local_sgd:4,{words}"))
    store._backend.on_loss = "wait"
    check_losses(store, policy_from("local_sgd:4"))
    with pytest.raises(kvdist.ConfigError, match="leave fragments and delay out, or use continue"):
        check_losses(store, policy_from(f"local_sgd:4,{words}"))


class Queue:
    """As much of a `QueueSampler` as counts what is used."""

    def __init__(self):
        self.handed = self.used = 0

    def _use(self, iteration, used, unknown):
        self.used = used

    @property
    def unused(self):
        return self.handed - self.used


class Job:
    """A worker of a policy with nobody else, and its store, whose pushes are under way until `answer`."""

    def __init__(self, policy):
        self.feed, self.pushes = Feed(), []
        self.queue = self.feed.queue = Queue()
        self.weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        self.model = Model(collect(self.weights), create("sgd"), None, False)
        self.steps = self.steps_of(policy)

    def steps_of(self, policy):
        return OuterSteps(policy, self.model, self.feed, self)

    @property
    def _backend(self):
        return self

    def wait(self, future):
        return future.result()

    def pushpull(self, keys, grads, **options):
        raise AssertionError("nothing waits for an answer here")

    def pushpull_async(self, keys, grads, out, average, samples):
        future, out = Future(), [places[0] for places in out]
        self.pushes.append((tuple(keys), samples, future, out, [grad and grad[0].clone() for grad in grads]))
        return future

    def answer(self, number, value=0.0):
        _, _, future, out, _ = self.pushes[number]
        for place in out:
            place.fill_(value)
        future.set_result(None)

    def step(self, examples):
        self.queue.handed += examples
        self.feed.reached[self.queue] = (1, self.queue.handed, "")
        self.steps.add([], 0)
        for weight in self.weights:
            weight.data.add_(1)
        self.steps.passed += 1
        self.steps.pending = self.feed.unpushed
        self.steps.after_step()


class QuotaJob(Job):
    """The same under a quota of which each step is enough; a push is made as soon as the one before is answered."""

    def __init__(self, policy):
        self.interrupts, self.made = False, queue.SimpleQueue()
        super().__init__(policy)

    def steps_of(self, policy):
        kind = QuotaSteps if isinstance(policy, kvdist.Quota) else QuorumSteps
        return kind(policy, self.model, self.feed, self)

    def pushpull_async(self, *args, **options):
        future = super().pushpull_async(*args, **options)
        self.made.put(future)
        return future

    def report_progress(self, key, work, when, quota, now, together):
        due = Future()
        due.set_result(Due(0, 0, False, 0))
        return due

    def wait(self, future):
        if self.interrupts and not future.done():
            raise KeyboardInterrupt
        return future.result()

    def answer_and_push(self, number, value):
        self.answer(number, value)
        while len(self.pushes) < number + 2:
            self.made.get(timeout=10)

    def step(self, examples, grad=0.0):
        self.queue.handed += examples
        self.feed.reached[self.queue] = (1, self.queue.handed, "")
        with self.steps.stepping():
            grads = [[torch.full((2,), grad)]] * 3
            self.steps.add(grads, examples)
            if not self.steps.updates_here:
                self.steps._apply(grads, StepCall(None, examples, Stale.USE))
            for weight in self.weights if self.steps.updates_here else ():
                weight.data.add_(1)
            self.steps.passed += 1
            self.steps.pending = self.feed.unpushed
            self.steps.after_step()


def first_of(push):
    """The first number of a push."""
    return None if push[4][0] is None else push[4][0][0].item()


def test_where_an_exchange_takes_longer_than_a_step_a_worker_takes_the_newest_weights_that_are_here():
    job, seen = QuotaJob(kvdist.quota(8)), []
    with contextlib.closing(job.steps):
        job.step(1, 0.5)
        for number in range(4):
            job.answer_and_push(number, 10.0 + number)  # in the middle of a step
            seen.append(job.weights[0][0].item())
            job.step(10 ** (number + 1), 1.5 + number)
            assert job.weights[0][0] == 10.0 + number
            assert job.model.updates == number + 1
    assert seen == [0, 10, 11, 12], "steps are made with the weights with which they have begun"
    pushes = [(push[1], first_of(push)) for push in job.pushes]
    assert pushes == [(1, 0.5), (0, None), (10, 1.5), (100, 2.5), (1000, 3.5)]
    assert job.queue.used == 111, "the push with the last 1000 is under way"
    assert len({id(push[3][0]) for push in job.pushes}) == 2, "one more copy of the weights is enough"


def test_local_steps_of_such_a_worker_are_each_in_one_push_and_kept_meanwhile():
    job = QuotaJob(kvdist.quota(8, local_steps=True))
    with contextlib.closing(job.steps):
        job.step(1)
        for number, expected in enumerate([11, 22, 32, 42]):  # one step meanwhile at first, and then two
            job.answer_and_push(number, 10.0 * (number + 1))
            job.step(1)
            assert job.weights[0][0] == expected
    assert [first_of(push) for push in job.pushes] == [-1, None, -1, -1, -1]


@given(st.lists(st.booleans(), max_size=12))
def test_whatever_is_answered_when_a_worker_has_the_newest_weights_and_its_steps_that_these_lack(answers):
    job, steps, values = QuotaJob(kvdist.quota(8, local_steps=True)), 0, []
    with contextlib.closing(job.steps):
        for is_answer in (False, *answers):
            if is_answer:
                values.append(100.0 * (len(values) + 1))
                job.answer_and_push(len(values) - 1, values[-1])
                continue
            job.step(10**steps)
            steps += 1
            present = [first_of(push) or 0 for push in job.pushes[: len(values)]]
            assert job.weights[0][0] == (values[-1] if values else 0) + steps + sum(present)
            assert job.queue.used == sum(push[1] for push in job.pushes[: len(values)])
            assert job.model.updates == len(values)


@each("local_steps", [False, True])
def test_a_wait_for_new_weights_that_is_interrupted_forgets_nothing(local_steps):
    job = QuotaJob(kvdist.quota(8, local_steps=local_steps, exact=True))
    job.interrupts = True
    with contextlib.closing(job.steps):
        with pytest.raises(KeyboardInterrupt):
            job.step(1, 0.5)
        assert job.steps.left() == {job.queue: (1, 1, "")}, "it has left"
        with pytest.raises(KeyboardInterrupt):
            job.step(10, 1.5)
        job.answer(0, 10.0)
        with pytest.raises(KeyboardInterrupt):
            job.step(100, 2.5)
    assert job.model.updates == 1
    assert job.weights[0][0] == (12 if local_steps else 10), "with the two steps meanwhile"
    mean = (10 * 1.5 + 100 * 2.5) / 110
    assert [first_of(push) for push in job.pushes] == ([-1, -2] if local_steps else [0.5, pytest.approx(mean)])


@each("local_steps", [False, True])
def test_a_push_that_fails_raises_once_and_counts_as_pushed(local_steps):
    job = QuotaJob(kvdist.quota(8, local_steps=local_steps))
    with contextlib.closing(job.steps):
        job.step(1, 0.5)
        job.pushes[0][2].set_exception(kvdist.KvdistError("refused"))
        with pytest.raises(kvdist.KvdistError, match="refused"):
            job.step(10, 1.5)
        job.step(100, 2.5)
        job.answer(1, 10.0)
        job.step(1000, 3.5)
    assert job.model.updates == 2
    assert first_of(job.pushes[1]) == (-2 if local_steps else pytest.approx((10 * 1.5 + 100 * 2.5) / 110))
    assert job.weights[0][0] == (11 if local_steps else 10)


def test_what_a_push_could_not_send_is_in_the_next_one():
    job = QuotaJob(kvdist.quota(8))
    with contextlib.closing(job.steps):
        with mock.patch.object(job, "pushpull_async", side_effect=MemoryError), pytest.raises(MemoryError):
            job.step(2, 1.0)
        job.step(6, 3.0)
    assert [(push[1], first_of(push)) for push in job.pushes] == [(8, 2.5)]


def test_what_a_worker_leaves_with_is_what_it_has_pushed_and_each_push_says_its_own_examples():
    job = Job(kvdist.local_sgd(4, fragments=2, delay=2))
    for examples in (1, 10):
        job.step(examples)
    assert [push[:2] for push in job.pushes] == [((0, 2), 11)]
    job.step(100)
    assert job.queue.used == 0, "it is under way"
    job.answer(0)
    job.step(1000)
    assert job.queue.used == 11, "the answer is there"
    assert job.weights[0][0] == 2, "what it did meanwhile is kept"
    assert [push[:2] for push in job.pushes] == [((0, 2), 11), ((1,), 1111)]
    job.step(10_000)
    assert job.queue.used == 11
    assert job.steps.left() == {} and job.queue.used == 1111, "others get the rest"
    job.answer(1, 7.0)
    job.step(100_000)
    assert job.weights[1][0] == 9, "7, and two steps meanwhile"
    assert job.pushes[2][:2] == ((0, 2), 111_100)
    assert job.pushes[2][4][0][0] == -4, "the two steps meanwhile are in the next push, and the two behind them"


@each("policy", ["local_sgd:3", "quota:64", "async:2,none"])
@each("update_on_kvstore", [True, False])
def test_a_policy_says_who_updates_so_a_trainer_must_not(policy, update_on_kvstore):
    weight = torch.nn.Parameter(torch.zeros(2))
    with kvdist.kv.create("dist", policy=policy) as store:
        trainer = kvdist.Trainer([weight], "sgd", kvstore=store, update_on_kvstore=update_on_kvstore)
        weight.sum().backward()
        with pytest.raises(kvdist.ConfigError, match=f"policy {policy}.* update_on_kvstore: leave them out"):
            trainer.step(samples=1)


@each("steps, warns", [(60, False), (40, True)])
def test_steps_that_do_not_say_their_examples_count_as_one_each_beside_those_that_were_dropped(caplog, steps, warns):
    weight = torch.nn.Parameter(torch.zeros(2))
    with kvdist.kv.create("dist", policy="async:2") as store:
        trainer = kvdist.Trainer([weight], "sgd", kvstore=store)
        for _ in range(steps):
            weight.sum().backward()
            trainer.step()
        assert trainer.samples_dropped == 0
        for _ in range(DROPS):
            trainer._steps._drop(0)
    assert trainer.samples_dropped == 10
    said = f"10 of the {steps} examples of this worker came too late and were dropped, under the policy async:2"
    assert (said in caplog.text) is warns
    assert ("came too late" in caplog.text) is warns


@each("means", [True, False])
def test_a_version_of_a_quota_is_the_mean_over_its_examples_whatever_the_sizes_of_batches(means):
    data = TensorDataset(torch.arange(12.0, dtype=torch.float64))
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with kvdist.kv.create("dist", policy=kvdist.quota(12, exact=True)) as store:
        trainer = kvdist.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for (x,) in trainer.batches(DataLoader(data, 8, sampler=kvdist.QueueSampler(12, shuffle=False))):
            weight.grad = None
            losses = weight * x
            (losses.mean() if means else losses.sum()).backward()
            trainer.step(None if means else len(x))
        trainer.exchange()
        assert trainer.optimizer.rescale_grad == 1.0
    assert weight.item() == -5.5
