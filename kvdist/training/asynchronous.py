"""`AsynchronousSteps` of a trainer: each step is a push and a version, as on ``dist_async``, but asks a server before.

The answer is how late the gradient is, once for all slices (`kvdist.core.server.progress`). A gradient that is too late
is dropped: the push that brings the new weights is empty.
"""

from __future__ import annotations

from kvdist.config.policies import DAMPINGS, DELAY_MAX, Asynchronous
from kvdist.kvstore.base import KVStore
from kvdist.protocol.messages import DueWhen
from kvdist.training.data import Feed
from kvdist.training.local_steps import LOG, PolicySteps
from kvdist.training.model import Model
from kvdist.training.parameters import Grads
from kvdist.training.steps import StepCall

DROPS = 10
"""After so many gradients that came too late …"""
DROPPED_SHARE = 0.2
"""… a warning follows if they are more than this share of the examples of a worker."""


class AsynchronousSteps(PolicySteps):
    """Asks before each push.

    Args:
        policy: how late a gradient may be, and the weight of a late gradient.
        model, feed, store: as of `PolicySteps`.
    """

    updates_here = False
    keeps_weights = False

    def __init__(self, policy: Asynchronous, model: Model, feed: Feed, store: KVStore) -> None:
        self._policy = policy
        self._limit = DELAY_MAX if policy.max_delay is None else policy.max_delay
        self._damping = DAMPINGS[policy.damping]
        self._grads: Grads = []
        self._divisor = 1.0
        self._drops = 0
        super().__init__(model, feed, store)

    def _apply(self, grads: Grads, call: StepCall) -> None:
        self._grads, self._divisor = grads, call.divisor(self._model.num_devices)
        self._model.watch.note_grads()

    def after_step(self) -> None:
        grads, self._grads = self._grads, []
        examples = self._feed.unpushed or self.examples
        due = self._backend.wait(self._report(examples, DueWhen.ASYNC, self._limit))
        weight = self._damping(due.delay)
        if due.delay > self._limit:
            self._drop(examples)
            grads = []
        elif weight < 1:
            grads = [given and [one * weight for one in given] for given in grads]
        with self._model.rescaled(self._divisor):
            self._push(grads or [None] * len(self._weights), True, examples)
        self.restart()

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
