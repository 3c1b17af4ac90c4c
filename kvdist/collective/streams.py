"""The order of operations on CUDA tensors: behind what their caller gave the device before, ahead of what follows.

No device is waited for. The group's thread works on a stream of its own, which waits for the caller's as it was when
the operation was submitted; whoever asks for the result lets its present stream wait for that of the group.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvdist.collective.operation import Operation


class DeviceFuture(Future[Any]):
    """The future of an operation on CUDA tensors.

    Args:
        operation: kept until the result has been asked for, and with it the tensors that the device may still read.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation: Operation | None = operation
        # Operations that do not say where their tensors are have them where the caller works.
        self.device = operation.cuda_device if operation.cuda_device is not None else torch.cuda.current_device()
        self._called = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._called.record(torch.cuda.current_stream(self.device))
        self._finished: torch.cuda.Event | None = None

    def order_after_caller(self, stream: torch.cuda.Stream) -> None:
        """Let the group's stream wait for what the caller had begun."""
        stream.wait_event(self._called)

    def order_before_result(self, stream: torch.cuda.Stream) -> None:
        """Let whoever gets the result wait for what the group's stream has begun."""
        self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._finished.record(stream)

    def result(self, timeout: float | None = None) -> Any:
        """The result, to be used on the present stream."""
        value = super().result(timeout)
        if self._finished is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._finished)
            for tensor in _tensors_in(value):
                tensor.record_stream(stream)
            self._operation = None
        return value


class Stream:
    """The stream of a group, made at the first operation on CUDA tensors."""

    def __init__(self) -> None:
        self._made: dict[int, torch.cuda.Stream] = {}

    def entered(self, future: Future[Any]) -> AbstractContextManager[Any]:
        """For what the group's thread does for an operation."""
        if not isinstance(future, DeviceFuture):
            return contextlib.nullcontext()
        return torch.cuda.stream(self._on(future.device))

    def follow(self, future: Future[Any]) -> None:
        """Order the stream behind the caller of an operation."""
        if isinstance(future, DeviceFuture):
            future.order_after_caller(self._on(future.device))

    def lead(self, future: Future[Any]) -> None:
        """Order the result of an operation behind the stream."""
        if isinstance(future, DeviceFuture):
            future.order_before_result(self._on(future.device))

    def _on(self, device: int) -> torch.cuda.Stream:
        if device not in self._made:
            self._made[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._made[device]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_cuda else []
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []
