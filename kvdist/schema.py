"""Hyper-parameters as data: what kind of value each field of a rule takes, and the check of a value.

Optimizers and learning-rate schedules are dataclasses whose fields are created by `number`, `optional_number`, `whole`,
`word`, `text` and `flag`. The same schema checks values that a user types and values that arrive from the network.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection
from typing import Any, TypeVar

Value = str | float | int | bool | None
"""Types of the values of a description."""

WHOLE_MAX = (1 << 53) - 1
"""The largest whole number of a description: up to it whole numbers and floats agree."""

TEXT_BYTES_MAX = 1024
"""The longest text of a description: `WireLimits.name_bytes_max`."""

SHOWN_MAX = 40
"""Characters of a wrong value that a message shows."""
_SCHEMA = "kvdist"
_Number = TypeVar("_Number", float, int)


@dataclasses.dataclass(frozen=True)
class Schema:
    """The allowed values of a hyper-parameter. Bounds are inclusive except `below`; a text must be among `words`, if
    any."""

    kind: type[float] | type[int] | type[bool] | type[str]
    optional: bool = False
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    words: tuple[str, ...] = ()

    def check(self, name: str, value: object) -> Value:
        """Return `value` as the type that the schema names.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range, infinite or NaN, or another word.
        """
        if self.optional and value is None:
            return None
        if self.kind is bool:
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
            return value
        if self.kind is str:
            if not self.words:
                return _short_text(name, value)
            if value not in self.words:
                raise ValueError(f"{name} must be one of {', '.join(self.words)}, not {value!r:.80}")
            return str(value)
        if self.kind is int:
            return self._in_range(name, whole_number(name, value))
        number = self._in_range(name, finite_number(name, value))
        # MXNet writes 0 for "off" where Python writes None; one spelling keeps equal descriptions equal.
        return None if self.optional and number == 0 else number

    def _in_range(self, name: str, number: _Number) -> _Number:
        if self.at_least is not None and number < self.at_least:
            raise ValueError(f"{name} must be at least {self.at_least:g}, not {number:g}")
        if self.below is not None and number >= self.below:
            raise ValueError(f"{name} must be below {self.below:g}, not {number:g}")
        if self.at_most is not None and number > self.at_most:
            raise ValueError(f"{name} must be at most {self.at_most:g}, not {number:g}")
        return number


def number(
    default: Any = dataclasses.MISSING,
    *,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field that holds a finite float, optionally bounded: at_least ≤ value < below, value ≤ at_most."""
    return _field(default, Schema(float, at_least=at_least, below=below, at_most=at_most))


def optional_number(*, at_least: float = 0.0) -> Any:
    """A field that holds a finite float, or None for "off"; 0 means None."""
    return _field(None, Schema(float, optional=True, at_least=at_least))


def whole(default: Any = dataclasses.MISSING, *, at_least: int) -> Any:
    """A field that holds a whole number of at most `WHOLE_MAX`."""
    return _field(default, Schema(int, at_least=at_least, at_most=WHOLE_MAX))


def word(default: str, *others: str) -> Any:
    """A field that holds a word out of a few."""
    return _field(default, Schema(str, words=(default, *others)))


def text(default: str = "") -> Any:
    """A field that holds a text of at most `TEXT_BYTES_MAX`, which the class checks."""
    return _field(default, Schema(str))


def flag(default: bool) -> Any:
    """A field that is True or False."""
    return _field(default, Schema(bool))


def _short_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {value!r:.80}")
    if len(value.encode()) > TEXT_BYTES_MAX:
        raise ValueError(f"{name} must have at most {TEXT_BYTES_MAX} bytes to travel to servers, not {len(value)}")
    return value


def _field(default: Any, schema: Schema) -> Any:
    return dataclasses.field(default=default, metadata={_SCHEMA: schema})


def schema_of(cls: type[Any], *, without: Collection[str] = ()) -> dict[str, Schema]:
    """The schema of each hyper-parameter of the dataclass, in the order of its fields.

    Args:
        cls: the dataclass.
        without: fields that are checked elsewhere.

    Raises:
        TypeError: a field was created without one of the functions above.
    """
    schemas: dict[str, Schema] = {}
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        if _SCHEMA not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name} has no schema: make it with number(), optional_number(), whole(), word(),"
                " text() or flag()"
            )
        schemas[field.name] = field.metadata[_SCHEMA]
    return schemas


def _shown(value: object) -> str:
    """A wrong value for a message: its text if short, else its type alone."""
    text, kind = repr(value), type(value).__name__
    is_short = len(text) <= SHOWN_MAX and "\n" not in text and " at 0x" not in text
    return f"{text} of type {kind}" if is_short else f"a {kind}"


def real_number(name: str, value: object) -> float:
    """Return `value`, which is a number.

    Raises:
        TypeError: it is not a real number (a bool does not count).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {_shown(value)}")
    return value  # type: ignore[return-value]


def finite_number(name: str, value: object) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: it is not a real number (a bool does not count).
        ValueError: it is infinite, NaN or too large.
    """
    try:
        result = float(real_number(name, value))
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, not {result}")
    return result


def whole_number(name: str, value: object) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: it is not a whole number (neither a bool nor a float counts).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {_shown(value)}")
    return int(value)
