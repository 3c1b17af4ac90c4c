"""`QuotaSteps` of a trainer: workers exchange after a number of examples of all together; and `QuorumSteps`.

A server decides when (`kvdist.core.server.progress`). Each worker then pushes the results of its steps since its last
push, also in the middle of a step, on another thread; and takes the new weights at the end of that step. So no
worker waits for the step that another is at. What it does meanwhile is kept: local steps are added to the new weights,
gradients count in the next version. Where an exchange takes longer than a step, an exchange is nearly always under way:
at the end of a step a worker takes the weights of the newest version that is complete.

`QuorumSteps` push local steps when enough workers have finished theirs; a worker that has not pushes nothing then, and
goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from kvdist.config.policies import LocalSteps, Quota, TrainingPolicy, updates_between
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.protocol.messages import Due, DueWhen
from kvdist.runtime.waits import AwaitedLock, wait_for
from kvdist.training.data import Feed, Reached, count_as_used
from kvdist.training.local_steps import LOG, PolicySteps
from kvdist.training.model import Model
from kvdist.training.parameters import Grads
from kvdist.training.steps import StepCall

HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Push:
    """A push, with all results of this worker since it took weights last.

    Attributes:
        answer: done when its version is complete, and that version's weights are in `landing`. None if it has failed
            and that was raised.
        landing: where these come.
        number: how many pushes these are.
        changes: by all these pushes, of local steps.
        used: the examples that they were of; see `count_as_used`.
        examples: number of examples of a queue among those.
    """

    answer: Future[Any] | None
    landing: list[torch.Tensor]
    number: int
    changes: list[torch.Tensor]
    used: Reached
    examples: int

    @property
    def is_complete(self) -> bool:
        """Whether its version's weights have arrived."""
        return self.answer is not None and self.answer.done() and self.answer.exception() is None


NOTHING_PUSHED = Push(None, [], 0, [], {}, 0)


