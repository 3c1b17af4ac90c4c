"""`AloneSteps` of a trainer: each step is a push and a version, as on ``dist_async``, but a server is asked before it.

It says how late the gradient is, once for all slices (`kvdist.core.server.progress`). A gradient that is too late is
dropped: the push that brings the new weights is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvdist.config.policies import DAMPINGS, DELAY_MAX, Asynchronous
from kvdist.kvstore.backend import Average
from kvdist.protocol.messages import Due, DueWhen
from kvdist.training.local_steps import LOG, Exchanges
from kvdist.training.parameters import Grads, Parameter

DROPS = 10
"""After so many gradients that came too late …"""
DROPPED_SHARE = 0.2
"""… it is said whether they are more than this share of the examples of a worker."""


class AloneSteps(Exchanges):
    """Asks before each push.

    Args:
        policy: how late a gradient may be, and what it counts then.
        parameters, unpushed: as of `Exchanges`.
        update: pushes gradients and writes the new weights; see `Exchange.update`.
        report: asks; see `DistBackend.report_progress`.
        take: the result of a future of that.
    """

    sums_gradients = True
    keeps_weights = False

    def __init__(
        self,
        policy: Asynchronous,
        parameters: Sequence[Parameter],
        unpushed: Callable[[], int],
        update: Callable[[Grads, Average, int], object],
        report: Callable[[int, DueWhen, int, bool, bool], Future[Due | None]],
        take: Callable[[Future[Any]], Any],
    ) -> None:
        self._policy = policy
        self._limit = DELAY_MAX if policy.max_delay is None else policy.max_delay
        self._damping = DAMPINGS[policy.damping]
        self._update = update
        self._report = report
        self._take = take
        self._grads: Grads = []
        self._drops = 0
        super().__init__(parameters, unpushed)

    def require_alike(self, samples: int | None) -> None:
        """Steps may be of any kind: each is a version of its own."""

    def add(self, grads: Grads, samples: int) -> None:
        super().add(grads, samples)
        self._grads = grads

    def after_step(self) -> None:
        grads, self._grads = self._grads, []
        examples = self._unpushed() or self.examples
        due = self._take(self._report(examples, DueWhen.ASYNC, self._limit, False, False))
        weight = self._damping(due.delay)
        if due.delay > self._limit:
            self._drop(examples)
            grads = []
        elif weight < 1:
            grads = [given and [one * weight for one in given] for given in grads]
        self._update(grads or [None] * len(self._weights), True, examples)
        self.begin()

    def finish(self, together: bool) -> None:
        """Each step has done so."""

    def _drop(self, samples: int) -> None:
        """Count the examples of a gradient that is too late for any version, and say once that they are many."""
        self.samples_dropped += samples or 1
        self._drops += 1
        if self._drops == DROPS and self.samples_dropped > DROPPED_SHARE * self.given:
            LOG.warning(
                "%d of the %d examples of this worker came too late and were dropped, under the policy %s: this machine"
                " is too slow for it. kvdist.quota(samples) drops nothing, and a max_delay may be larger",
                self.samples_dropped,
                max(self.given, self.samples_dropped),
                self._policy,
            )
        elif self._drops == DROPS:
            self._drops = 0
