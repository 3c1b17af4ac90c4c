"""As much of CuPy as `kvdist.kernels` uses, over NumPy. Kernels run in numba's simulator.

It says what we believe of CuPy, and holds us to it: memory is touched on the stream and the device that are current.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types

import numpy as np

MODULES = ("kvdist.kernels.cupy_runtime", "kvdist.kernels.cupy_device")
"""The modules that import CuPy."""


class Pointer:
    def __init__(self, memory, offset):
        self.ptr, self.owner, self.device_id = memory.ptr + offset, memory, memory.device_id


class Memory:
    """Of NumPy, beginning at 64 bytes, and full of something."""

    def __init__(self, size, device_id=0):
        self.device_id = device_id
        self.buffer = np.full(size + 64, 0xA5, np.uint8)
        self.ptr = self.buffer.ctypes.data + -self.buffer.ctypes.data % 64


class Unowned:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.owner, self.device_id = ptr, owner, device_id


class StubArray(np.ndarray):
    """An array of the device."""

    def __new__(cls, shape, dtype=float, memptr=None):
        count = int(np.prod(shape))
        raw = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(memptr.ptr)
        raw.owner = memptr
        array = np.frombuffer(raw, dtype, count).view(cls)
        array.index = memptr.device_id
        return array

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=self.index)

    @property
    def device(self):
        return types.SimpleNamespace(id=self.index)

    def __array_finalize__(self, other):
        self.index = getattr(other, "index", 0)

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.ctypes.data, False)}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class CompileException(Exception):
    """Of the compiler of CuPy's own functions; as CuPy's, not a RuntimeError."""


class Stub:
    """The state of the pretended library, and the parts of its modules."""

    def __init__(self):
        self.devices, self.streams, self.allocators = [0], [], [None]
        self.count, self.failure = 4, None
        self.registered, self.peers, self.waited = {}, set(), []
        self.loaded, self.launched = [], []
        self.read_only = set()
        stub = self

        class Context:
            """Something that is current between its braces."""

            def __enter__(self):
                self.stack.append(self.value)
                return self

            def __exit__(self, *_):
                self.stack.pop()

        class CudaDevice(Context):
            compute_capability = "90"

            def __init__(self, index):
                self.stack, self.value = stub.devices, index

        class Stream(Context):
            @classmethod
            def from_external(cls, foreign):
                return cls(foreign.__cuda_stream__()[1])

            def __init__(self, ptr):
                self.ptr, self.stack, self.value = ptr, stub.streams, self

            def wait_event(self, event):
                stub.waited.append((self.ptr, event))

            def synchronize(self):
                stub.fail()

        self.streams.append(Stream(0))

        class Event:
            def __init__(self, block, disable_timing):
                assert block and disable_timing

            def record(self, stream):
                stub.check(stream.ptr)
                self.stream = stream.ptr

            def synchronize(self):
                stub.fail()

        class Allocator:
            def __init__(self, malloc, free):
                self._malloc = malloc

            def malloc(self, size):
                index = stub.devices[-1]
                return types.SimpleNamespace(ptr=self._malloc(size, index), device_id=index)

        class UsingAllocator(Context):
            def __init__(self, malloc):
                self.stack, self.value = stub.allocators, malloc

        class Module:
            def load(self, program):
                stub.fail()
                stub.loaded.append(program)

            def get_function(self, name):
                return lambda grid, block, arguments: stub.launched.append((name, grid, block, arguments))

        self.runtime = self.runtime_module()
        self.cuda = types.SimpleNamespace(
            runtime=self.runtime, Device=CudaDevice, Stream=Stream, Event=Event, using_allocator=UsingAllocator,
            PythonFunctionAllocator=Allocator, get_current_stream=lambda: self.streams[-1], UnownedMemory=Unowned,
            MemoryPointer=Pointer,
            function=types.SimpleNamespace(Module=Module),
            compiler=types.SimpleNamespace(CompileException=CompileException),
        )  # fmt: skip
        self.module = types.SimpleNamespace(
            __version__="14.2.0", cuda=self.cuda, ndarray=StubArray, empty=self.empty,
            asarray=np.asanyarray, ones=lambda count, dtype: np.ones(count, dtype).view(StubArray),
            argsort=lambda array: np.argsort(array, kind="stable"), not_equal=np.not_equal,
            flatnonzero=lambda array: np.flatnonzero(array).view(StubArray),
        )  # fmt: skip

    def fail(self):
        if self.failure is not None:
            raise self.failure

    def check(self, stream):
        self.fail()
        assert stream == self.streams[-1].ptr

    def empty(self, count, dtype):
        self.fail()
        size = count * np.dtype(dtype).itemsize
        malloc = self.allocators[-1]
        memory = Pointer(Memory(size, self.devices[-1]), 0) if malloc is None or not size else malloc(size)
        return StubArray((count,), dtype, memory)

    def memcpy(self, target, source, size, kind, stream):
        self.check(stream)
        ctypes.memmove(target, source, size)

    def memset(self, target, value, size, stream):
        self.check(stream)
        ctypes.memset(target, value, size)

    def memcpy_peer(self, target, target_device, source, source_device, size, stream):
        assert self.devices[-1] == target_device
        self.memcpy(target, source, size, 0, stream)

    def register(self, address, size, flags):
        if address in self.registered:
            raise CUDARuntimeError(712, "cudaErrorHostMemoryAlreadyRegistered: already")
        if address in self.read_only and not flags & 8:
            raise CUDARuntimeError(1, "cudaErrorInvalidValue: it cannot be written to")
        self.registered[address] = size

    def enable_peer(self, peer):
        assert peer != self.devices[-1]
        if (self.devices[-1], peer) in self.peers:
            raise CUDARuntimeError(704, "cudaErrorPeerAccessAlreadyEnabled: already")
        self.peers.add((self.devices[-1], peer))

    def device_count(self):
        self.fail()
        return self.count

    def runtime_module(self):
        return types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, getDeviceCount=self.device_count, runtimeGetVersion=lambda: 12090,
            memGetInfo=self.fail, memcpyAsync=self.memcpy, memsetAsync=self.memset, memcpyPeerAsync=self.memcpy_peer,
            memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyDeviceToDevice=3, hostAllocPortable=1,
            hostRegister=self.register, hostUnregister=self.registered.pop, deviceEnablePeerAccess=self.enable_peer,
            deviceCanAccessPeer=lambda one, other: True,
            pointerGetAttributes=lambda address: types.SimpleNamespace(device=3),
        )  # fmt: skip


def load(stub):
    """`kvdist.kernels.cupy_device` over this, as a module of its own; its runtime is `cupy_runtime` there."""
    ours = {"cupy": stub.module, "cupy.cuda": stub.cuda}
    before = {name: sys.modules.pop(name, None) for name in (*ours, *MODULES)}
    sys.modules.update(ours)
    try:
        runtime, device = map(importlib.import_module, MODULES)
        device.cupy_runtime = runtime
        return device
    finally:
        for name, old in before.items():
            del sys.modules[name]
            if old is not None:
                sys.modules[name] = old
