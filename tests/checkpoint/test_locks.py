"""One job at a time has a folder: who is alive keeps it, who is gone does not, and strangers' files are no locks."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from errno import ENOLCK, ENOSYS, EOPNOTSUPP

import pytest

from kvdist.checkpoint import locks as module
from kvdist.checkpoint.locks import NAME, Locks, require_run
from kvdist.config.processes import this_process
from kvdist.errors import CheckpointError

HOLDER = """
import sys
from pathlib import Path
from kvdist.checkpoint.locks import Locks
print(Locks().take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a folder until it is killed, or its input ends."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.run = process.stdout.readline().strip()
        yield process
        process.kill()


def test_a_lock_says_who_has_it_and_goes_away_with_the_folders_made_for_it(tmp_path):
    locks, others = Locks(), Locks()
    folder = tmp_path / "a" / "run"
    run = locks.take(folder)
    said = json.loads((folder / NAME).read_text())
    assert (said["pid"], said["run"], said["host"]) == (os.getpid(), run, os.uname().nodename)
    assert others.take(folder) == run == locks.take(folder), "it is this process's"
    require_run(folder, run)
    locks.close()
    assert (folder / NAME).exists(), "another store of this process still saves there"
    others.release(folder)
    assert not (tmp_path / "a").exists()


def test_who_takes_the_place_of_a_process_has_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RUN", [])
    mine = Locks()
    assert mine.take(tmp_path / "saved", "0123456789abcdef") == "0123456789abcdef"
    assert json.loads((tmp_path / "saved" / NAME).read_text())["run"] == "0123456789abcdef"
    mine.close()


def test_what_lies_in_a_folder_stays_when_its_lock_goes(tmp_path):
    locks = Locks()
    locks.take(tmp_path / "run")
    (tmp_path / "run" / "step-1").mkdir()
    locks.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-1"]


def test_a_process_that_lives_keeps_its_lock_and_one_that_was_killed_does_not(tmp_path, holder, caplog):
    locks = Locks()
    with pytest.raises(CheckpointError, match=rf"another job saves into .*process {holder.pid} on host .*{holder.run}"):
        locks.take(tmp_path / "run")
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    assert json.loads((tmp_path / "run" / NAME).read_text())["run"] == holder.run, "it is left over"
    with caplog.at_level(logging.WARNING, "kvdist"):
        assert locks.take(tmp_path / "run") != holder.run
    assert f"process {holder.pid} " in caplog.text and "taken over" in caplog.text
    locks.close()


def test_a_lock_of_a_host_that_was_started_anew_is_left_over(tmp_path, holder):
    holder.kill()
    holder.wait(60)
    path = tmp_path / "run" / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "before"}))
    locks = Locks()
    locks.take(tmp_path / "run")
    locks.close()


def elsewhere(word):
    """The word of a process of another container, which counts processes anew."""
    return f"{word.rpartition('.')[0]}.1"


@pytest.mark.parametrize("boots", [("", ""), ("", "a"), ("a", "")])
def test_a_kernel_that_does_not_say_which_it_is_matches_no_other(tmp_path, monkeypatch, holder, boots):
    ours, theirs = boots
    holder.kill()
    holder.wait(60)
    monkeypatch.setattr(module, "boot_id", lambda: ours)
    path = tmp_path / "run" / NAME
    said = {**json.loads(path.read_text()), "boot": theirs}
    for other in ({"host": "d2"}, {"process": elsewhere(said["process"])}, {"process": None}):
        path.write_text(json.dumps({**said, **other}))
        with pytest.raises(CheckpointError, match="another job saves into"):
            Locks().take(tmp_path / "run")
    path.write_text(json.dumps(said))
    locks = Locks()
    locks.take(tmp_path / "run")
    locks.close()


def test_without_flock_a_number_says_nothing_of_who_had_it_before(tmp_path, monkeypatch, holder):
    def flock(*_):
        raise OSError(ENOLCK, os.strerror(ENOLCK))

    holder.kill()
    holder.wait(60)
    monkeypatch.setattr(module.fcntl, "flock", flock)
    path = tmp_path / "run" / NAME
    said = json.loads(path.read_text())
    pid, begin, namespace = this_process().split(".")
    own_number_elsewhere = {"pid": int(pid), "process": elsewhere(this_process())}
    path.write_text(json.dumps({**said, **own_number_elsewhere}))
    with pytest.raises(CheckpointError, match="another job saves into"):
        Locks().take(tmp_path / "run")
    number_of_this_process = {"pid": int(pid), "process": f"{pid}.{int(begin) - 1}.{namespace}"}
    path.write_text(json.dumps({**said, **number_of_this_process}))
    locks = Locks()
    locks.take(tmp_path / "run")
    locks.close()


@pytest.mark.parametrize("number", [ENOLCK, ENOSYS, EOPNOTSUPP])
def test_without_flock_what_the_file_says_counts(tmp_path, monkeypatch, holder, caplog, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl, "flock", flock)
    monkeypatch.setattr(module, "_WARNED", [])
    path = tmp_path / "run" / NAME
    with caplog.at_level(logging.WARNING, "kvdist"):
        with pytest.raises(CheckpointError, match=f"another job saves into .*process {holder.pid} "):
            Locks().take(tmp_path / "run")
        holder.kill()
        holder.wait(60)
        said = json.loads(path.read_text())
        path.write_text(json.dumps({**said, "host": "d2"}))
        with pytest.raises(CheckpointError, match="on host d2"):
            Locks().take(tmp_path / "run")
        path.write_text(json.dumps(said))
        locks = Locks()
        run = locks.take(tmp_path / "run")
        locks.take(tmp_path / "new")
    assert json.loads(path.read_text())["run"] == run != holder.run
    assert caplog.text.count("does not support flock") == 1
    locks.close()
    assert not path.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("boots", [("a", "b"), ("", "b"), ("a", ""), ("", "")])
