"""The kernels of this host's processor: NumPy's, or compiled kernels where those were measured to be faster.

These are the update by any expression in float32 or float64, sums that cost the reference more than a pass, and
coding.
Where a compiled kernel is not ready, or does not fit, the reference works instead. Both give the same bits.

Importing numba and compiling or loading a kernel takes from half a second to several, so it happens on a thread of its
own, and only after enough work has been asked for to be worth it. The thread ends when nothing more is wanted. At a
fork and at the end of the interpreter it stops after its present kernel and is waited for: a child would inherit half
an import and its locks, and an interpreter must not be taken down around a compiler.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import ConfigError
from kvdist.kernels.interface import (
    CHUNK_ELEMENTS,
    SOURCES_MAX,
    STATES_MAX,
    Array,
    Equation,
    Kernels,
    Rows,
    UpdateKernel,
)
from kvdist.kernels.quantization import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import REFERENCE, check_sum, factored

LOG = logging.getLogger("kvdist")
DETAILS = logging.getLogger("kvdist.kernels")
"""What users see only if they ask for it: ``python -m kvdist --verbose`` shows it."""

Kernel = Callable[..., None]

WORTH_ELEMENTS = 1 << 20
"""Elements that must have been asked for before numba is imported: a process of small values never pays for it."""
KernelName = str | UpdateKernel
"""What names a compiled kernel."""
Find = Callable[[KernelName, int], Kernel | None]
"""The compiled kernel of a name, for a number of elements; None while it is not ready."""

_ONES = (1.0,) * SOURCES_MAX
_OFF = float("inf")
_FIT = 0x101
"""NumPy's flags ``C_CONTIGUOUS`` and ``ALIGNED``."""
_LABELS = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}


# Choosing and loading.


class Loader:
    """The compiled kernels of a process, by name. Safe to use from several threads.

    Args:
        backend: imports the backend and returns its version and the function that builds a kernel by its name.
        worth_elements: see `WORTH_ELEMENTS`.
    """

    def __init__(
        self, backend: Callable[[], tuple[str, Callable[[KernelName], Kernel]]], worth_elements: int = WORTH_ELEMENTS
    ) -> None:
        self._backend = backend
        self._worth_elements = worth_elements
        self._ready: dict[KernelName, Kernel | None] = {}
        """None for a rule that cannot be compiled."""
        self._wanted: dict[KernelName, None] = {}
        self._lock = threading.Lock()
        self._building = threading.RLock()
        """Held while a kernel is built, not by who only looks."""
        self._thread: threading.Thread | None = None
        self._elements = 0
        self._halted = False
        self.failure: BaseException | None = None
        """Why no kernel can be compiled; None while kernels can be."""
        self.version = ""
        """The backend's name and version, once imported."""

    def offered(self, name: KernelName, elements: int) -> Kernel | None:
        """Return the kernel at once if it is ready; otherwise it is wanted from now on.

        Args:
            name: as `numba_cpu.build` takes it.
            elements: how much work the caller has for it.
        """
        kernel = self._ready.get(name)
        if kernel is None and self.failure is None and name not in self._ready:
            self._want(name, elements)
        return kernel

    def demanded(self, name: KernelName, _elements: int) -> Kernel | None:
        """The kernel, built now on the caller's thread if it is not ready; None for a rule that cannot be compiled."""
        if name not in self._ready:
            with self._building:
                self._ready[name] = self._built(self._import(), name)
        return self._ready[name]

    def _built(self, build: Callable[[KernelName], Kernel], name: KernelName) -> Kernel | None:
        try:
            return build(name)
        except Exception as error:
            if not isinstance(name, UpdateKernel):
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            LOG.warning("numba cannot compile %s, which NumPy computes instead, slower: %s", name, why)
            return None

    def require(self) -> None:
        """Import the backend now.

        Raises:
            ConfigError: it cannot be imported.
        """
        try:
            with self._building:
                self._import()
        except ImportError as error:
            raise ConfigError(
                f"KVDIST_KERNELS is 'numba', but numba cannot be imported here ({error}): install it with"
                " `pip install numba`, or set KVDIST_KERNELS=auto"
            ) from error

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being loaded. Whether that came about in time."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def halt(self) -> None:
        """Load nothing more; wait for the kernel that is being built."""
        with self._lock:
            self._halted = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def before_fork(self) -> None:
        """Leave nothing half done that a child would inherit."""
        self.halt()
        self._building.acquire()
        self._lock.acquire()

    def after_fork(self) -> None:
        """Go on, in the parent and in the child: kernels that are still wanted are loaded at the next request."""
        self._halted = False
        self._lock.release()
        self._building.release()

    def _want(self, name: KernelName, elements: int) -> None:
        with self._lock:
            self._elements += elements
            if self._elements < self._worth_elements or self._halted:
                return
            self._wanted[name] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvdist-kernels", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Build the wanted kernels, until none is left."""
        try:
            with self._building:
                self._import()
            while (name := self._next()) is not None:
                self.demanded(name, 0)
                LOG.debug("kernel %s is compiled", name)
        except ImportError as error:
            LOG.info("numba cannot be imported (%s): kernels stay NumPy's, which are slower", error)
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  # whatever a compiler may raise, the reference does the work
            LOG.warning("numba failed (%s: %s): kernels stay NumPy's, which are slower", type(error).__name__, error)
            self._give_up(error)

    def _next(self) -> KernelName | None:
        """What to build next. With None the thread is as good as ended."""
        with self._lock:
            self._wanted = {name: None for name in self._wanted if name not in self._ready}
            if not self._wanted or self._halted:
                self._thread = None
                return None
            return next(iter(self._wanted))

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self.failure = error
            self._thread = None

    def _import(self) -> Callable[[KernelName], Kernel]:
        version, build = self._backend()
        if not self.version:
            self.version = version
            DETAILS.info("CPU kernels: %s", version)
        return build


