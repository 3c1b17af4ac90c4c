"""`Ballot`: data that workers with local updates exchange beside the gradients of a step.

A ballot is a further key of the same exchange, so it costs no message. Its content:

* For each parameter, whether a worker had a gradient: all workers must update the same parameters.
* Whether a worker averages, sums or weighs by samples: all with gradients must do the same where no server divides.
* The number of examples of each worker's gradients, as far as it is known: in digits, since float32 keeps whole numbers
  apart only up to 2**24, which a step of tokens exceeds. Their sum divides gradients that are weighted.
* A digest of the optimizer's numbers in an element for each worker, so that all workers see whether the numbers differ:
  then each would make another step, and the weights would drift apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvdist.errors import OptimizerMismatch
from kvdist.naming import who_says_what
from kvdist.optimizer.base import Optimizer, numbers_of

DIGESTS = 1 << 20
"""Number of different digests: whole numbers that float32 keeps apart, also divided by a number of workers."""

CONVENTIONS = 3
"""Number of conventions: averages, sums, and gradients that are weighted by their samples."""

DIGIT, DIGITS = 1 << 8, 4
"""Base and number of the digits that encode a number of examples up to `SAMPLES_MAX`. The sum of a digit over some
thousand workers is exact, also divided by their number."""


class Ballot:
    """The ballots of a trainer.

    Args:
        key: key of the ballot in the store.
        optimizer: the optimizer, whose numbers must be the same on every worker.
        parameters: number of trained parameters.
        rank: rank of this worker.
        num_workers: number of workers.
    """

    def __init__(self, key: int, optimizer: Optimizer, parameters: int, rank: int, num_workers: int) -> None:
        self.key = key
        self._optimizer = optimizer
        self._parameters = parameters
        self._rank = rank
        self._num_workers = num_workers
        self._names = [name for name in numbers_of(type(optimizer)) if name != "rescale_grad"]

    def cast(
        self, had: Sequence[bool], average: bool, is_weighted: bool = False, examples: int = 0
    ) -> NDArray[np.float32]:
        """Return this worker's ballot.

        Args:
            had: for each trained parameter, whether this worker has a gradient.
            average: whether this worker averages. Without any gradient, as in a skipped step, it votes for no
                convention.
            is_weighted: whether its gradients were multiplied by `examples`; then it neither averages nor sums.
            examples: number of examples of the gradients; 0 if it is not known.
        """
        own = np.zeros((self._num_workers, 3), np.float32)
        own[self._rank] = self._digest(), self._optimizer.learning_rate, 1.0
        takes_part = any(had)
        convention = [average, not average and not is_weighted, is_weighted]
        digits = [examples // DIGIT**place % DIGIT for place in range(DIGITS)]
        return np.array([*had, *(takes_part * number for number in (*convention, *digits)), *own.ravel()], np.float32)

    def read(self, result: NDArray[np.float32]) -> tuple[list[bool], NDArray[np.float32]]:
        """For each trained parameter whether any worker had a gradient; and the votes for each convention.

        Args:
            result: the ballots of all workers, summed or averaged.
        """
        return (result[: self._parameters] > 0).tolist(), result[self._parameters : self._parameters + CONVENTIONS]

    def examples(self, result: NDArray[np.float32]) -> int:
        """Number of examples of the gradients of all workers."""
        begin = self._parameters + CONVENTIONS
        sums = result[begin : begin + DIGITS].astype(np.float64) / self.share(result)
        return sum(round(digit) * DIGIT**place for place, digit in enumerate(sums.tolist()))

    def share(self, result: NDArray[np.float32]) -> float:
        """Factor between the sums of all workers and the result: 1, or 1 / number of workers if it is an average."""
        # Those that had gradients were all averaged or all summed; one that skips the step is averaged, and says 0.
        return float(self._said(result)[:, 2].max())

    def _said(self, result: NDArray[np.float32]) -> NDArray[np.float32]:
        return result[self._parameters + CONVENTIONS + DIGITS :].reshape(-1, 3)

    def require_equal_numbers(self, result: NDArray[np.float32]) -> None:
        """Compare the workers' optimizers; in a step without any gradient, which updates nothing, they may differ.

        Raises:
            OptimizerMismatch: the optimizers have different numbers; all workers raise it.
        """
        said = self._said(result)
        there = np.flatnonzero(said[:, 0])
        # Some may have been averaged and others not, as those of a worker that skips the step.
        digests, live = np.rint(said[there, 0] / said[there, 2]), said[there, 1] / said[there, 2]
        if len(set(digests.tolist())) <= 1 or not result[: self._parameters].any():
            return
        rates = [f"{rate:.6g}" for rate in live]
        more = [f", and a digest {digest:.0f} of all numbers" for digest in digests]
        own = [
            (int(rank), f"learning rate {rate}{rest if len(set(rates)) == 1 else ''}")
            for rank, rate, rest in zip(there, rates, more, strict=True)
        ]
        raise OptimizerMismatch(
            "the optimizers of the workers differ in learning rate, wd, multipliers or momentum, and each updates its"
            f" own weights, which would drift apart: {who_says_what(own)}. Change the numbers on every worker at the"
            " same step; the weights are those of the last step"
        )

    def _digest(self) -> int:
        """Digest of all numbers that decide a step; never 0, the element of a worker that has left."""
        live = self._optimizer
        tables = [sorted(map(repr, table.items())) for table in (live.lr_mult, live.wd_mult) if table]
        return 1 + zlib.crc32(repr([[vars(live)[name] for name in self._names], tables]).encode()) % (DIGESTS - 1)