class QuotaSteps(PolicySteps):
    """Counts the examples of a worker since its last push, and makes the next push when it is due.

    Args:
        policy: size of a quota, and its unit.
        model, feed, store: as of `PolicySteps`. What the feed has handed out counts as used when the new weights
            have arrived.
    """

    counts_steps = False
    has_own_pace = True
    when = DueWhen.QUOTA
    """By which rule a push is due."""

    def __init__(self, policy: TrainingPolicy, model: Model, feed: Feed, store: KVStore) -> None:
        self.updates_here = updates_between(policy)
        self._policy = policy
        self._has_warned = False
        self._waits = isinstance(policy, Quota) and policy.exact
        self._lock = AwaitedLock()
        """Held while a step changes weights and sums, and while they are pushed."""
        self._pusher = ThreadPoolExecutor(1, "kvdist-quota")
        self._last: Push | None = None
        """The last push, until weights are taken that have it."""
        self._complete: Push | None = None
        """The push before the last, if its version's weights have arrived and were not taken."""
        self._failure: Exception | None = None
        """Of the pusher's thread; the next step raises it."""
        self._asked: Future[Due | None] | None = None
        """When the next push is due."""
        self._ready: Reached = {}
        """What the steps so far have used."""
        self._sums: list[torch.Tensor | None] = []
        self._landings: list[list[torch.Tensor]] = []
        """Memory for the weights of the last push, and of another push where an exchange takes longer than a step."""
        super().__init__(model, feed, store)

    def restart(self) -> None:
        with self._lock:
            if self._last is not None and self._last.answer is not None:
                wait_for([self._last.answer])
            self._last = self._complete = self._asked = self._failure = None
            self._ready = {}
            super().restart()
            self._sums = [None] * len(self._weights)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        with self._lock:
            yield
        self._push_if_due()  # that may have come at the end of the step

    def _checked(self, call: StepCall) -> StepCall:
        samples, feed = call.samples, self._feed
        if samples is None:
            samples = (feed.examples if feed.queue is None else feed.unpushed - self.pending) or None
        if samples is None:
            raise ValueError(
                f"step() under the policy {self._policy}, which counts examples: call step(samples=n) with the number"
                " of examples that the loss is a mean of, or iterate trainer.batches(loader) with a QueueSampler"
            )
        if isinstance(self._policy, Quota) and samples > self._policy.samples and not self._has_warned:
            self._has_warned = True
            LOG.warning(
                "a step of %d examples is more than a version of the policy %s: each version has more examples than"
                " that. Make the quota larger, or the batches smaller",
                samples,
                self._policy,
            )
        return replace(call, samples=samples)

    def _apply(self, grads: Grads, call: StepCall) -> None:
        if self.updates_here:
            super()._apply(grads, call)
            return
        # The mean over the step's examples, times their number: a push sends the mean over all its examples.
        weight = (call.samples or 0) / call.divisor(self._model.num_devices)
        for place, grad in enumerate(grads):
            if grad is None:
                continue
            present = self._sums[place]
            if present is None:
                wide = grad[0].float() if grad[0].dtype in HALF else grad[0]
                self._sums[place] = wide * weight
            else:
                present.add_(grad[0], alpha=weight)
        self._model.watch.note_grads()

    def after_step(self) -> None:
        self._ready = dict(self._feed.reached)
        self._land(self._last if self._waits else self._newest)
        if not self._is_due and self._has_news:
            self._ask()
        if self._is_due and self._can_push:
            self._start()
            if self._waits:
                self._land(self._last)
            self._ask()

    def finish(self, together: bool) -> None:
        with self._lock:
            self._ready = dict(self._feed.reached)
            while True:
                self._land(self._last)
                due = self._backend.wait(self._report_progress(now=not together, together=together))
                self._start(everything=True)
                self._land(self._last)
                if not together or due.together:
                    return

    def left(self) -> Reached:
        with self._lock:
            left = {} if self._last is None else dict(self._last.used)
            for push in (self._complete, self._last):
                if push is not None:
                    push.used, push.examples = {}, 0
            return left

    def close(self) -> None:
        self._pusher.shutdown(wait=False)

    # What policies differ in.

    @property
    def _number(self) -> int:
        """How much work of all workers a version is due after: examples."""
        return cast(Quota, self._policy).samples

    @property
    def _progress(self) -> int:
        """How much work this worker has done since its last push: examples."""
        return self.samples

    @property
    def _has_news(self) -> bool:
        """Whether the last step has changed `_progress`."""
        return True

    @property
    def _is_ready(self) -> bool:
        """Whether the accumulated gradient belongs to a version that is already due."""
        return True

    # When a push is due.

    def _report_progress(self, *, now: bool = False, together: bool = False) -> Future[Due | None]:
        return self._report(self._progress, self.when, self._number, now=now, together=together)

    def _ask(self) -> None:
        """Report the work since the last push, and ask when the next push is due."""
        asked = self._asked = self._report_progress()
        if not self._waits:
            asked.add_done_callback(self._hear)

    def _hear(self, asked: Future[Due | None]) -> None:
        if asked.exception() is None and asked.result() is not None:
            self._look_soon(asked)

    def _look_soon(self, _: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._pusher.submit(self._push_if_due)

    @property
    def _is_due(self) -> bool:
        return self._asked is not None and self._asked.done() and self._backend.wait(self._asked) is not None

    @property
    def _can_push(self) -> bool:
        """Whether no push is under way, and no failure waits to be raised."""
        return self._last is None or self._last.answer is None or self._last.is_complete

    @property
    def _newest(self) -> Push | None:
        """The last push that is answered and whose weights are not taken."""
        last = self._last
        return last if last is not None and last.answer is not None and last.answer.done() else self._complete

    def _push_if_due(self) -> None:
        """Push, unless a step is in progress, which looks by itself."""
        if self._waits or not self._lock.acquire(blocking=False):
            return
        try:
            if self._can_push and self._is_due:
                self._start()
                self._ask()
        except Exception as error:  # noqa: BLE001  # the next step raises it
            self._failure = error
        finally:
            self._lock.release()

    # With the lock held.

    def _start(self, *, everything: bool = False) -> None:
        """Push. The version of the last push is complete, and perhaps its weights are not taken.

        Args:
            everything: also what the policy would keep for the next version.
        """
        nothing: Grads = [None] * len(self._weights)
        before = NOTHING_PUSHED if self._last is None else self._last
        landing = self._place()  # before anything has changed: there may be no memory
        self._asked = None
        if not (everything or self._is_ready):
            self._send(nothing, True, 0, replace(before, number=before.number + 1, landing=landing))
            return
        samples = self.pending - before.examples or self.samples
        grads, changes = nothing, before.changes
        if self.made and not self.updates_here:
            grads = [
                None if total is None else [total.div_(self.samples).to(weight.dtype)]
                for weight, total in zip(self._weights, self._sums, strict=True)
            ]
        elif self.made:
            changes = self._changes()
            news = torch._foreach_sub(changes, before.changes) if before.changes else changes
            grads = [[change] for change in news]
        push = Push(None, landing, before.number + 1, changes, self._ready, self.pending)
        try:
            self._send(grads, "samples" if self.made else True, samples, push)
        except BaseException:
            for total in self._sums:
                if total is not None:
                    total.mul_(self.samples)  # it is in the next push
            raise
        self._sums = [None] * len(self._weights)
        self._count_anew(push.examples)

    def _place(self) -> list[torch.Tensor]:
        """Memory for the weights of the next version, other than that of weights that are still to be taken."""
        kept = self._last if self._last is not None and self._last.is_complete else self._complete
        for landing in self._landings:
            if kept is None or landing is not kept.landing:
                return landing
        self._landings.append([torch.empty_like(weight) for weight in self._weights])
        return self._landings[-1]

    def _send(self, grads: Grads, average: Average, samples: int, push: Push) -> None:
        push.answer = self._begin_push(grads, average, samples, push.landing)
        push.answer.add_done_callback(self._look_soon)
        if self._last is not None and self._last.is_complete:
            self._complete = self._last
        self._last = push

    def _land(self, push: Push | None) -> None:
        """Take the weights of the last push, or of the push before; wait for them."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if push is None or push.answer is None:
            return
        try:
            self._backend.wait(push.answer)
        except BaseException:
            if push.answer.done():  # else the wait was interrupted, and a later step takes them
                push.answer = None
            raise
        if push is self._last:
            self._last = None
        self._complete = None
        if (self.passed or self._last is not None) and self.updates_here:
            moved = torch._foreach_sub(push.landing, self._before)
            if push.changes:
                torch._foreach_add_(moved, push.changes)
            torch._foreach_add_(self._weights, moved)
        else:
            torch._foreach_copy_(self._weights, push.landing)
        torch._foreach_copy_(self._before, push.landing)
        count_as_used(dict(push.used))
        if self._last is not None:
            self._last.number -= push.number
            self._last.examples -= push.examples
            if self._last.changes and push.changes:
                self._last.changes = list(torch._foreach_sub(self._last.changes, push.changes))
        self.pending = self._feed.unpushed
        self._model.updates += push.number


class QuorumSteps(QuotaSteps):
    """Steps alone, and exchanges when this worker and enough others have enough steps."""

    when = DueWhen.QUORUM

    @property
    def _number(self) -> int:
        return cast(LocalSteps, self._policy).quorum or 1

    @property
    def _progress(self) -> int:
        return int(self._is_ready)

    @property
    def _has_news(self) -> bool:
        return self.passed == cast(LocalSteps, self._policy).every

    @property
    def _is_ready(self) -> bool:
        return self.passed >= cast(LocalSteps, self._policy).every
