"""Checkpoints that cannot be made: everybody is told, nothing is left over, training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    WEIGHTS,
    CheckFolder,
    LockFolder,
    Sweep,
    UnlockFolder,
    WriteManifest,
    WriteShard,
)
from kvdist.core.machine import PeerConnected, PeerDisconnected, Persist
from kvdist.core.worker.requests import ClaimFolder
from kvdist.protocol.messages import MarkPushes, Saved, SavedFile
from tests.cases import each
from tests.core.training import (
    FULL,
    VALUES,
    a_cluster,
    failures,
    push,
    push_all,
    require_moment,
    require_nothing_left,
    save_all,
)
from tests.core.wired import LOCKS

# Workers that do not do the same.


def test_workers_that_call_at_different_steps_all_fail_and_training_goes_on(tmp_path: Path) -> None:
    for early in (0, 1):
        wired = a_cluster(3)
        requests = []
        for rank in range(3):
            push(wired, rank, 0)
            if rank != early:
                push(wired, rank, 1)
            requests.append(wired.save(rank, tmp_path, *VALUES))
            wired.settle()
        wired.settle_works()
        for reason in failures(wired, requests):
            assert "every worker must call it at the same step" in reason
        push(wired, early, 1)
        wired.settle()
        require_nothing_left(wired)
        assert not tmp_path.exists(), "nothing is left of it"
        again = save_all(wired, tmp_path)
        wired.settle_works()
        assert all(request in wired.completed for request in again)
        require_moment(tmp_path, range(3), 2)
        for path in tmp_path.iterdir():
            path.unlink()


@each("change", [{"step": 8}, {"keep": 2}, {"contents": (WEIGHTS,)}])
def test_workers_that_say_something_else_all_fail(tmp_path: Path, change: dict[str, Any]) -> None:
    wired = a_cluster()
    requests = [wired.save(0, tmp_path, *VALUES, step=7), wired.save(1, tmp_path, *VALUES, **{"step": 7, **change})]
    wired.settle_works()
    assert all("the workers do not agree" in reason for reason in failures(wired, requests))
    require_nothing_left(wired)


def test_workers_that_name_different_folders_leave_nothing_in_either(tmp_path: Path) -> None:
    wired = a_cluster()
    for first in (0, 1):
        requests = [wired.save(rank, tmp_path / f"folder-{rank}", *VALUES) for rank in (first, 1 - first)]
        wired.settle_works()
        failures(wired, requests)
    assert not list(tmp_path.rglob("*.safetensors"))
    require_nothing_left(wired)


def test_a_late_mark_of_a_failed_checkpoint_starts_no_other(tmp_path: Path) -> None:
    wired = a_cluster(3)
    requests = [wired.save(0, tmp_path, *VALUES), wired.save(1, tmp_path / "other", *VALUES)]
    wired.settle_works()
    assert not wired.failed, "it fails for all at once"
    requests.append(wired.save(2, tmp_path, *VALUES))
    wired.settle_works()
    failures(wired, requests)
    require_nothing_left(wired)


def test_a_worker_that_never_calls_is_named_and_when_it_leaves_the_others_go_on(tmp_path: Path) -> None:
    wired = a_cluster(3)
    push_all(wired, 0)
    requests = [wired.save(rank, tmp_path, *VALUES, step=9) for rank in (0, 1)]
    wired.settle_works()
    wired.advance(wired.limits.explain_after_s)
    assert not wired.completed.keys() & set(requests)
    text = wired.workers[0].explain(wired.now)
    assert text is not None and "checkpoint of step 9" in text and "for worker-2 (host-2)" in text
    text = wired.scheduler.explain(wired.now)
    assert text is not None and text.endswith("s for worker-2 to call save_checkpoint (checkpoint of step 9)")
    wired.leave(2)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    assert [text for text in wired.reports if "step 9 has no state of worker-2 (left instead" in text]
    require_moment(tmp_path, range(3), 1)
    require_nothing_left(wired)


def test_a_checkpoint_in_the_background_does_not_explain_what_else_waits(tmp_path: Path) -> None:
    wired = a_cluster()
    wired.save(0, tmp_path, *VALUES, step=9)
    wired.advance(1.0)
    push(wired, 0, 0)
    wired.advance(3 * wired.limits.explain_after_s)
    text = wired.workers[0].explain(wired.now)
    assert text is not None and "push of key" in text and "to push key" in text and "checkpoint" not in text
    push(wired, 1, 0)
    wired.advance(wired.limits.explain_after_s)
    text = wired.workers[0].explain(wired.now)
    assert text is not None and "for worker-1 (host-1) to call save_checkpoint (checkpoint of step 9)" in text


def test_a_server_that_writes_for_long_is_named(tmp_path: Path) -> None:
    wired = a_cluster()
    save_all(wired, tmp_path, step=4)
    wired.settle()
    wired.work()
    wired.advance(wired.limits.explain_after_s)
    slow = wired.works[0].who
    text = wired.workers[0].explain(wired.now)
    assert text is not None and f"s for {slow} to finish save_checkpoint (checkpoint of step 4)" in text
    text = wired.scheduler.explain(wired.now)
    assert text is not None and f"s for {slow} to finish save_checkpoint (checkpoint of step 4)" in text


def test_a_worker_that_leaves_after_its_call_is_in_the_checkpoint(tmp_path: Path) -> None:
    wired = a_cluster(3)
    push_all(wired, 0)
    wired.save(2, tmp_path, *VALUES, file=SavedFile("", 0, ""))
    wired.leave(2)
    wired.settle()
    requests = []
    for rank in (0, 1):
        requests.append(wired.save(rank, tmp_path, *VALUES))
        push(wired, rank, 1)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, range(3), 1)
    require_nothing_left(wired)


def test_a_server_that_stops_before_it_has_written_leaves_no_checkpoint_without_its_slices(tmp_path: Path) -> None:
    wired = a_cluster(2, num_servers=2)
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle()
    held = wired.works.popleft()
    assert isinstance(held.work, WriteShard)
    scheduler = wired.scheduler
    scheduler.acknowledged(wired.member(held.who), (), wired.now)  # it has heard that it shall stop
    (other,) = [name for name in ("server-0", "server-1") if name != held.who]
    effects = scheduler.handle(wired.member(other), Saved(0, 0, SavedFile("it", 8, "0" * 64), ""), wired.now)
    assert not any(isinstance(effect, Persist) for effect in effects)


# Failures.


@each("kind", [WriteShard, WriteManifest])
def test_a_full_disk_fails_for_all_and_leaves_no_file_and_the_next_one_succeeds(tmp_path: Path, kind: type) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    requests = save_all(wired, tmp_path)
    works = wired.settle_works(kind, FULL)
    assert isinstance(works[-1], Sweep)
    assert all(FULL in reason for reason in failures(wired, requests))
    assert not tmp_path.exists()
    require_nothing_left(wired)
    push_all(wired, 1)
    again = save_all(wired, tmp_path)
    wired.settle_works()
    assert all(request in wired.completed for request in again)
    require_moment(tmp_path, (0, 1), 2)


def test_a_full_disk_at_one_server_waits_for_the_others_so_that_what_they_write_is_removed(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = save_all(wired, tmp_path)
    wired.settle()
    wired.work(FULL)
    wired.settle()
    assert not wired.failed
    assert isinstance(wired.work(), WriteShard)
    wired.settle()
    assert list(tmp_path.glob("*.safetensors"))
    assert not wired.failed, "nobody may try again before all is removed"
    assert isinstance(wired.work(), Sweep)
    wired.settle()
    failures(wired, requests)
    assert not tmp_path.exists()


def test_a_worker_that_cannot_write_its_own_file_fails_for_all(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = [wired.save(0, tmp_path, *VALUES), wired.save(1, tmp_path, *VALUES, failure=FULL)]
    wired.settle_works()
    assert all(f"worker-1: {FULL}" in reason for reason in failures(wired, requests))
    assert not tmp_path.exists()
    require_nothing_left(wired)


def test_a_failed_attempt_leaves_an_earlier_checkpoint_of_that_step_as_it_was(tmp_path: Path) -> None:
    wired = a_cluster()
    save_all(wired, tmp_path)
    wired.settle_works()
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle_works(WriteManifest, FULL)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
    push_all(wired, 1)
    save_all(wired, tmp_path)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 2)


def test_what_cannot_be_swept_does_not_keep_anybody_waiting(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = save_all(wired, tmp_path)
    wired.settle_works(failure=FULL)
    failures(wired, requests)
    require_nothing_left(wired)


def test_a_mark_of_a_slice_that_is_elsewhere_fails(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = save_all(wired, tmp_path)
    source, to, packet = next(
        one for one in wired.wire if one[1] == "server-0" and isinstance(one[2].message, MarkPushes)
    )
    packet.message.ids[0] = 999
    wired.settle_works()
    assert source and to
    assert all("slice 999 is not kept by server-0" in reason for reason in failures(wired, requests))
    require_nothing_left(wired)


def test_what_is_lost_on_the_way_is_said_again(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    requests = save_all(wired, tmp_path)
    assert wired.lose() > 0
    for worker in ("worker-0", "worker-1"):
        for peer in ("server-0", "server-1", "scheduler"):
            wired.observe(worker, PeerDisconnected(wired.member(peer), "reset"))
            wired.observe(worker, PeerConnected(wired.member(peer)))
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, (0, 1), 1)


# Directories that are claimed before anything is saved there.


def claim(wired: Any, rank: int, folder: Path) -> int:
    return int(wired.ask(rank, lambda number: ClaimFolder(number, 0, str(folder), EVERYTHING)))


def test_a_directory_is_claimed_once_for_all_workers(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = [claim(wired, 0, tmp_path / "run" / "step-1"), claim(wired, 1, tmp_path / "run" / "step-1")]
    works = wired.settle_works()
    assert [type(work) for work in works] == [LockFolder, CheckFolder, CheckFolder]
    runs = {wired.completed[request] for request in requests}
    assert len(runs) == 1 and all(work.run in runs for work in works[1:] if isinstance(work, CheckFolder))
    later = claim(wired, 1, tmp_path / "run" / "step-2")
    assert not wired.settle_works() and wired.completed[later] in runs
    LOCKS.close()


@each("kind", [LockFolder, CheckFolder])
def test_a_directory_that_cannot_be_had_is_refused_to_all_and_looked_at_again_for_the_next_save(
    tmp_path: Path, kind: type
) -> None:
    wired, folder = a_cluster(), tmp_path / "run" / "step-1"
    requests = [claim(wired, 0, folder)]
    works = wired.settle_works(kind, FULL)
    requests.append(claim(wired, 1, folder))
    works += wired.settle_works()
    assert all(FULL in reason for reason in failures(wired, requests))
    assert sum(isinstance(work, LockFolder) for work in works) == 1, "of one checkpoint all hear the same"
    assert any(isinstance(work, UnlockFolder) for work in works) is (kind is CheckFolder)
    assert not (tmp_path / "run").exists()
    refused = [wired.save(rank, "/nowhere", *VALUES, run="", failure=FULL) for rank in (0, 1)]
    assert not wired.settle_works(), "nobody writes, and nobody sweeps"
    assert all(FULL in reason for reason in failures(wired, refused))
    again = [claim(wired, rank, folder) for rank in (0, 1)]
    assert LockFolder in map(type, wired.settle_works())
    assert all(request in wired.completed for request in again)
    LOCKS.close()


def test_a_worker_that_cannot_take_part_fails_it_for_all_and_nothing_stays(tmp_path: Path) -> None:
    for first in (0, 1):
        wired = a_cluster()
        folder = tmp_path / "run" / "step-1"
        given: list[dict[str, Any]] = [{}, {"run": "", "failure": "its arguments are wrong"}]
        folders = [folder, "/nowhere"]
        requests = [wired.save(rank, folders[rank], *VALUES, **given[rank]) for rank in (first, 1 - first)]
        works = wired.settle_works()
        assert not any(isinstance(work, WriteManifest) for work in works)
        assert {work.folder for work in works if isinstance(work, Sweep)} == {str(folder)}
        assert all("worker-1: its arguments are wrong" in reason for reason in failures(wired, requests))
        require_nothing_left(wired)
