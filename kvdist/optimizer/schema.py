"""Hyper-parameters as data: what kind of value each field of an optimizer takes, and the check of one value.

An optimizer is a dataclass whose fields are made by `number`, `optional_number` and `flag`. The same schema checks
what a user types and what arrives from the network.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

Value = str | float | int | bool | None
"""What a description may hold."""

_SCHEMA = "kvdist"


@dataclasses.dataclass(frozen=True)
class Schema:
    """What one hyper-parameter may be. Bounds are inclusive but for `below`."""

    kind: type[float] | type[bool]
    optional: bool = False
    at_least: float | None = None
    below: float | None = None

    def check(self, name: str, value: object) -> float | bool | None:
        """Return `value` as the type that the schema names.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range, infinite or NaN.
        """
        if self.optional and value is None:
            return None
        if self.kind is bool:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
            return value
        return self._check_number(name, value)

    def _check_number(self, name: str, value: object) -> float | None:
        number = finite_number(name, value)
        if self.at_least is not None and number < self.at_least:
            raise ValueError(f"{name} must be at least {self.at_least:g}, not {number:g}")
        if self.below is not None and number >= self.below:
            raise ValueError(f"{name} must be below {self.below:g}, not {number:g}")
        # MXNet writes 0 for "off" where Python writes None; one spelling keeps equal descriptions equal.
        return None if self.optional and number == 0 else number


def number(default: float, *, at_least: float | None = None, below: float | None = None) -> Any:
    """A field that holds a finite float, optionally bounded: at_least ≤ value < below."""
    schema = Schema(float, at_least=at_least, below=below)
    return dataclasses.field(default=default, metadata={_SCHEMA: schema})


def optional_number(*, at_least: float = 0.0) -> Any:
    """A field that holds a finite float, or None for "off"; 0 means None."""
    return dataclasses.field(default=None, metadata={_SCHEMA: Schema(float, optional=True, at_least=at_least)})


def flag(default: bool) -> Any:
    """A field that is True or False."""
    return dataclasses.field(default=default, metadata={_SCHEMA: Schema(bool)})


def schema_of(cls: type[Any]) -> dict[str, Schema]:
    """The schema of each hyper-parameter of the dataclass, in the order of its fields.

    Raises:
        TypeError: a field was made without `number`, `optional_number` or `flag`.
    """
    schemas: dict[str, Schema] = {}
    for field in dataclasses.fields(cls):
        if _SCHEMA not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name} has no schema: make it with number(), optional_number() or flag()"
            )
        schemas[field.name] = field.metadata[_SCHEMA]
    return schemas


def finite_number(name: str, value: object) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: it is no real number (bool is none here).
        ValueError: it is infinite, NaN or too large.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r} of type {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, not {result}")
    return result
