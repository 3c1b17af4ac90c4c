"""Gradients travel in buckets, during the backward pass: which go together, and when a bucket is full.

This is the one owner of overlap. What is done with a full bucket is left to whoever derives from `GradientBuckets`: the
`Trainer` pushes it to a store. Rules that hold here:

* Buckets are made in the reverse order of the parameters, which is about the order in which a backward pass reaches
  them. They follow from sizes and order alone, so all workers have the same ones.
* The layers that the next forward pass needs first are the last to be ready. So each bucket has a higher priority than
  the one before it.
* A bucket starts when every replica of every one of its parameters has had its gradient accumulated since the last
  `complete`, as many times as there are passes to a step. What has not started by then starts in `complete`, with the
  gradients that there are: a parameter that the loss does not depend on delays its bucket, and stops nobody.
* No hook can know which backward pass is the last one before a step. So passes that only accumulate are marked with
  `paused`, and a gradient that comes after its bucket has started is an error, in the backward pass that made it.
* Hooks run on the threads of autograd, one per device. All that they touch is under one lock, so buckets start one at a
  time.
* Hooks know their owner weakly. They go when it is closed or collected, and never keep it alive.
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
"""A bucket is full when it has so many bytes.

Small enough that the first one leaves early and a layer of a few MiB travels alone, large enough that biases and norms
travel with the layer they belong to: a bucket costs a message or two to each server, whatever its size."""


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        members: their positions, ascending.
        priority: higher is needed earlier.
    """

    members: tuple[int, ...]
    priority: int


def arrange(sizes_bytes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets over parameters of these sizes, from the last parameter to the first.

    Each ends with the parameter that brings it to `bucket_bytes`, so only the last one may have less.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    for position in reversed(range(len(sizes_bytes))):
        members.append(position)
        if position == 0 or sum(sizes_bytes[member] for member in members) >= bucket_bytes:
            buckets.append(Bucket(tuple(reversed(members)), len(buckets)))
            members = []
    return buckets


class GradientBuckets(abc.ABC):
    """Watches the gradients of parameters and starts each bucket when it is full.

    Args:
        names: what the user calls the parameters.
        parameters: each one's replicas, one per device. Those without ``requires_grad`` are not watched.
        bucket_bytes: the size of a bucket, counted on one device.
        buckets: the buckets, where sizes do not say which they are.
        passes: backward passes whose gradients add up before a bucket is full.
        in_order: a bucket starts only after all that are before it in `buckets`. Where what is started is matched with
            other workers by its order, this must be so: they may reach parameters in different orders.
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
            if replica.requires_grad  # one that was frozen meanwhile has no gradient to wait for in a pass
        ]
        self.remove_hooks = weakref.finalize(self, _remove, handles)
        """Call it to stop watching; a second call does nothing."""
        self.remove_hooks.atexit = False

    @abc.abstractmethod
    def begin(self) -> None:
        """The first gradient since the last `complete` is there, or `complete` was called without any."""

    @abc.abstractmethod
    def start(self, bucket: Bucket) -> None:
        """Do what is to be done with the gradients of a bucket. An error leaves the bucket as it was."""

    def too_late(self, member: int) -> Exception:
        """What to raise where a gradient comes after its bucket has started."""
        return RuntimeError(
            f"a backward pass adds to the gradient of {self._names[member]}, which an earlier one has sent already and"
            " no step() has taken since. With overlap=True each step sends the gradients of one backward pass: put all"
            " passes but the last before a step, and those whose gradients are not to be used, into `with"
            " trainer.no_sync():`. If a pass was abandoned, call step() before the next one, as the other workers do,"
            " or they wait for this one's part"
        )

    @property
    def is_open(self) -> bool:
        """Whether any gradient has come since the last `complete`, in a pass that was not `paused`."""
        return self._is_open

    def complete(self) -> None:
        """Start the buckets that have not started, in order; the next gradient belongs to the next step.

        Raises:
            Exception: what `start` raised. The remaining buckets have not been started then.
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
        """Within it gradients only accumulate."""
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
        self._missing = {
            bucket: {(member, device): self._passes for member in bucket.members for device in range(self._num_devices)}
            for bucket in self.buckets
        }

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.begin()

    def _accumulated(self, member: int, device: int) -> None:
        """A hook: this parameter has its gradient on this device."""
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
        """Start a full bucket, and those that have waited for it; not yet one that has to wait itself."""
        for one in self.buckets if self._in_order else [bucket]:
            if one not in self._started:
                if self._missing[one]:
                    break
                self.start(one)
                self._started.add(one)


def _hook(owner: weakref.ref[GradientBuckets], member: int, device: int) -> Callable[[torch.Tensor], None]:
    def accumulated(_: torch.Tensor) -> None:
        buckets = owner()
        if buckets is not None:
            buckets._accumulated(member, device)

    return accumulated


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