def _numba() -> tuple[str, Callable[[KernelName], Any]]:
    from kvdist.kernels import numba_cpu

    return numba_cpu.VERSION, numba_cpu.build


LOADER = Loader(_numba)
"""The kernels of this process: it has a single processor and a single numba."""

atexit.register(LOADER.halt)
os.register_at_fork(before=LOADER.before_fork, after_in_parent=LOADER.after_fork, after_in_child=LOADER.after_fork)


def choose(setting: str, loader: Loader = LOADER) -> Kernels:
    """The kernels of a setting (``KVDIST_KERNELS``).

    Args:
        setting: ``numpy`` is the reference; ``auto`` starts with it and goes over to numba in the background when
            there is work enough and numba is installed; ``numba`` imports it now and waits for every kernel.
        loader: where compiled kernels come from.

    Raises:
        ConfigError: ``numba`` is asked for and cannot be imported.
    """
    if setting == "numpy":
        return REFERENCE
    if setting == "numba":
        loader.require()
        compiled = Compiled(loader.demanded)
    else:
        compiled = Compiled(loader.offered)
    coders = _coders_of(compiled.kernel)
    return replace(
        REFERENCE,
        name=setting,
        weighted_sum=compiled.weighted_sum,
        fused_update=compiled.fused_update,
        update_rows=compiled.update_rows,
        **coders,
    )


# Calling what is compiled.


