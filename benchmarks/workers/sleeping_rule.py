"""A rule for servers that sleeps for each key on server-0, and changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import ClassVar

from kvdist.optimizer import Optimizer, register
from kvdist.schema import number

SLEEP_S = 0.15


@register
@dataclass(kw_only=True, eq=False)
class Sleeping(Optimizer):
    """w ← w, after a while."""

    name: ClassVar[str] = "sleeping"

    learning_rate: float = number(0.01, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ()

    def apply(self, weight, grad, out, state, scratch, step) -> None:
        if os.environ.get("KVDIST_RANK") == "0":
            time.sleep(SLEEP_S)
        out[:] = weight
