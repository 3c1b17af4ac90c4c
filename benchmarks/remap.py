"""What it costs to get 25 arrays of 4 MB out of another process's memory: by a copy, or by mapping their pages.

python benchmarks/remap.py

Mapping puts the pages of the shared memory in the place of an array's own, so that no byte is copied. Each page is then
entered into this process's table: when it is first read, or all at once (``MAP_POPULATE``). So the reading of all
elements afterwards belongs to the cost.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

ARRAYS, ARRAY_BYTES = 25, 4 << 20
TURNS = 10
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    shared = [os.memfd_create(f"version {number}") for number in range(2)]
    published = []
    for descriptor in shared:
        os.ftruncate(descriptor, ARRAYS * ARRAY_BYTES)
        published.append(np.frombuffer(mmap.mmap(descriptor, ARRAYS * ARRAY_BYTES), np.float32))
        published[-1][:] = 1
    own = np.frombuffer(mmap.mmap(-1, ARRAYS * ARRAY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)
    own[:] = 0

    def copied(turn: int) -> None:
        np.copyto(own, published[turn % 2])

    def mapped(flags: int, access: int) -> Callable[[int], None]:
        def act(turn: int) -> None:
            for at in range(0, ARRAYS * ARRAY_BYTES, ARRAY_BYTES):
                place = own.ctypes.data + at
                if libc.mmap(place, ARRAY_BYTES, access, flags | MAP_FIXED, shared[turn % 2], at) == MAP_FAILED:
                    raise OSError(ctypes.get_errno(), "mmap failed")

        return act

    writable = mmap.PROT_READ | mmap.PROT_WRITE
    report("copied", copied, own)
    report("mapped, shared", mapped(mmap.MAP_SHARED, mmap.PROT_READ), own)
    report("mapped, shared, all pages at once", mapped(mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ), own)
    report("mapped, private", mapped(mmap.MAP_PRIVATE, writable), own)
    report("mapped, private, all pages at once", mapped(mmap.MAP_PRIVATE | mmap.MAP_POPULATE, writable), own)


def report(what: str, act: Callable[[int], None], own: npt.NDArray[np.float32]) -> None:
    """Print the processor time, in the best of some turns, of an act and of the reading after it."""
    best = (float("inf"), 0.0)
    for turn in range(TURNS):
        start = time.thread_time()
        act(turn)
        done = time.thread_time()
        own.sum()
        taken = done - start, time.thread_time() - done
        best = taken if sum(taken) < sum(best) else best
    print(f"{what:<36} {best[0] * 1e3:5.1f} ms, and to read all {best[1] * 1e3:5.1f} ms: {sum(best) * 1e3:5.1f} ms")


if __name__ == "__main__":
    main()
