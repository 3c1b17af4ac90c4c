"""Buckets of gradients that travel during the backward pass: which gradients go together, and when a bucket is full.

Subclasses of `GradientBuckets` send full buckets. Invariants:

* Buckets are built in the reverse order of the parameters, roughly the order of a backward pass. They follow from sizes
  and order alone, so all workers have the same buckets. Each has a higher priority than the previous bucket, because
  the next forward pass needs the first layers, which are ready last.
* A bucket starts when every replica of all its parameters has accumulated its gradient since the last `complete`, once
  for each pass of a step. `complete` starts the others with the gradients that exist, so a parameter that the loss does
  not depend on delays only its bucket.
* No hook knows which backward pass is the last before a step. So passes that only accumulate are marked with `paused`,
  and a gradient that comes after its bucket has started raises in the backward pass.
* Hooks run on autograd's threads, one per device, under one lock. They refer to their owner weakly.
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 4 << 20
"""The size at which a bucket is full: small enough that the first bucket leaves early and a layer of a few MiB travels
alone, large enough that biases and norms travel with their layer. A bucket of any size costs a message or two to each
server."""


REENTRANT = (
    "After a single pass, the parameter is used several times in a checkpoint with use_reentrant=True, which runs a"
    " backward pass within the pass for each use: set use_reentrant=False"
)
"""Advice for a parameter whose gradient comes in several parts in a single pass."""


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        members: positions of the parameters, ascending.
        priority: buckets with higher priorities are needed earlier.
    """

    members: tuple[int, ...]
    priority: int


def arrange(sizes_bytes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets over parameters of these sizes, from the last parameter to the first.

    Each ends with the parameter that brings it to `bucket_bytes`, so only the last bucket may be smaller.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    size_bytes = 0
    for position in reversed(range(len(sizes_bytes))):
        members.append(position)
        size_bytes += sizes_bytes[position]
        if position == 0 or size_bytes >= bucket_bytes:
            buckets.append(Bucket(tuple(reversed(members)), len(buckets)))
            members, size_bytes = [], 0
    return buckets


class GradientBuckets(abc.ABC):
    """Watches the gradients of parameters and starts each bucket when it is full.

    Args:
        names: names of the parameters, for messages.
        parameters: the replicas of each parameter, one per device. Parameters without ``requires_grad`` are not
            watched.
        bucket_bytes: the size of a bucket, counted on one device.
        buckets: the buckets, if they do not follow from sizes.
        passes: backward passes whose gradients add up before a bucket is full.
        in_order: a bucket starts only after all before it. Required where workers match buckets by their order, because
            they may reach parameters in different orders.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Sequence[torch.Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        buckets: list[Bucket] | None = None,
        passes: int = 1,
        in_order: bool = False,
    ) -> None:
        self._names = names
        self._passes = passes
        self._in_order = in_order
        sizes = [replicas[0].numel() * replicas[0].element_size() for replicas in parameters]
        self.buckets = arrange(sizes, bucket_bytes) if buckets is None else buckets
        self._bucket_of = {member: bucket for bucket in self.buckets for member in bucket.members}
        self._num_devices = len(parameters[0])
        self._lock = threading.Lock()
        self._paused = 0
        self._begin_again()
        me = weakref.ref(self)
        handles = [
            replica.register_post_accumulate_grad_hook(_hook(me, member, device))  # type: ignore[no-untyped-call]
            for member, replicas in enumerate(parameters)
            for device, replica in enumerate(replicas)
            if replica.requires_grad  # a frozen one gets no gradient to wait for
        ]
        self.remove_hooks = weakref.finalize(self, _remove, handles)
        """Stops watching; a second call does nothing."""
        self.remove_hooks.atexit = False

    @abc.abstractmethod
    def begin(self) -> None:
        """Handle the first gradient since the last `complete`, or a `complete` without gradients."""

    @abc.abstractmethod
    def start(self, bucket: Bucket) -> None:
        """Send the gradients of a bucket. After an error the bucket counts as not started."""

    def too_late(self, member: int) -> Exception:
        """Return the error for a gradient that comes after its bucket has started."""
        return RuntimeError(
            f"a backward pass adds to the gradient of {self._names[member]}, which an earlier pass has sent already and"
            " no step() has used since. With overlap=True each step sends the gradients of a single backward pass: put"
            " all passes but the last before a step, and passes whose gradients are not used, into `with"
            " trainer.no_sync():`. If a pass was abandoned, call step() before the next pass, as the other workers do,"
            f" or they wait for this worker. {REENTRANT}, or overlap=False"
        )

    @property
    def is_open(self) -> bool:
        """Whether a gradient has come since the last `complete`, in a pass that was not `paused`."""
        return self._is_open

    def complete(self) -> None:
        """Start the buckets that have not started, in order; the next gradient belongs to the next step.

        Raises:
            Exception: the error of `start`. The remaining buckets are not started then.
        """
        with self._lock:
            try:
                self._open()
                for bucket in self.buckets:
                    if bucket not in self._started:
                        self.start(bucket)
            finally:
                self._begin_again()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which gradients only accumulate."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1

    def _begin_again(self) -> None:
        self._is_open = False
        self._started: set[Bucket] = set()
        self._next = 0
        """If `in_order`: the position of the first bucket that has not started."""
        self._missing = {
            bucket: {(member, device): self._passes for member in bucket.members for device in range(self._num_devices)}
            for bucket in self.buckets
        }

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.begin()

    def _accumulated(self, member: int, device: int) -> None:
        """Handle a parameter's gradient on a device, from its hook."""
        with self._lock:
            bucket = self._bucket_of[member]
            if bucket in self._started:
                raise self.too_late(member)
            if self._paused:
                return
            self._open()
            missing = self._missing[bucket]
            passes = missing.pop((member, device), 1) - 1
            if passes:
                missing[member, device] = passes
            elif not missing:
                self._start_full(bucket)

    def _start_full(self, bucket: Bucket) -> None:
        """Start a full bucket and full buckets that waited for it, unless it has to wait itself."""
        if not self._in_order:
            self.start(bucket)
            self._started.add(bucket)
            return
        while self._next < len(self.buckets) and not self._missing[self.buckets[self._next]]:
            self.start(self.buckets[self._next])
            self._started.add(self.buckets[self._next])
            self._next += 1


def _hook(owner: weakref.ref[GradientBuckets], member: int, device: int) -> Callable[[torch.Tensor], None]:
    def accumulated(_: torch.Tensor) -> None:
        buckets = owner()
        if buckets is not None:
            buckets._accumulated(member, device)

    return accumulated


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
