"""Tables of rows on real clusters: known numbers, sizes beyond a message, deaths, and mistakes that name themselves."""

from __future__ import annotations

import re
import signal

import pytest

from tests.integration.processes import TIMEOUT_S
from tests.integration.test_faults import kill, named

REDUCED = {"KVDIST_LOCAL_REDUCE": "on"}


def run(job, workers, servers, *command, timeout_s=TIMEOUT_S, **variables):
    launcher = job.launch(workers, servers, "rows.py", *command, **variables)
    job.succeed(timeout_s)
    assert len(launcher.lines_with("checked on")) == workers, job.transcript()
    return launcher


@pytest.mark.parametrize(
    ("transport", "multi_precision", "more"),
    [
        ("auto", "on", {}),
        pytest.param("tcp", "off", {}, marks=pytest.mark.slow),
        pytest.param("auto", "off", REDUCED, marks=pytest.mark.slow),
    ],
)
def test_rows_have_the_known_numbers(job, transport, multi_precision, more):
    run(job, 2, 2, "known", multi_precision, KVDIST_TRANSPORT=transport, **more)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("multi_precision", ["on", "off"])
def test_rows_have_the_known_numbers_on_seven_workers_too(job, transport, multi_precision):
    run(job, 7, 7, "known", multi_precision, timeout_s=1.5 * TIMEOUT_S, KVDIST_TRANSPORT=transport)


@pytest.mark.parametrize("more", [REDUCED, pytest.param({}, marks=pytest.mark.slow)])
def test_tables_and_arrays_go_together_in_a_call_and_rows_are_not_summed_on_the_host(job, more):
    run(job, 3, 2, "beside", **more)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_more_rows_than_a_message_may_have_are_pushed_at_once(job, transport):
    run(job, 2, 1, "large", KVDIST_TRANSPORT=transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_arrays_are_free_when_push_returns_and_each_thread_may_have_its_table(job, transport):
    run(job, 2, 2, "reused", KVDIST_TRANSPORT=transport)


@pytest.mark.slow
def test_the_rows_of_a_worker_that_leaves_at_once_count(job):
    run(job, 3, 2, "leaves")


@pytest.mark.parametrize("victim", ["server-1", pytest.param("worker-1", marks=pytest.mark.slow)])
def test_kill_9_while_rows_are_under_way_is_named_everywhere(job, victim):
    job.cluster(2, 2, "rows.py", "endless")
    for name in ("worker-0", "worker-1"):
        job.line(name, "going")
    before = job.ticks()
    kill(job, victim, signal.SIGKILL)
    job.finish()
    job.assert_soon(before)
    for process in job.processes.values():
        if process.name != victim:
            assert named(victim) in process.text and process.code, job.transcript()
    assert job.processes["worker-0"].lines_with(f"lost {victim!r}"), job.transcript()


def said_by(launcher, rank):
    prefix = f"w{rank} │ "
    return [line.removeprefix(prefix) for line in launcher.text.splitlines() if line.startswith(prefix)]


def test_wrong_calls_name_what_is_wrong_and_break_nothing(job):
    launcher = run(job, 2, 2, "mistakes")
    expected = [
        r"ValueError: row 6 is out of range: an array of shape \(6, 2\) has 6 rows",
        r"ValueError: row ids must be at least 0 and fit int64, and -1 is among them",
        r"TypeError: row ids must be integers, not float64",
        r"ValueError: 2 row ids need as many rows of values, got 1",
        r"ValueError: key 't' is a table of shape \(6, 2\), but the rows are of shape \(7, 2\)",
        r"ValueError: key 't' is a table of shape \(6, 2\), but the rows are of shape \(6, 3\)",
        r"ValueError: key 't' is a table of shape \(6, 2\), but the rows are of shape \(7, 2\)",
        r"ValueError: key 'w' has shape \(3,\), but the value has shape \(4,\)",
        r"ValueError: key 't' has rows 0 to 5, and row 6 was asked for",
        r"ValueError: key 't' has rows 0 to 5, and row -1 was asked for",
        r"TypeError: key 't': row ids must be integers, not float64",
        r"ValueError: 2 keys need as many row_ids and results, got 2 and 1",
        r"InitMismatch: key 't' was initialised with shape \(6, 2\) and dtype float32.*and now with shape \(7, 2\)",
        r"ValueError: key 'huge' has shape \(1099511627776, 8\); at most 274877906944 elements",
        r"works",
        r"checked on",
    ]
    said = said_by(launcher, 1)
    assert len(said) == len(expected), job.transcript()
    for line, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, line), f"{line!r} is not {pattern!r}"


def test_tables_that_differ_between_workers_are_told_to_all_of_them(job):
    launcher = run(job, 3, 2, "mismatches")
    expected = [
        ("'a'", "with shape (6, 2);", "with shape (5, 2);"),
        ("'b'", "dtype float32", "dtype float16"),
        ("'c'", "shape (6, 2) and dtype float32, as a table of rows;", "shape (6, 2) and dtype float32;"),
        ("'d'", "rows that begin as constant(0", "rows that begin as constant(1"),
        ("'e'", "as a table of rows;", "rows that begin as zeros;"),
    ]
    for rank in range(3):
        said = said_by(launcher, rank)
        assert len(said) == len(expected) + 2, job.transcript()
        for line, (key, *words) in zip(said, expected, strict=False):
            assert line.startswith(f"InitMismatch: worker-1 declares key {key} with "), job.transcript()
            others, odd = words
            told, _, rest = line.partition("worker-0 and worker-2 with ")
            assert odd in told and others in f"with {rest}" and "every worker must build the same model" in rest
        assert said[-2] == "works"
