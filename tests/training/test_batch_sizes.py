"""What a worker's speed is, and which batch size takes it as long as the others."""

from __future__ import annotations

import pytest
import torch

from kvdist import Trainer
from kvdist.protocol.messages import StepTimes
from kvdist.training.batch_sizes import STEPS, Speed

DEVICES = [torch.device("cuda:1"), torch.device("cpu")]


class Times:
    """A clock, and which devices were waited for."""

    def __init__(self):
        self.now, self.settled = 0.0, []
        self.speed = Speed(DEVICES, lambda: self.now)

    def step(self, seconds, samples):
        self.now += seconds
        self.speed.computed(samples)
        self.now += 100.0  # waiting for others is not computing
        self.speed.stepped()


@pytest.fixture
def times(monkeypatch):
    made = Times()
    monkeypatch.setattr(torch.cuda, "synchronize", made.settled.append)
    return made


def test_nothing_is_measured_before_it_is_asked_for(times):
    for _ in range(3):
        times.step(1.0, 4)
    assert times.speed.examples_per_s() == 0 and not times.settled


def test_nothing_is_advised_before_anything_was_measured(times):
    assert times.speed.examples_per_s() == 0
    times.step(1.0, 4)
    assert times.speed.examples_per_s() == 0 and not times.settled, "when that step began is not known"
    assert times.speed.share(32, 5.0) == 32


def test_a_worker_gets_as_many_times_the_examples_as_it_is_faster_than_the_mean_and_a_pause_changes_nothing(times):
    times.speed.examples_per_s()
    for turn in range(STEPS + 1):
        times.step(60.0 if turn == 3 else 2.0, 8)
    assert times.settled == DEVICES[:1] * STEPS
    assert times.speed.examples_per_s() == 4.0
    assert [times.speed.share(32, mean) for mean in (4.0, 2.0, 8.0, 1e9)] == [32, 64, 16, 1]


def test_a_speed_that_changes_is_followed_within_the_steps_that_count(times):
    times.speed.examples_per_s()
    for _ in range(2 * STEPS):
        times.step(1.0, 8)
    for _ in range(STEPS):
        times.step(4.0, 8)
    assert times.speed.examples_per_s() == 2.0


def test_one_worker_takes_the_batches_that_it_names_and_they_have_an_example_at_least():
    trainer = Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=None)
    assert trainer.advise_batch_size(7) == 7
    with pytest.raises(ValueError, match="batch_size is 0; it is the number of examples of a batch, at least 1"):
        trainer.advise_batch_size(0)


class Program:
    """A training loop by a clock that goes when the program does something."""

    def __init__(self):
        self.now = self.waited = 0.0
        self.speed = Speed([], lambda: self.now, lambda: self.waited)
        self.reports = []

    def load(self, seconds, waits=0.0):
        """Batches of a loader that computes, and waits for the store."""
        while True:
            self.now += seconds + waits
            self.waited += waits
            yield "batch"

    def run(self, steps, compute, blocked, batches):
        for _, _ in zip(range(steps), batches, strict=False):
            self.now += compute + blocked
            self.waited += blocked
            times = self.speed.stepped(32)
            self.reports += [] if times is None else [times]


def test_once_a_second_it_is_told_how_the_time_of_steps_went():
    program = Program()
    program.run(10, 0.25, 0.125, program.speed.loading(program.load(0.125)))
    assert program.reports == [StepTimes(2, 64, 250_000, 500_000, 250_000, 0)] * 4, "the first step begins the first"


def test_what_a_loader_waits_for_the_store_is_waiting_and_no_data():
    program = Program()
    program.run(9, 0.25, 0.125, program.speed.loading(program.load(0.0, waits=0.125)))
    assert program.reports == [StepTimes(2, 64, 0, 500_000, 500_000, 0)] * 4


def test_slow_steps_are_reports_of_their_own():
    program = Program()
    program.run(4, 3.0, 0.0, program.load(0.0))
    assert program.reports == [StepTimes(1, 32, 0, 3_000_000, 0, 0)] * 3
