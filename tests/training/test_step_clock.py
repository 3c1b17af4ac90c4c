"""What a worker reports of the time of its steps."""

from __future__ import annotations

from kvdist.protocol.messages import StepTimes
from kvdist.training.step_clock import StepClock


class Program:
    """A training loop by a clock that goes when the program does something."""

    def __init__(self):
        self.now = self.waited = 0.0
        self.clock = StepClock(lambda: self.now, lambda: self.waited)
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
            times = self.clock.stepped(32)
            self.reports += [] if times is None else [times]


def test_once_a_second_it_is_told_how_the_time_of_steps_went():
    program = Program()
    program.run(10, 0.25, 0.125, program.clock.loading(program.load(0.125)))
    assert program.reports == [StepTimes(2, 64, 250_000, 500_000, 250_000, 0)] * 4, "the first step begins the first"


def test_what_a_loader_waits_for_the_store_is_waiting_and_no_data():
    program = Program()
    program.run(9, 0.25, 0.125, program.clock.loading(program.load(0.0, waits=0.125)))
    assert program.reports == [StepTimes(2, 64, 0, 500_000, 500_000, 0)] * 4


def test_slow_steps_are_reports_of_their_own():
    program = Program()
    program.run(4, 3.0, 0.0, program.load(0.0))
    assert program.reports == [StepTimes(1, 32, 0, 3_000_000, 0, 0)] * 3
