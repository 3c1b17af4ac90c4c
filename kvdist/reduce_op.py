"""Reduction operators with Horovod's names and numbers. This module imports neither torch nor MXNet."""

from __future__ import annotations

import enum


class ReduceOp(enum.IntEnum):
    """How a reduction combines the ranks' tensors."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
"""The mean over the ranks."""
Sum = ReduceOp.Sum
"""The sum over the ranks."""
Adasum = ReduceOp.Adasum
"""The adaptive sum of Adasum: orthogonal gradients are added, parallel gradients averaged."""
Min = ReduceOp.Min
"""The smallest value, element by element."""
Max = ReduceOp.Max
"""The largest value, element by element."""
Product = ReduceOp.Product
"""The product over the ranks, element by element."""


def op_of(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """The operator for Horovod's two arguments.

    Raises:
        ValueError: both arguments are set, or the operator is unknown.
    """
    if average is not None and op is not None:
        raise ValueError(
            "The op parameter supersedes average. Please provide only one of them: average=True is op=Average,"
            " average=False is op=Sum"
        )
    if op is None:
        return Average if average in (None, True) else Sum
    return ReduceOp(op)
