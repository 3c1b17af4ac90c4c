"""What a process does with its disk: below its root alone, and whatever fails, the checkpoints before it stay whole."""

from __future__ import annotations

import errno
import json
import logging
import os

import numpy as np
import pytest

from kvdist.checkpoint import folders
from kvdist.checkpoint import format as formats
from kvdist.checkpoint.files import write_file
from kvdist.checkpoint.folders import all_steps, complete_steps, folder_of
from kvdist.checkpoint.format import NAME
from kvdist.checkpoint.locks import Locks
from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    FileRecord,
    Manifest,
    ReadManifest,
    ReadShards,
    SavedKey,
    SliceImage,
    Sweep,
    WantedSlice,
    WriteManifest,
    WriteShard,
)
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.runtime.io_thread import ThreadedDisk, outcome
from tests.cases import each
from tests.checkpoint.faults import Faults, Killed, failing

RUN = "0123456789abcdef"
LOCKS = Locks()
SIZE = 5
BEGINS = "constant(0.5)"
KEYS = (SavedKey("w", (2 * SIZE,), "float32"), SavedKey("rows", (2000,), "float32", BEGINS))


def perform(work, root=None):
    return folders.perform(work, LOCKS, root)


def content_of(step, half):
    return np.full(SIZE, 10 * step + half, np.float32)


def slice_of(step, half, value=None):
    weight = content_of(step if value is None else value, half)
    return SliceImage(0, "w", half * SIZE, SIZE, DType.FLOAT32, step, weight)


def rows_of(step, half, value):
    """The half of a lazy table, of which a few rows exist."""
    ids, weight = 1000 * half + 7 * np.arange(SIZE), content_of(value, half)
    return SliceImage(0, "rows", 1000 * half, 1000, DType.FLOAT32, step, weight, ids=ids, initializer=BEGINS)


def save(directory, step, keep=0, value=None, root=None):
    """What scheduler and two servers do; on failure, what the scheduler does then."""
    folder = folder_of(directory, step)
    value = step if value is None else value
    try:
        files = [
            perform(
                WriteShard(
                    str(folder),
                    f"server-{rank}",
                    (slice_of(step, rank, value), rows_of(step, rank, value)),
                    RUN,
                    step,
                ),
                root,
            )
            for rank in (0, 1)
        ]
        own = write_file(folder, "worker-0", ".json", [memoryview(json.dumps(value).encode())])
        found = Manifest(step, EVERYTHING, "sync", True, None, 1, 2, KEYS, (*files, own))
        perform(WriteManifest(str(folder), found, keep), root)
    except (CheckpointError, OSError):
        perform(Sweep(str(folder)), root)
        raise


def restored(directory, step):
    """The one value that all of the checkpoint has."""
    folder = str(folder_of(directory, step))
    wanted = WantedSlice(0, "w", 0, 2 * SIZE, DType.FLOAT32), WantedSlice(1, "rows", 0, 2000, DType.FLOAT32, lazy_row=1)
    found, rows = perform(ReadShards(folder, wanted, EVERYTHING))
    assert rows.weight.tolist() == found.weight.tolist() and rows.ids[[0, -1]].tolist() == [0, 1028]
    value = int(found.weight[0]) // 10
    assert found.weight.tolist() == [*content_of(value, 0), *content_of(value, 1)]
    assert perform(ReadManifest(folder)).step == step
    return value


def unfinished(directory):
    return [path.name for path in directory.rglob("*.part")]


def unnamed(directory):
    """Files in folders of checkpoints that no manifest names."""
    found = []
    for step in all_steps(directory):
        folder = folder_of(directory, step)
        named = {NAME}
        if (folder / NAME).exists():
            named |= {one.name for one in formats.read_manifest(folder).files}
        found += [f"{folder.name}/{path.name}" for path in folder.iterdir() if path.name not in named]
    return found


def points(tmp_path, monkeypatch, step, only=()):
    """The calls that saving makes when nothing fails."""
    faults = Faults(None, OSError, only=only)
    begun(tmp_path / "counted")
    with failing(faults, monkeypatch):
        save(tmp_path / "counted", step, keep=2, value=7)
    return faults.calls


def begun(directory):
    save(directory, 1)
    save(directory, 2)


def test_a_checkpoint_is_written_and_read(tmp_path):
    save(tmp_path, 3)
    assert restored(tmp_path, 3) == 3 and unnamed(tmp_path) == []


# D1: the disk fails.


