"""Loads compiled kernels in the background, so that no caller waits for them.

Importing numba and compiling or loading a kernel takes from half a second to several, so it happens on a thread of its
own, and only after enough work has been asked for to be worth it: until a kernel is there, its caller uses the
reference, which gives the same bits. The thread ends when nothing more is wanted.

At a fork and at the end of the interpreter the thread stops after its present kernel and is waited for: a child would
inherit half an import and its locks, and an interpreter must not be taken down around a compiler.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from kvdist.errors import ConfigError

LOG = logging.getLogger("kvdist")
DETAILS = logging.getLogger("kvdist.kernels")
"""What users see only if they ask for it: ``python -m kvdist --verbose`` shows it."""

Kernel = Callable[..., None]

WORTH_ELEMENTS = 1 << 20
"""Elements that must have been asked for before numba is imported: a process of small values never pays for it."""


class Loader:
    """The compiled kernels of one process, by name. Safe to use from several threads.

    Args:
        backend: imports the backend and returns its version and the function that builds a kernel by its name.
        worth_elements: see `WORTH_ELEMENTS`.
    """

    def __init__(
        self, backend: Callable[[], tuple[str, Callable[[str], Kernel]]], worth_elements: int = WORTH_ELEMENTS
    ) -> None:
        self._backend = backend
        self._worth_elements = worth_elements
        self._ready: dict[str, Kernel] = {}
        self._wanted: dict[str, None] = {}
        self._lock = threading.Lock()
        self._building = threading.RLock()
        """Held while a kernel is built, not by who only looks."""
        self._thread: threading.Thread | None = None
        self._elements = 0
        self._halted = False
        self.failure: BaseException | None = None
        """Why there will be no kernels; None while there may be."""
        self.version = ""
        """The backend's name and version, once imported."""

    def offered(self, name: str, elements: int) -> Kernel | None:
        """The kernel if it is there, at once. If not, it is wanted from now on.

        Args:
            name: as `numba_cpu.build` takes it.
            elements: how much work the caller has for it.
        """
        kernel = self._ready.get(name)
        if kernel is None and self.failure is None:
            self._want(name, elements)
        return kernel

    def demanded(self, name: str, _elements: int) -> Kernel | None:
        """The kernel, built now on the caller's thread if it is not there."""
        kernel = self._ready.get(name)
        if kernel is None:
            with self._building:
                kernel = self._ready[name] = self._import()(name)
        return kernel

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
        """Go on, in the parent and in the child: what is still wanted is loaded when it is next asked for."""
        self._halted = False
        self._lock.release()
        self._building.release()

    def _want(self, name: str, elements: int) -> None:
        with self._lock:
            self._elements += elements
            if self._elements < self._worth_elements or self._halted:
                return
            self._wanted[name] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvdist-kernels", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Build what is wanted, until nothing is."""
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

    def _next(self) -> str | None:
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

    def _import(self) -> Callable[[str], Kernel]:
        version, build = self._backend()
        if not self.version:
            self.version = version
            DETAILS.info("CPU kernels: %s", version)
        return build


def _numba() -> tuple[str, Callable[[str], Any]]:
    from kvdist.kernels import numba_cpu

    return numba_cpu.VERSION, numba_cpu.build


LOADER = Loader(_numba)
"""The kernels of this process: it has one processor and one numba."""

atexit.register(LOADER.halt)
os.register_at_fork(before=LOADER.before_fork, after_in_parent=LOADER.after_fork, after_in_child=LOADER.after_fork)
