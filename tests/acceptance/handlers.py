"""What an operator lets servers import by ``--server-module``: handlers of commands, and an optimizer of one's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvdist import kv
from kvdist.optimizer import Optimizer, register
from kvdist.schema import number


@kv.register_command(1)
def note(head, body, rank):
    """Leave a file that says what came."""
    Path(f"{body}-{rank}").write_text(f"{head} on {rank}")


@kv.register_command(2)
def fail(head, body, rank):
    """Fail on one server alone."""
    if rank == 1:
        raise ValueError(f"no {body} here")
    Path(f"{body}-{rank}").write_text("run")


@register
@dataclass(kw_only=True, eq=False)
class SignDescent(Optimizer):
    """w ← w − lr·sign(g), as in docs/optimizers.md."""

    name: ClassVar[str] = "signdescent"

    learning_rate: float = number(0.01, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ()

    def apply(self, weight, grad, out, state, scratch, step) -> None:
        np.sign(grad, out=grad)
        np.multiply(grad, step.lr, out=grad)
        np.subtract(weight, grad, out=out)
