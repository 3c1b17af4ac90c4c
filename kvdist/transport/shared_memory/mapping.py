"""Maps pages of files as NumPy arrays, in ways that Python's `mmap` module cannot.

That module keeps a second descriptor of every file that it maps, and maps nothing at a chosen address. A mapping of
this module lasts as long as any array or memoryview shows it, needs no descriptor, and several stretches can be laid
side by side. The functions are for Linux; elsewhere they raise `OSError` or are not called.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_POPULATE = 1, 2, 0x10, 0x20, 0x4000, 0x8000
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int, offset: int, nbytes: int) -> Bytes:
    """A stretch of a file for reading. Its pages are entered into the page table at once.

    Args:
        descriptor: the file, which may be closed afterwards.
        offset: offset of the stretch, in bytes, a multiple of the page size.
        nbytes: its length, which must lie in the file.

    Raises:
        OSError: the system refused.
    """
    address = _mmap(None, nbytes, PROT_READ, MAP_SHARED | MAP_POPULATE, descriptor, offset)
    return _shown(address, nbytes, False)


def lengthen_file(descriptor: int, offset: int, nbytes: int) -> Bytes:
    """Lengthen a file, every page of it backed by memory, and map the new part for reading and writing.

    Args:
        descriptor: the file.
        offset: its present size.
        nbytes: number of bytes to add.

    Raises:
        OSError: the system refused; the file has its old length.
    """
    # Addresses first: a file that is longer than what is mapped of it could not be cut again.
    address = _mmap(None, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    memory = _shown(address, nbytes, True)
    # The first write to a page takes some ten times as long as later writes. fallocate reports missing memory as an
    # error; after it, entering the pages at the mapping costs no more than it would without fallocate.
    os.posix_fallocate(descriptor, offset, nbytes)
    _mmap(address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, descriptor, offset)
    return memory


def map_side_by_side(stretches: Sequence[tuple[int, int, int]]) -> Bytes:
    """Map stretches of files as a single writable array. A page that is written becomes a private copy.

    Until then it shows changes by others. No page is entered at the mapping, because that would copy it.

    Args:
        stretches: (descriptor, offset in bytes, length in bytes); offsets, and lengths but the last, in whole pages.

    Raises:
        OSError: the system refused.
    """
    nbytes = sum(length for _, _, length in stretches)
    address = _mmap(None, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    shown = _shown(address, nbytes, True)
    for descriptor, offset, length in stretches:
        flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
        _mmap(address, length, PROT_READ | PROT_WRITE, flags, descriptor, offset)
        address += length
    return shown


def address_of(buffer: Any) -> int:
    """The address of a contiguous buffer that is not empty."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    got: int = _libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if got == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes: {os.strerror(number)}")
    return got


def _shown(address: int, nbytes: int, writable: bool) -> Bytes:
    """An array over a mapping, which is unmapped when the last view of the array is collected."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: other threads may still read.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(memory)
    # An array over a read-only buffer cannot be made writable: a write would kill the process.
    return np.frombuffer(view if writable else view.toreadonly(), np.uint8)