def test_without_flock_a_clone_with_the_same_name_keeps_its_lock(tmp_path, monkeypatch, holder, boots):
    ours, theirs = boots
    holder.kill()
    holder.wait(60)  # as seen from here: the clone has a process of that number, which lives
    monkeypatch.setattr(module, "flocked", lambda *_: False)
    monkeypatch.setattr(module, "boot_id", lambda: ours)
    path = tmp_path / "run" / NAME
    said = {**json.loads(path.read_text()), "boot": theirs}
    path.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"saves into .* If it does not run any more, remove {path}") as refusal:
        Locks().take(tmp_path / "run")
    assert ("another host of that name" in str(refusal.value)) is (ours != theirs)
    assert json.loads(path.read_text()) == said


def test_another_error_of_flock_is_one(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        Locks().take(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_error_beside_a_lock_that_others_have_made_anew_leaves_theirs(tmp_path, monkeypatch):
    path = tmp_path / "run" / NAME

    def flock(*_):
        path.unlink()
        path.write_text("theirs")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        Locks().take(tmp_path / "run")
    assert path.read_text() == "theirs"


def test_what_is_taken_twice_by_two_paths_is_released_twice(tmp_path):
    locks = Locks()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    locks.take(tmp_path / "a")
    locks.take(tmp_path / "link")
    locks.release(tmp_path / "link")
    assert (tmp_path / "a" / NAME).exists(), "the first one has it"
    locks.release(tmp_path / "a")
    assert not (tmp_path / "a" / NAME).exists()


def test_an_owner_on_another_host_may_live(tmp_path, holder):
    holder.kill()
    holder.wait(60)
    path = tmp_path / "run" / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "elsewhere", "host": "d2"}))
    with pytest.raises(CheckpointError, match=f"on host d2, .* If it does not run any more, remove {path}"):
        Locks().take(tmp_path / "run")


def test_a_child_that_was_forked_does_not_keep_its_parents_lock(tmp_path):
    locks = Locks()
    run = locks.take(tmp_path / "run")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has let go
        os._exit(0)
    os.close(reader)
    locks.close()
    assert not (tmp_path / "run").exists()
    other = Locks()
    assert other.take(tmp_path / "run") == run
    other.close()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_somebody_removed_is_made_again(tmp_path):
    locks = Locks()
    run = locks.take(tmp_path)
    (tmp_path / NAME).unlink()
    assert locks.take(tmp_path) == run and json.loads((tmp_path / NAME).read_text())["run"] == run
    locks.close()


class Clock:
    """The module's clock, which only goes while it sleeps; its time of day is right."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.time = time.time
        self.at: dict[int, object] = {}
        """Number of a pause → what happens in it."""
        self.pauses = 0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses += 1
        self.now += seconds
        self.at.get(self.pauses, lambda: None)()


@pytest.mark.parametrize("changed", [1, 1 << 33], ids=["before", "after"])
def test_an_empty_lock_is_left_over_when_it_has_been_seen_for_long(tmp_path, monkeypatch, changed):
    clock = Clock(monkeypatch)
    (tmp_path / NAME).touch()
    os.utime(tmp_path / NAME, (changed, changed))
    locks = Locks()
    locks.take(tmp_path)
    assert 2.5 < clock.now < 3
    locks.close()


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_lock_that_is_being_made_is_not_left_over_whatever_the_clock_of_its_file_system(
    tmp_path, monkeypatch, has_flock
):
    path = tmp_path / NAME
    if not has_flock:
        monkeypatch.setattr(module, "flocked", lambda *_: False)
    clock = Clock(monkeypatch)
    path.touch()
    os.utime(path, (1, 1))
    clock.at[40] = lambda: path.write_text(json.dumps({"format": module.FORMAT, "host": "d2", "boot": "d2", "pid": 1}))
    with pytest.raises(CheckpointError, match=r"another job saves into .* on host d2"):
        Locks().take(tmp_path)


def test_a_lock_that_others_make_anew_has_not_been_empty_for_long(tmp_path, monkeypatch):
    path = tmp_path / NAME
    clock = Clock(monkeypatch)
    path.touch()
    os.utime(path, (1, 1))
    clock.at[40] = lambda: os.utime(path, (2, 2))
    locks = Locks()
    locks.take(tmp_path)
    assert clock.pauses > 80
    locks.close()


@pytest.mark.parametrize("what", ["text", "json", "link", "pipe", "folder"])
def test_a_file_of_others_is_no_lock(tmp_path, monkeypatch, what):
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    path = tmp_path / NAME
    match what:
        case "text":
            path.write_text("mine")
        case "json":
            path.write_text('{"format": "another"}')
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match=f"{NAME} is (not a lock|not a regular file|a symbolic link)"):
        Locks().take(tmp_path)
    assert not (tmp_path / "elsewhere").exists() and path.is_symlink() is (what == "link")


def test_a_folder_that_another_host_sees_elsewhere_is_told_from_the_jobs(tmp_path):
    locks = Locks()
    locks.take(tmp_path)
    for folder, found in ((tmp_path, "another"), (tmp_path / "nothing", "no")):
        with pytest.raises(CheckpointError, match=f"sees {found} {NAME} in it.* a shared file system"):
            require_run(folder, "0" * 16, wait_s=0.0)
    locks.close()
