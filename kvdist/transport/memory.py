"""Memory from which frames may travel without a copy: the seam between who fills it and who sends it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """Gives out bytes and knows its own."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """That many bytes; their content means nothing. They are free again when no array shows them any more."""

    def owns(self, array: NDArray[Any]) -> bool:
        """Whether the whole contiguous array lies in what this memory gave out, so that others can be shown it."""


class OrdinaryMemory:
    """Bytes of this process, which nobody else can be shown."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def owns(self, array: NDArray[Any]) -> bool:
        return False