@pytest.mark.parametrize("step", [3, 2], ids=["another step", "the same step again"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_one_call_that_fails_leaves_every_checkpoint_whole_and_nothing_else(tmp_path, monkeypatch, step, number):
    calls = points(tmp_path, monkeypatch, step)
    assert {"fsync", "replace", "open", "write"} <= set(calls)
    for at, call in enumerate(calls):
        directory = tmp_path / str(at)
        begun(directory)
        failed = False
        try:
            with failing(Faults(at, lambda: OSError(number, os.strerror(number))), monkeypatch):
                save(directory, step, keep=2, value=7)
        except (CheckpointError, OSError) as error:
            failed = True
            assert os.strerror(number) in str(error), call
        steps = complete_steps(directory)
        values = [restored(directory, one) for one in steps]
        assert steps[:2] == [1, 2] or (steps == [2, 3] and not failed), call
        assert all(value in (one, 7) for one, value in zip(steps, values, strict=True)), call
        assert failed or values[-1] == 7, call
        assert unfinished(directory) == [], call
        if failed:
            assert unnamed(directory) == [], call
        save(directory, 4, keep=2)
        assert complete_steps(directory)[-1] == 4 and unnamed(directory) == []


@pytest.mark.parametrize("step", [3, 2], ids=["another step", "the same step again"])
def test_a_disk_that_stays_full_leaves_what_was_there(tmp_path, monkeypatch, step):
    only = ("write", "fsync", "mkdir", "open")
    for at in range(len(points(tmp_path, monkeypatch, step, only))):
        directory = tmp_path / str(at)
        begun(directory)
        fault = Faults(at, lambda: OSError(errno.ENOSPC, "No space left on device"), lasting=True, only=only)
        try:
            with failing(fault, monkeypatch):
                save(directory, step, keep=2, value=7)
        except (CheckpointError, OSError) as error:
            assert "No space left on device" in str(error)
        for one in (1, 2):
            if one in complete_steps(directory):
                assert restored(directory, one) in (one, 7)
        assert complete_steps(directory)[-1] >= 2 and unfinished(directory) == []


# D2: the process is killed.


@pytest.mark.parametrize("step", [3, 2], ids=["another step", "the same step again"])
def test_after_a_kill_at_any_call_the_newest_manifest_restores(tmp_path, monkeypatch, step):
    seen = set()
    for at, call in enumerate(points(tmp_path, monkeypatch, step)):
        directory = tmp_path / str(at)
        begun(directory)
        with pytest.raises(Killed), failing(Faults(at, Killed, lasting=True), monkeypatch):
            save(directory, step, keep=2, value=7)
        steps = complete_steps(directory)
        values = {one: restored(directory, one) for one in steps}
        newest = values[steps[-1]]
        assert newest in (2, 7), call
        assert values.get(2) == (7 if step == 2 and newest == 7 else 2), call
        seen.add(newest)
        save(directory, 5, keep=1)
        assert complete_steps(directory) == all_steps(directory) == [5], call
        assert unfinished(directory) == [] == unnamed(directory), call
    assert seen == {2, 7}


def test_an_attempt_again_after_a_kill_leaves_nothing_of_the_first(tmp_path, monkeypatch):
    for at in range(len(points(tmp_path, monkeypatch, 3))):
        directory = tmp_path / str(at)
        begun(directory)
        with pytest.raises(Killed), failing(Faults(at, Killed, lasting=True), monkeypatch):
            save(directory, 3, keep=2, value=7)
        save(directory, 3, keep=2, value=8)
        assert restored(directory, 3) == 8 and unfinished(directory) == [] == unnamed(directory)


# What is kept.


@each("keep, left", [(0, [1, 2, 5, 10, 9]), (1, [9]), (2, [9, 10]), (3, [5, 9, 10]), (9, None)])
def test_the_highest_steps_stay_and_the_one_just_written_always(tmp_path, keep, left):
    for step in (1, 2, 5, 10):
        save(tmp_path, step)
    save(tmp_path, 9, keep)
    assert complete_steps(tmp_path) == all_steps(tmp_path) == sorted(left or [1, 2, 5, 9, 10])


def test_what_somebody_else_keeps_there_stays(tmp_path):
    begun(tmp_path)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-01").mkdir()
    (tmp_path / "step-x").mkdir()
    save(tmp_path, 3, keep=1)
    assert [path.name for path in (tmp_path / "step-1").iterdir()] == ["notes.txt"]
    assert complete_steps(tmp_path) == [3] and not (tmp_path / "step-2").exists()
    assert (tmp_path / "step-01").exists() and (tmp_path / "step-x").exists()


def test_a_link_to_a_checkpoint_elsewhere_is_read_and_never_emptied(tmp_path):
    begun(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "elsewhere" / "step-1")
    save(tmp_path / "run", 3, keep=1)
    assert restored(tmp_path / "run", 1) == 1 and complete_steps(tmp_path / "run") == [1, 3]


def test_leftovers_of_earlier_steps_go_when_somebody_keeps_count_and_stay_otherwise(tmp_path):
    perform(WriteShard(str(tmp_path / "step-1"), "server-0", (slice_of(1, 0),), RUN, 1))
    perform(WriteShard(str(tmp_path / "step-9"), "server-0", (slice_of(9, 0),), RUN, 9))
    save(tmp_path, 2)
    assert all_steps(tmp_path) == [1, 2, 9]
    save(tmp_path, 3, keep=2)
    assert all_steps(tmp_path) == [2, 3, 9]


def test_what_cannot_be_removed_makes_no_failure_of_a_checkpoint_that_is_complete(tmp_path, monkeypatch, caplog):
    begun(tmp_path)

    def prune(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders, "prune", prune)
    with caplog.at_level(logging.WARNING, "kvdist"):
        save(tmp_path, 3, keep=1)
    assert complete_steps(tmp_path) == [1, 2, 3] and restored(tmp_path, 3) == 3
    (record,) = caplog.records
    assert "step-3 is complete, but what is older could not be removed" in record.message


def test_of_a_folder_whose_manifest_is_damaged_nothing_is_removed(tmp_path):
    save(tmp_path, 1)
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    (tmp_path / "step-1" / NAME).write_text('{"format": "kvdist checkpoint", ')
    perform(Sweep(str(tmp_path / "step-1")))
    assert {path.name for path in (tmp_path / "step-1").iterdir()} == names
    save(tmp_path, 1, value=4)
    assert restored(tmp_path, 1) == 4 and unnamed(tmp_path) == []


def test_a_manifest_of_another_program_is_never_replaced(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / NAME).write_text('{"name": "a page of the web"}')
    with pytest.raises(CheckpointError, match="belongs to another program"):
        save(tmp_path, 1)
    assert "a page" in (tmp_path / "step-1" / NAME).read_text()


def test_sweeping_removes_files_of_checkpoints_that_no_manifest_names_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "step-1"
    names = {path.name for path in folder.iterdir()}
    gone = ["server-0-0123456789abcdef.safetensors", "worker-12-ab.json", "server-3.safetensors.77.part"]
    gone += ["worker-0.json.1.part", "worker-0-states.safetensors.8.part", f"{NAME}.5.part"]
    stays = ["model.safetensors", "server-0.json", "notes.part", "worker-x-ab.json", "server-0-XY.safetensors", "part"]
    for name in (*gone, *stays):
        (folder / name).write_bytes(b"x")
    stayed = perform(Sweep(str(folder)))
    assert isinstance(stayed, Manifest) and stayed.step == 1
    assert {path.name for path in folder.iterdir()} == names | set(stays)
    assert restored(tmp_path, 1) == 1


@each("is_there", [False, True])
def test_sweeping_an_empty_folder_or_none_leaves_none(tmp_path, is_there):
    if is_there:
        (tmp_path / "step-1").mkdir()
    assert perform(Sweep(str(tmp_path / "step-1"))) is None
    assert not (tmp_path / "step-1").exists()


# The root.


def works(folder):
    yield WriteShard(folder, "server-0", (slice_of(1, 0),), RUN, 1)
    yield WriteManifest(folder, Manifest(1, EVERYTHING, "sync", True, None, 1, 1, KEYS, ()), 1)
    yield ReadManifest(folder)
    yield ReadShards(folder, (), EVERYTHING)
    yield Sweep(folder)


def test_nothing_is_done_outside_the_root(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    save(outside, 1)
    (root / "way").symlink_to(outside)
    (root / "sideways").symlink_to(root / "way" / ".." / "outside")
    before = sorted(path.name for path in outside.rglob("*"))
    for name in (outside, root / "way", root / "way" / "step-1", root / "sideways" / "step-1", tmp_path, f"{root}x"):
        for work in works(str(name)):
            with pytest.raises(CheckpointError, match="is outside .* or set KVDIST_CHECKPOINT_ROOT"):
                perform(work, root)
    assert sorted(path.name for path in outside.rglob("*")) == before


def test_a_root_may_be_reached_by_a_link_and_links_within_it_may_be_followed(tmp_path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "other").symlink_to(tmp_path / "real" / "sub")
    save(tmp_path / "link" / "run", 1, keep=1, root=tmp_path / "link")
    save(tmp_path / "real" / "other", 2, root=tmp_path / "link")
    assert restored(tmp_path / "real" / "run", 1) == 1 and restored(tmp_path / "real" / "sub", 2) == 2


@each("name", ["", "run/step-1", "/tmp/../etc/step-1", "~/step-1"])
def test_a_folder_is_named_by_an_absolute_path_without_a_way_up(name):
    for work in works(name):
        with pytest.raises(CheckpointError, match="is not an absolute path of a folder"):
            perform(work)


def test_a_path_that_leads_nowhere_is_a_sentence(tmp_path):
    (tmp_path / "round").symlink_to(tmp_path / "about")
    (tmp_path / "about").symlink_to(tmp_path / "round")
    for name in (tmp_path / "round" / "step-1", f"{tmp_path}/a\0b", tmp_path / ("x" * 300)):
        for work in works(str(name)):
            product, failure = outcome(work, LOCKS, tmp_path)
            assert product is None and (failure or isinstance(work, Sweep))


def test_a_folder_that_is_the_root_lets_nothing_go_beside_it(tmp_path, caplog):
    save(tmp_path, 1)
    root = tmp_path / "step-7"
    with caplog.at_level(logging.WARNING, "kvdist"):
        save(tmp_path, 7, keep=1, root=root)
    assert complete_steps(tmp_path) == [1, 7]
    assert "could not be removed" in caplog.text and "is outside" in caplog.text


# On a thread.


def test_works_are_done_in_order_on_a_thread_that_ends_when_it_is_told(tmp_path):
    disk, products = ThreadedDisk(tmp_path), []
    folder = str(tmp_path / "step-1")

    def done(product, failure):
        products.append((product, failure))

    disk.begin(WriteShard(folder, "server-0", (slice_of(1, 0),), RUN, 1), done)
    disk.begin(ReadManifest(folder), done)
    disk.begin(Sweep("/elsewhere"), done)
    disk.begin(Sweep(folder), done)
    disk.close(30.0)
    assert not disk._thread.is_alive()
    first, second, third, last = products
    assert isinstance(first[0], FileRecord) and first[1] == ""
    assert second[0] is None and "is not a checkpoint" in second[1]
    assert "is outside" in third[1] and last == (None, "")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_was_never_used_has_no_thread_to_end():
    ThreadedDisk().close(1.0)


def test_a_mistake_of_the_program_is_told_as_a_failure_too(tmp_path):
    product, failure = outcome(WriteShard(str(tmp_path / "step-1"), "server-0", (None,), RUN, 1), LOCKS, None)
    assert product is None and failure.startswith(f"a checkpoint in {tmp_path / 'step-1'} failed: AttributeError")


def test_a_manifest_that_is_there_already_needs_no_room(tmp_path, monkeypatch):
    """A scheduler that was killed had written it, and its successor begins the same work again."""
    save(tmp_path, 3)
    folder = folder_of(tmp_path, 3)
    found = formats.read_manifest(folder)
    before = (folder / NAME).stat()
    monkeypatch.setattr(folders, "write_manifest", lambda *_: pytest.fail("it is there"))
    perform(WriteManifest(str(folder), found))
    after = (folder / NAME).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    monkeypatch.undo()
    save(tmp_path, 3, value=4)
    assert restored(tmp_path, 3) == 4, "another attempt has other files"


@pytest.mark.parametrize("manifest", [None, '{"format": "kvdist checkpoint", '])
def test_a_checkpoint_that_is_removed_as_a_whole_leaves_nothing_but_what_others_have_put_there(tmp_path, manifest):
    save(tmp_path, 1)
    save(tmp_path, 2)
    if manifest is not None:
        (tmp_path / "step-2" / NAME).write_text(manifest)
    perform(Sweep(str(tmp_path / "step-2"), whole=True))
    assert not (tmp_path / "step-2").exists() and complete_steps(tmp_path) == [1]
    (tmp_path / "step-1" / "notes").write_bytes(b"x")
    perform(Sweep(str(tmp_path / "step-1"), whole=True))
    assert [path.name for path in (tmp_path / "step-1").iterdir()] == ["notes"]
    perform(Sweep(str(tmp_path / "step-3"), whole=True))
