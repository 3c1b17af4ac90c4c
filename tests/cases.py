"""One property is one test: `each` runs it over a table of cases and names every case that fails."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

FAILURES = (Exception, pytest.fail.Exception)
TEXT_CHARACTERS_MAX = 200


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test below with each of the cases in one go, as ``pytest.mark.parametrize`` runs it in several.

    It is for a test that needs nothing anew for each case: the cases share the fixtures, but each finds a folder of its
    own at ``tmp_path``, and what it does with ``monkeypatch`` is undone. All of them run, and the test fails with a
    list of those that failed, below the traceback of the first; after one that used up the time of the test none runs.
    A case that skips is passed over, and the test is skipped where all are.

    Args:
        names: the arguments that a case gives, with commas between.
        cases: a tuple of their values each, or the value itself where there is one name.

    Raises:
        ValueError: there is no case, so that the test could not fail.
    """
    keys = [name.strip() for name in names.split(",")]
    rows = [dict(zip(keys, case if len(keys) > 1 else [case], strict=True)) for case in cases]
    if not rows:
        raise ValueError(f"no case for {names}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(*args: Any, **kwargs: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            skipped: list[BaseException] = []
            for number, row in enumerate(rows):
                try:
                    with own_fixtures(kwargs, number) as fixtures:
                        test(*args, **fixtures, **row)
                except pytest.skip.Exception as error:
                    skipped.append(error)
                except FAILURES as error:
                    failed.append((f"case {number}, {text_of(row)}", error))
                    if is_timeout(error):
                        break  # its alarm rings once: nothing would end the cases to come
            if failed:
                lines = "".join(f"\n{text}: {str(error)[:TEXT_CHARACTERS_MAX]}" for text, error in failed)
                raise AssertionError(f"{len(failed)} of {len(rows)} cases failed:{lines}") from failed[0][1]
            if len(skipped) == len(rows):
                raise skipped[0]

        signature = inspect.signature(test)
        if missing := [key for key in keys if key not in signature.parameters]:
            raise ValueError(f"{test.__name__} has no argument {', '.join(missing)}")
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        all_cases.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_cases

    return decorate


@contextlib.contextmanager
def own_fixtures(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures, with an empty folder as ``tmp_path`` and a ``monkeypatch`` that ends with this case."""
    own: dict[str, Any] = {}
    if "tmp_path" in fixtures:
        own["tmp_path"] = fixtures["tmp_path"] / f"case-{number}"
        own["tmp_path"].mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "monkeypatch" in fixtures:
            own["monkeypatch"] = monkeypatch
        yield {**fixtures, **own}


def is_timeout(error: BaseException | None) -> bool:
    """Whether pytest-timeout ended the case, or one of a table within it."""
    return error is not None and ("from pytest-timeout" in str(error) or is_timeout(error.__cause__))


def text_of(row: Mapping[str, Any]) -> str:
    """A case in one line: its values, and only the names of functions and classes."""
    return ", ".join(f"{key}={getattr(value, '__name__', None) or repr(value)}" for key, value in row.items())[
        :TEXT_CHARACTERS_MAX
    ]


def pairs(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few rows that hold every pair of values of any two options, always the same ones.

    Each row begins with the first pair that no row has yet; every other option takes the value with the most new pairs.
    """
    columns = [list(values) for values in options]
    cells = [[(column, at) for at in range(len(values))] for column, values in enumerate(columns)]
    missing = dict.fromkeys(
        frozenset(pair) for left, right in itertools.combinations(cells, 2) for pair in itertools.product(left, right)
    )
    chosen: list[tuple[Any, ...]] = []
    while missing:
        row = dict(next(iter(missing)))
        for column in (column for column in range(len(columns)) if column not in row):
            new = [sum(frozenset([cell, other]) in missing for other in row.items()) for cell in cells[column]]
            row[column] = new.index(max(new))
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        chosen.append(tuple(values[row[column]] for column, values in enumerate(columns)))
    return chosen
