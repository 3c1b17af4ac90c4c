"""The ledger says what became of every push, and `kvdist ledger` reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdist.__main__ import main
from kvdist.diagnostics.ledger import fate, keep
from tests.core.wired import Wired


def train(folder: Path) -> Wired:
    """Two workers push twice; the second push of worker 1 reaches one of two servers, and then it is killed."""
    wired = Wired(2, 2, bigarray_bound=2, on_loss="continue")
    for one in wired.servers:
        keep(one, folder)
    wired.initialise({"w": [0.0, 0.0, 0.0], "none": [0.0]})
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
        wired.push(rank, {"w": [1, 1, 1]})
    wired.settle()
    wired.push(0, {"w": [1, 1, 1]})
    wired.settle()
    wired.push(1, {"w": [10, 10, 10]})
    wired.wire = type(wired.wire)([one for one in wired.wire if one[1] != "server-1"])
    wired.deliver(len(wired.wire))
    wired.kill("worker-1")
    wired.advance(10.0)
    return wired


def test_each_push_has_a_fate(tmp_path: Path) -> None:
    lost = f"worker-1 (incarnation {train(tmp_path).member('worker-1').incarnation})"
    assert fate(tmp_path, 0, 2) == "push 2 of worker-0 is counted in version 2 of 2 slices"
    assert fate(tmp_path, 1, 1).startswith(f"push 1 of {lost} is counted in version 1 of 2 slices")
    assert fate(tmp_path, 1, 2).startswith(f"push 2 of {lost} is counted in version 2 of 1 slices, and not in ")
    assert fate(tmp_path, 1, 3) == f"push 3 of {lost} is counted nowhere: that process was given up before"
    assert fate(tmp_path, 0, 9).endswith("counted nowhere: it has not been pushed, or its rounds are open")


def test_a_round_that_is_refused_says_why(tmp_path: Path) -> None:
    wired = Wired(1, 1)
    keep(wired.servers[0], tmp_path)
    wired.initialise({"w": [0.0]}, mode="async")
    wired.push(0, {"w": [1]})
    wired.settle()
    assert "were refused: " in fate(tmp_path, 0, 1) and "needs an optimizer" in fate(tmp_path, 0, 1)


def test_a_push_that_comes_after_its_worker_was_given_up_is_refused_and_says_so_once(tmp_path: Path) -> None:
    wired = running(tmp_path, "sync")
    for rank in (0, 1):
        wired.push(rank, {"w": [1, 1]})
    wired.settle()
    zombie = wired.member("worker-1").incarnation
    wired.push(1, {"w": [10, 10]})
    late = [packet for source, to, packet in wired.wire if (source, to) == ("worker-1", "server-0")]
    assert len(late) == 1
    wired.lose()
    come_back(wired, 1, "sync")
    for _ in range(2):  # it repeats what is not acknowledged
        wired.hear("server-0", late[0])
    assert "was given up" in wired.wire[-1][2].message.reason, "it is told so"
    lines = [json.loads(line) for line in (tmp_path / "server-0.jsonl").read_text().splitlines()]
    assert [line["fenced"] for line in lines if "fenced" in line] == [[1, zombie, 2]]
    assert fate(tmp_path, 1, 2).splitlines()[0] == (
        f"push 2 of worker-1 (incarnation {zombie}) is counted nowhere: 1 slices have refused it, as it came after that"
        " process was given up"
    )


def come_back(wired: Wired, rank: int, mode: str) -> None:
    wired.kill(f"worker-{rank}")
    wired.advance(1.0)
    wired.come_back(rank)
    wired.declare(rank, {"w": (2,)}, mode)
    wired.take_part(rank)
    wired.advance(1.0)


def running(folder: Path, mode: str) -> Wired:
    wired = Wired(2, 1, on_loss="continue")
    keep(wired.servers[0], folder)
    wired.initialise({"w": [0.0, 0.0]}, mode=mode)
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    return wired


def test_pushes_of_a_number_that_two_incarnations_have_are_two(tmp_path: Path) -> None:
    wired = running(tmp_path, "async")
    for _ in range(3):
        wired.push(1, {"w": [1, 1]})
        wired.settle()
    first = wired.member("worker-1").incarnation
    come_back(wired, 1, "async")
    second = wired.member("worker-1").incarnation
    assert first != second
    wired.push(1, {"w": [1, 1]})
    wired.settle()
    assert fate(tmp_path, 1, 1).splitlines() == [
        f"push 1 of worker-1 (incarnation {first}) is counted in version 1 of 1 slices",
        f"push 1 of worker-1 (incarnation {second}) is counted in version 4 of 1 slices",
    ]
    assert fate(tmp_path, 1, 2).splitlines() == [
        f"push 2 of worker-1 (incarnation {first}) is counted in version 2 of 1 slices",
        f"push 2 of worker-1 (incarnation {second}) is counted nowhere: it has not been pushed, or its rounds are open",
    ]


def test_the_open_push_of_a_worker_that_was_started_again_is_not_that_of_the_one_that_was_given_up(
    tmp_path: Path,
) -> None:
    wired = running(tmp_path, "sync")
    for rank in (0, 1):
        wired.push(rank, {"w": [1, 1]})
    wired.settle()
    first = wired.member("worker-1").incarnation
    come_back(wired, 1, "sync")
    second = wired.member("worker-1").incarnation
    for rank in (0, 1, 0, 1):  # it takes part from version 2 on
        wired.push(rank, {"w": [1, 1]})
        wired.settle()
    assert fate(tmp_path, 1, 1) == f"push 1 of worker-1 (incarnation {first}) is counted in version 1 of 1 slices"
    assert fate(tmp_path, 1, 3).endswith(f"worker-1 (incarnation {second}) is counted in version 3 of 1 slices")
    assert fate(tmp_path, 1, 4).splitlines() == [
        f"push 4 of worker-1 (incarnation {first}) is counted nowhere: that process was given up before",
        f"push 4 of worker-1 (incarnation {second}) is counted nowhere: it has not been pushed, or its rounds are open",
    ]


def test_the_lines_are_json_and_the_command_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "server-0.jsonl").read_text().splitlines()]
    (lost,) = {json.dumps(line["lost"]) for line in lines if "lost" in line}
    (counted,) = {row[1] for line in lines for row in line.get("counted", ()) if row[0] == 1}
    assert json.loads(lost) == [[1, counted]]
    assert main(["ledger", str(tmp_path), "--worker", "0", "--push", "1"]) == 0
    assert "push 1 of worker-0 is counted in version 1" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path / "none"), "--worker", "0", "--push", "1"]) == 1