class Compiled:
    """Calls compiled kernels with what they take.

    Args:
        kernel: gives the compiled kernel of a name for a number of elements; None while it is not ready.
    """

    def __init__(self, kernel: Find) -> None:
        self.kernel = kernel

    def weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. A single pass of up to four contributions; each more is added in the cache."""
        count = len(contributions)
        label = _LABELS.get(dtype.storage)
        # One array, or two without a scale, are one pass of the reference too.
        if label is not None and (count > 2 or (count == 2 and (scales[0] != 1 or scales[-1] != 1))):
            kernel = self.kernel(f"sum_{label}", out.size)
            if kernel is not None and _fit(out, *contributions):
                check_sum(contributions, scales, dtype, out)
                _sum(kernel, contributions, *factored(scales), out)
                return
        REFERENCE.weighted_sum(contributions, scales, dtype, out)

    def fused_update(
        self,
        equation: Equation,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        clip: float | None,
        out: Array,
        states: Sequence[Array],
        dtype: DType,
        master: Array | None = None,
    ) -> bool:
        """See `FusedUpdate`. Halves go the way of many passes."""
        label = _LABELS.get(weight.dtype)
        if label is None or not contributions or master is not None or len(states) > STATES_MAX:
            return False
        kernel = self.kernel(UpdateKernel(equation.expression, len(states), label, False), weight.size)
        if kernel is None or not _fit(weight, out, *states, *contributions):
            return False
        own, factor = factored(scales)
        scaling = _scaling(equation, factor, clip)
        if len(contributions) <= SOURCES_MAX:
            _update(kernel, weight, contributions, own, out, states, scaling)
            return True
        add = self.kernel(f"sum_{label}", weight.size)
        if add is None:
            return False
        total = np.empty(min(weight.size, CHUNK_ELEMENTS), weight.dtype)
        for start in range(0, weight.size, CHUNK_ELEMENTS):
            part = slice(start, start + CHUNK_ELEMENTS)
            target = out[part]
            _sum(add, [each[part] for each in contributions], own, 1.0, total[: target.size])
            arrays = [state[part] for state in states]
            _update(kernel, weight[part], [total[: target.size]], (1.0,), target, arrays, scaling)
        return True

    def update_rows(
        self,
        equation: Equation,
        weight: Array,
        slots: Array,
        ids: Array,
        contributions: Sequence[Rows],
        scales: Sequence[float],
        clip: float | None,
        states: Sequence[Array],
        dtype: DType,
    ) -> bool:
        """See `UpdateRows`. Halves are gathered."""
        label, given = _LABELS.get(weight.dtype), [array for one in contributions for array in one]
        fit = len(states) <= STATES_MAX and all(one.shape[1] == weight.shape[1] for one in states)
        if label is None or not given or not fit:
            return False
        kernel = self.kernel(UpdateKernel(equation.expression, len(states), label, True), slots.size * weight.shape[1])
        if kernel is None or not _fit(weight, slots, ids, *states, *given):
            return False
        own, factor = factored(scales)
        arrays = [one.reshape(-1) for one in (weight, *states)]
        written = (*arrays, *(arrays[0],) * STATES_MAX)[: 1 + STATES_MAX]
        ids_at, values_at = (np.array([one.ctypes.data for one in given[i::2]], np.uint64) for i in (0, 1))
        counts, scaled_by = np.array([len(one) for one, _ in contributions]), np.array(own, weight.dtype)
        sources = (ids_at, values_at, counts, scaled_by)
        kernel(*written, weight.shape[1], slots, ids, *sources, _scaling(equation, factor, clip))
        return True


def _scaling(equation: Equation, factor: float, clip: float | None) -> tuple[float, ...]:
    """What a kernel takes besides arrays: factor and limit of the gradient, and the numbers of the rule.

    Clipping is to ±limit, so a gradient may be negated by its factor.
    """
    signed = -factor if equation.is_negative else factor
    return signed, _OFF if clip is None else clip, *map(float, equation.numbers)


def _fit(*arrays: Array) -> bool:
    """Whether a compiled kernel can work on the arrays where they lie."""
    for array in arrays:  # noqa: SIM110  # a generator would take half a microsecond more
        if array.flags.num & _FIT != _FIT:
            return False
    return True


def _padded(contributions: Sequence[Array], scales: Sequence[float]) -> tuple[object, ...]:
    """Four arrays, how many of them count, and four scales."""
    count = len(contributions)
    missing = SOURCES_MAX - count
    return (*contributions, *(contributions[0],) * missing, count, *scales, *_ONES[:missing])


def _sum(kernel: Kernel, contributions: Sequence[Array], scales: Sequence[float], factor: float, out: Array) -> None:
    """A sum of two arrays or more."""
    count = len(contributions)
    if count <= SOURCES_MAX:
        kernel(out, *_padded(contributions, scales), factor)
        return
    for start in range(0, out.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        target = out[part]
        kernel(target, *_padded([each[part] for each in contributions[:SOURCES_MAX]], scales[:SOURCES_MAX]), 1.0)
        for i in range(SOURCES_MAX, count):
            last = factor if i == count - 1 else 1.0
            kernel(target, *_padded([contributions[i][part]], [scales[i]]), last)


def _update(
    kernel: Kernel,
    weight: Array,
    contributions: Sequence[Array],
    scales: Sequence[float],
    out: Array,
    states: Sequence[Array],
    scaling: tuple[float, ...],
) -> None:
    # A rule without the states leaves the arrays that stand for them alone.
    kernel(out, weight, *(*states, *(out,) * STATES_MAX)[:STATES_MAX], *_padded(contributions, scales), scaling)


# Coding.


def _coders_of(find: Find) -> dict[str, Any]:
    """The fields of `Kernels` that encode and decode, each compiled if its kernel is ready."""
    return {
        "to_float32": _widening(find),
        "from_float32": _narrowing(find),
        "round_to_half": _rounding(find),
        "quantise_2bit": _quantising(find, "quantise2_float32", WORD_ELEMENTS_2BIT, REFERENCE.quantise_2bit),
        "quantise_1bit": _quantising(find, "quantise1_float32", WORD_ELEMENTS_1BIT, REFERENCE.quantise_1bit),
        "dequantise_2bit": _dequantising(find, "dequantise2_float32", WORD_ELEMENTS_2BIT, REFERENCE.dequantise_2bit),
        "dequantise_1bit": _dequantising(find, "dequantise1_float32", WORD_ELEMENTS_1BIT, REFERENCE.dequantise_1bit),
    }


def _quantising(find: Find, name: str, word_elements: int, reference: Any) -> Any:
    def quantise(grad: Array, residual: Array, threshold: float, out: Array) -> None:
        kernel = find(name, grad.size)
        if kernel is None or not _fit(grad, residual, out):
            reference(grad, residual, threshold, out)
            return
        check_quantised(grad, residual, out, word_elements)
        kernel(grad, residual, threshold, out)

    return quantise


def _dequantising(find: Find, name: str, word_elements: int, reference: Any) -> Any:
    def dequantise(data: Array, threshold: float, out: Array) -> None:
        kernel = find(name, out.size)
        if kernel is None or not _fit(data, out):
            reference(data, threshold, out)
            return
        check_dequantised(data, out, word_elements)
        kernel(data, threshold, out)

    return dequantise


def _rounding(find: Find) -> Any:
    def round_to_half(grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        kernel = find(f"round_{dtype.label}", grad.size)
        if kernel is None or not _fit(grad, residual, out):
            REFERENCE.round_to_half(grad, residual, dtype, out)
            return
        check_rounded(grad, residual, dtype, out)
        kernel(grad, residual, out.view(np.uint16))

    return round_to_half


def _narrowing(find: Find) -> Any:
    def from_float32(values: Array, dtype: DType, out: Array | None = None) -> Array:
        kernel = find(f"narrow_{dtype.label}", values.size) if _is_half(dtype) else None
        if kernel is None or values.dtype != np.float32 or not _fit(values):
            return REFERENCE.from_float32(values, dtype, out)
        bits = np.empty(values.size, dtype.storage) if out is None else out
        if not _fit(bits) or bits.size != values.size or bits.dtype != dtype.storage:
            return REFERENCE.from_float32(values, dtype, out)
        kernel(values, bits.view(np.uint16))
        return bits

    return from_float32


def _widening(find: Find) -> Any:
    def to_float32(bits: Array, dtype: DType, out: Array | None = None) -> Array:
        kernel = find(f"widen_{dtype.label}", bits.size) if _is_half(dtype) else None
        if kernel is None or bits.dtype != dtype.storage or not _fit(bits):
            return REFERENCE.to_float32(bits, dtype, out)
        values = np.empty(bits.size, np.float32) if out is None else out
        if not _fit(values) or values.size != bits.size or values.dtype != np.float32:
            return REFERENCE.to_float32(bits, dtype, out)
        kernel(bits.view(np.uint16), values)
        return values

    return to_float32


def _is_half(dtype: DType) -> bool:
    return dtype is DType.FLOAT16 or dtype is DType.BFLOAT16
