"""`QuotaSteps` of a trainer: workers exchange when all together have made a number of examples.

A server says when (`kvdist.core.server.progress`). Each worker then pushes what its steps have made since its last
push, also in the middle of a step, on a thread of its own; and takes the new weights at the end of that step. So no
worker waits for the step that another is at. What it does meanwhile is kept: local steps are added to the new weights,
gradients count in the next version.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from kvdist.config.policies import Quota
from kvdist.kvstore.backend import Average
from kvdist.protocol.messages import Due
from kvdist.training.data import HandedOut, count_as_used
from kvdist.training.local_steps import Exchanges
from kvdist.training.parameters import Grads, Parameter

HALF = (torch.float16, torch.bfloat16)


class QuotaSteps(Exchanges):
    """Counts the examples of a worker since its last push, and makes the next one when it is due.

    Args:
        policy: how many, and of what.
        parameters, unpushed: as of `Exchanges`.
        push: pushes what this worker has, and writes new weights into given tensors; see `Exchange.begin_update`.
        report: says how many examples there are since the last push; see `DistBackend.report_progress`.
        take: the result of a future of these.
        handed_out: what counts as used when the new weights are here; see `count_as_used`.
        landed: called then, with the number of versions that came.
    """

    counts_steps = False

    def __init__(
        self,
        policy: Quota,
        parameters: Sequence[Parameter],
        unpushed: Callable[[], int],
        push: Callable[[Grads, Average, int, list[torch.Tensor]], Future[Any]],
        report: Callable[[int, bool, bool], Future[Due | None]],
        take: Callable[[Future[Any]], Any],
        handed_out: HandedOut,
        landed: Callable[[int], object],
    ) -> None:
        self.sums_gradients = not policy.local_steps
        self._quota = policy
        self._push = push
        self._report = report
        self._take = take
        self._handed_out = handed_out
        self._landed = landed
        self._lock = threading.Lock()
        """Held while a step changes weights and sums, and while they are pushed."""
        self._pusher = ThreadPoolExecutor(1, "kvdist-quota")
        self._under_way: Future[Any] | None = None
        """Of the last push, until its weights are taken."""
        self._pushes = 0
        """How many have been made since weights were taken last."""
        self._asked: Future[Due | None] | None = None
        """When the next push is due."""
        self._pushed: list[torch.Tensor] = []
        """What of the changes since weights were taken last has been pushed."""
        self._pushed_examples = 0
        """The same of the examples of a queue."""
        self._ready: HandedOut = {}
        """What the steps so far have used."""
        self._used: HandedOut = {}
        """The same of what was pushed."""
        self._sums: list[torch.Tensor | None] = []
        super().__init__(parameters, unpushed)
        self._landing = [torch.empty_like(weight) for weight in self._weights]

    def begin(self) -> None:
        with self._lock:
            if self._under_way is not None:
                wait([self._under_way])
            self._under_way = self._asked = None
            self._pushes = self._pushed_examples = 0
            self._pushed = []
            self._ready, self._used = {}, {}
            super().begin()
            self._sums = [None] * len(self._weights)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        with self._lock:
            yield
        self._push_if_due()  # that may have come at the end of the step

    def require_alike(self, samples: int | None) -> None:
        if samples is None:
            raise ValueError(
                f"step() under the policy {self._quota}, which counts examples: call step(samples=n) with the number of"
                " examples that the loss is a mean of, or iterate trainer.batches(loader) with a QueueSampler"
            )

    def add(self, grads: Grads, samples: int) -> None:
        super().add(grads, samples)
        for place, grad in enumerate(grads if self.sums_gradients else ()):
            if grad is None:
                continue
            present = self._sums[place]
            if present is None:
                wide = grad[0].float() if grad[0].dtype in HALF else grad[0]
                self._sums[place] = wide * samples
            else:
                present.add_(grad[0], alpha=samples)

    def after_step(self) -> None:
        self._ready = dict(self._handed_out)
        if self._under_way is not None and self._under_way.done():
            self._land()
        if not self._is_due:
            self._ask()
        if self._is_due and self._can_push:
            self._start()
            if self._quota.exact:
                self._land()
            self._ask()

    def finish(self, together: bool) -> None:
        with self._lock:
            self._ready = dict(self._handed_out)
            while True:
                self._land()
                due = self._take(self._report(self.samples, not together, together))
                self._start()
                self._land()
                if not together or due.together:
                    return

    def left(self) -> HandedOut:
        with self._lock:
            left, self._used, self._pushed_examples = self._used, {}, 0
            return dict(left)

    def close(self) -> None:
        self._pusher.shutdown(wait=False)

    # When a push is due.

    def _ask(self) -> None:
        """Report what there is, and ask when the next push is due."""
        asked = self._asked = self._report(self.samples, False, False)
        if not self._quota.exact:
            asked.add_done_callback(self._hear)

    def _hear(self, asked: Future[Due | None]) -> None:
        if asked.exception() is None and asked.result() is not None:
            self._look_soon(asked)

    def _look_soon(self, _: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._pusher.submit(self._push_if_due)

    @property
    def _is_due(self) -> bool:
        return self._asked is not None and self._asked.done() and self._take(self._asked) is not None

    @property
    def _can_push(self) -> bool:
        """Whether the version of the last push is complete."""
        return self._under_way is None or self._under_way.done()

    def _push_if_due(self) -> None:
        """Push what there is, unless a step is being made, which looks by itself."""
        if self._quota.exact or not self._lock.acquire(blocking=False):
            return
        try:
            if self._can_push and self._is_due:
                self._start()
                self._ask()
        except Exception as error:  # noqa: BLE001  # the next step raises it
            self._under_way = Future()
            self._under_way.set_exception(error)
        finally:
            self._lock.release()

    # With the lock held.

    def _start(self) -> None:
        """Push what there is. The weights of the last push may not be taken yet: its version is complete."""
        samples = self.handed_out - self._pushed_examples or self.samples
        grads: Grads = [None] * len(self._weights)
        if self.made and self.sums_gradients:
            grads = [
                None if total is None else [total.div_(self.samples).to(weight.dtype)]
                for weight, total in zip(self._weights, self._sums, strict=True)
            ]
        elif self.made:
            before, self._pushed = self._pushed, self._changes()
            changes = torch._foreach_sub(self._pushed, before) if before else self._pushed
            grads = [[change] for change in changes]
        self._under_way = self._push(grads, "samples" if self.made else True, samples, self._landing)
        self._under_way.add_done_callback(self._look_soon)
        self._pushes += 1
        self._asked = None
        self._used, self._pushed_examples = self._ready, self.handed_out
        self._sums = [None] * len(self._weights)
        self._count_anew()
        self.handed_out = self._pushed_examples

    def _land(self) -> None:
        """Take the new weights, when they are here."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        self._take(under_way)
        if self.passed and not self.sums_gradients:
            moved = torch._foreach_sub(self._landing, self._before)
            if self._pushed:
                torch._foreach_add_(moved, self._pushed)
            torch._foreach_add_(self._weights, moved)
        else:
            torch._foreach_copy_(self._weights, self._landing)
        torch._foreach_copy_(self._before, self._landing)
        self._pushed = []
        pushes, self._pushes = self._pushes, 0
        count_as_used(dict(self._used))
        self.handed_out, self._pushed_examples = self._unpushed(), 0
        self._landed(pushes)
