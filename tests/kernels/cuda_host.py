"""The CUDA kernels compiled for this processor: a runtime over NumPy arrays, and a device made of it.

The text is the very same that a GPU gets; `cuda_on_host.h` stands for what CUDA adds to C++.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from kvdist.kernels import cupy_cuda as cuda
from kvdist.kernels.cupy_cuda.arithmetic import CudaArithmetic
from tests.kernels.cuda_instances import instances

HEADER = Path(__file__).parent / "cuda_on_host.h"
BARRIERS = {"squares"}
"""Files of kernels whose threads wait for each other."""

FLAGS = [
    "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-fast-math", "-fno-strict-aliasing", "-w",
    # What a GPU would refuse, and this processor would let pass, ends the program.
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error",
]  # fmt: skip
PROTECT = ctypes.CDLL(None).mprotect


class Library:
    """All kernels, compiled file by file when one of it is first called.

    Args:
        folder: for what is compiled; others may use it at the same time.
    """

    def __init__(self, folder):
        self._folder = folder
        self._families = {}

    def launch(self, kernel, blocks, arguments):
        """Run a kernel over all its blocks.

        Args:
            kernel: as of `instances`.
            blocks: how many.
            arguments: NumPy scalars, and arrays for structs.
        """
        family = cuda.family_of(kernel)
        if family not in self._families:
            self._families[family] = compiled(family, self._folder)
        function, numbers = self._families[family]
        kept = [np.array([each]) if isinstance(each, np.generic) else each for each in arguments]
        pointers = (ctypes.c_void_p * len(kept))(*(each.ctypes.data for each in kept))
        function(numbers[kernel], ctypes.c_uint(blocks), pointers)


def compiled(family, folder):
    """A function that calls the kernels of one file by their numbers, and the numbers."""
    names = [name for name in instances() if cuda.family_of(name) == family]
    library = folder / f"{family}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = compile_family(family, names, Path(own))
            made.replace(library)
    return ctypes.CDLL(str(library)).launch, {name: number for number, name in enumerate(names)}


def compile_family(family, names, folder):
    """A shared library with one function: it calls a kernel by its number."""
    barriers = "true" if family in BARRIERS else "false"
    cases = "\n".join(
        f"case {number}: run_kernel(&{name}, blocks, arguments, {barriers}); return;"
        for number, name in enumerate(names)
    )
    entry = (
        'extern "C" void launch(int number, unsigned blocks, void** arguments) {\n'
        f"switch (number) {{\n{cases}\n}}\nabort(); }}\n"
    )
    text, library = folder / f"{family}.cpp", folder / f"{family}.so"
    text.write_text(f'#include "{HEADER}"\n{cuda.source(family)}\n{entry}', "utf-8")
    done = subprocess.run(["g++", *FLAGS, "-o", str(library), str(text)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return library


def guarded(size):
    """So many bytes that begin at 16 bytes, full of something, and behind them a page that nobody can touch."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    PROTECT(ctypes.c_void_p(memory.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), 0)
    start = room - -(-size // 16) * 16
    memory[start:room] = 0xA5
    return memory[start : start + size]


class HostRuntime:
    """NumPy arrays that begin at 16 bytes, as a device's do, and kernels that run before `launch` returns."""

    def __init__(self, library):
        self._library = library

    active = staticmethod(nullcontext)

    def empty(self, count, dtype):
        dtype = np.dtype(dtype)
        return guarded(count * dtype.itemsize).view(dtype)

    def zeros(self, count, dtype):
        array = self.empty(count, dtype)
        self.clear(array)
        return array

    def clear(self, array):
        array[...] = 0

    def address(self, array):
        return array.ctypes.data

    def sent(self, host):
        octets = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
        array = self.empty(octets.size, np.uint8)
        array[...] = octets
        return array

    def number(self, array):
        return array[0]

    def grouped(self, indices):
        order = np.argsort(indices, kind="stable")
        kept, starts = np.unique(indices[order], return_index=True)
        return kept, order, starts

    def launch(self, kernel, blocks, *arguments):
        self._library.launch(kernel, blocks, arguments)


class Done:
    """A mark of a device that never lets anybody wait."""

    def wait(self):
        return None


class HostDevice(CudaArithmetic):
    """The functions of `Device`, over `HostRuntime`."""

    name, index, library = "host:0", 0, "g++"

    def __init__(self, library):
        super().__init__(HostRuntime(library), "cuda on the host")

    def view(self, value, dtype):
        return value.view(dtype.storage)

    def upload(self, host, out):
        out[...] = host

    def download(self, array, host):
        host[...] = array

    def copy(self, array, out, source):
        out[...] = array

    def reaches(self, other):
        return True

    def mark(self):
        return Done()

    def pin(self, host):
        return Done() if host.size else None
