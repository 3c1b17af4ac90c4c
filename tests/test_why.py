"""``kvdist why`` names who was awaited, from the dumps of simulated clusters whose processes die or stand still."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvdist.diagnostics.why import NoDumps, Story, align, explained, read_dumps
from tests.cases import each
from tests.simulation import SCENARIOS, run


@each(
    "name, victim",
    [
        ("killed worker", "worker-1"),
        ("killed server", "server-0"),
        ("killed scheduler", "scheduler"),
        ("killed leader", "worker-0"),
        ("rows and a killed server", "server-1"),
    ],
)
def test_the_process_that_was_lost_is_named_and_who_waited_for_it(name: str, victim: str, tmp_path: Path) -> None:
    result = run(2, SCENARIOS[name], tmp_path)
    assert result.happened["crash"] == 1
    assert not list(tmp_path.glob(f"{victim}.*")), "a killed process writes nothing"
    text = explained(tmp_path)
    assert f" because of {victim}" in text.partition(". ")[0], text
    waits = [wait for wait in Story(read_dumps(tmp_path)).waits.values() if victim in wait.awaited]
    for wait in waits:
        assert f"for {victim}" in text or wait.deed in text, text


def test_waits_that_ended_well_leave_no_dump(tmp_path: Path) -> None:
    result = run(1, SCENARIOS["paused follower"], tmp_path)
    assert result.happened["pause"] == 1
    assert tmp_path.is_dir() and not list(tmp_path.iterdir()), "they were written while the wait lasted"


@each("first", ["worker-0", "worker-1"])
def test_who_waits_in_a_circle_is_told_wherever_the_circle_is_entered(first: str, tmp_path: Path) -> None:
    run(2, SCENARIOS["killed worker"], tmp_path)
    dump = read_dumps(tmp_path)[0]
    waits = {"scheduler": "worker-0 to end", "worker-0": "worker-1 to push", "worker-1": "worker-0 to pull"}
    abouts = [
        {**dump.about, "process": name, "wait": f"waiting 9.0 s for {wait}", "failure": None}
        for name, wait in sorted(waits.items(), key=lambda item: item[0] != first)
    ]
    text = Story([replace(dump, about=about) for about in abouts]).paragraph()
    for name, wait in waits.items():
        assert text.lower().count(f"{name} waited 9.0 s for {wait}.") == 1, text


@each("name, seed, victim", [("killed worker", 3, "worker-1"), ("killed server", 2, "server-0")])
def test_what_a_process_wrote_in_a_wait_is_not_taken_for_its_end(
    name: str, seed: int, victim: str, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    run(seed, replace(scenario, limits=replace(scenario.limits, explain_after_s=0.02)), tmp_path)
    dumps = read_dumps(tmp_path)
    for dump in dumps:  # one clock, that of the simulator
        dump.about = {**dump.about, "wall": dump.about["monotonic"]}
    story = Story(dumps)
    assert story.by_name[victim].about["reason"] == "a long wait", "it was killed after that"
    assert story.verdict is not None and story.verdict["node"] == victim
    heard = max(
        dump.wall(now) for dump in dumps for now, came, stamp in dump.stamps if came and str(stamp.source) == victim
    )
    assert story.by_name[victim].ended_at < heard <= story._lost_at(story.verdict)
    assert "Its own reason" not in story.paragraph() and "Its main thread" not in story.paragraph()


def test_a_process_that_gets_its_rank_after_a_wait_has_one_dump(tmp_path: Path) -> None:
    scenario = SCENARIOS["killed server"]
    run(3, replace(scenario, limits=replace(scenario.limits, explain_after_s=0.02)), tmp_path)
    assert len(list(tmp_path.glob("server-1.*"))) == 1 and not list(tmp_path.glob("*-[?].*"))


def test_clocks_are_aligned_by_messages_that_went_both_ways(tmp_path: Path) -> None:
    run(2, SCENARIOS["killed worker"], tmp_path)
    dumps = read_dumps(tmp_path)
    scheduler = next(dump for dump in dumps if dump.process == "scheduler")
    other = next(dump for dump in dumps if dump.process == "server-0")
    wall = 1_000_000.0 + other.about["monotonic"] - scheduler.about["monotonic"]  # one clock, that of the simulator
    scheduler.about = {**scheduler.about, "wall": 1_000_000.0}
    other.about = {**other.about, "wall": wall + 5.0, "host": "elsewhere"}
    align([scheduler, other])
    assert other.ahead_s == pytest.approx(5.0, abs=0.02), "messages take 2 ms"


def test_dumps_of_an_earlier_job_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    run(2, SCENARIOS["killed worker"], tmp_path / "one")
    for path in (tmp_path / "one").glob("*.dump"):
        text = path.read_text().replace('"job": 4711', '"job": 4712', 1).replace('"wall": ', '"wall": -', 1)
        (tmp_path / "one" / f"old-{path.name}").write_text(text)
    assert len(list((tmp_path / "one").glob("old-*"))) > 1
    assert {dump.beginning.job for dump in read_dumps(tmp_path / "one")} == {4711}


@each(
    "text", ["", "{}\n", "[]\n", "no json\n", '{"beginning": {"$": "Popen", "v": 1}}\n', '{"beginning": 1}\n{"$": 3}\n']
)
def test_what_is_no_dump_is_refused_with_a_sentence(text: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    (tmp_path / "worker-0.1.dump").write_text(text)
    with pytest.raises(NoDumps, match=r"has no dumps to explain: worker-0\.1\.dump is not a dump of this version"):
        read_dumps(tmp_path)


@each(
    "made, told",
    [
        (False, "there is no folder {}; start the job with kvdist-launch --dump {}"),
        (True, "that ended well leaves none"),
    ],
)
def test_a_missing_folder_and_a_folder_without_dumps_are_told_apart(made: bool, told: str, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    if made:
        folder.mkdir()
    with pytest.raises(NoDumps) as refused:
        read_dumps(folder)
    assert told.format(folder, folder) in str(refused.value)


def test_a_wait_that_a_worker_gave_up_is_not_called_an_interruption_nor_its_fault(tmp_path: Path) -> None:
    run(1, replace(SCENARIOS["killed worker"], victims=("worker-1",)), tmp_path)
    dumps = read_dumps(tmp_path)
    wait = "waiting 25.0 s for worker-1 to push key 'w' (step 6)"
    cause = f"worker-0: {wait}; the job ends after 25 s of this (KVDIST_STALL_SHUTDOWN_S)"
    (scheduler,) = [dump for dump in dumps if dump.process == "scheduler"]
    (first,) = [dump for dump in dumps if dump.process == "worker-0"]
    failure = {"type": "PeerLostError", "node": "worker-0", "cause": cause, "text": f"worker-0 was lost: {cause}"}
    scheduler.about = {**scheduler.about, "failure": failure, "wait": ""}
    first.about = {**first.about, "failure": None, "wait": wait, "reason": f"an uncaught DeadlineExceeded: {cause}"}
    end = {"wall": scheduler.about["wall"] + 9.0, "reason": "ended by signal 15 (SIGTERM)", "failure": None, "wait": ""}
    last = replace(first, about={**first.about, **end, "process": "worker-1"}, entries=[])
    text = Story([scheduler, first, last]).paragraph()
    assert text.startswith("No process was lost; worker-0 gave up waiting 25.0 s for worker-1 to push key 'w'"), text
    assert "interrupted" not in text and "Everybody waited for worker-1" in text


@each(
    "text, told",
    [
        (
            "worker-1: waiting 12.0 s for 1 more worker to join: 1 of at least 2 are there, in push of 'w'",
            "Worker-1 waited 12.0 s for 1 more worker to join: 1 of at least 2 are there, in push of 'w'.",
        ),
        (
            "worker-1: waiting 12.0 s for server-1 to read the snapshot of step 120, in going back to a snapshot",
            "Everybody waited for server-1. Worker-1 waited 12.0 s for server-1 to read the snapshot of step 120",
        ),
    ],
)
def test_calls_that_are_held_back_are_told(text: str, told: str, tmp_path: Path) -> None:
    run(1, replace(SCENARIOS["killed worker"], victims=("worker-1",)), tmp_path)
    (dump,) = [dump for dump in read_dumps(tmp_path) if dump.process == "worker-0"]
    dump.about = {**dump.about, "process": "worker-1", "wait": text, "failure": None, "reason": "a long wait"}
    dump.entries = []
    assert told.replace("Worker-1", "worker-1") in Story([dump]).paragraph()
