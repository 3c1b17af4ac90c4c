"""The file of a scheduler's journal: what is in it, what a new process makes of it, and when it is no use."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvdist.checkpoint.snapshot import LockFolder
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.reliable import Reliable
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.errors import ConfigError
from kvdist.nodes import UNRANKED, Member, NodeId, Role, worker
from kvdist.protocol import messages as msg
from kvdist.protocol.wire import encode
from kvdist.runtime import journal as journals
from kvdist.runtime.journal import LENGTH_MAX, RECORD, Journal, State, record_of, sweep, unpickled
from kvdist.runtime.node import Node
from kvdist.transport.base import Arrived
from kvdist.version import __version__
from tests.runtime.test_node_names import JOB as CONNECTED_JOB
from tests.runtime.test_node_names import Scripted, heard, hello, message

JOB = ClusterConfig(Role.SCHEDULER, "host-s", 1, 2, 1, job="job", on_loss="continue")


class Written:
    """A scheduler with a journal, as a node has it.

    Args:
        path: the file.
        config: of the scheduler.
    """

    def __init__(self, path: Path, config: ClusterConfig = JOB) -> None:
        self.path = path
        self.machine = Scheduler(config, 0.0, 7)
        self.reliable = Reliable(self.machine, config.job_tag)
        self.journal = Journal(path, config)
        self.journal.begin(self.reliable, 0.0)
        self.now = 0.0

    def hears(self, source: Member, message: msg.Message, seq: int = 0, epoch: int = 0) -> list[fx.Effect]:
        """A message comes."""
        self.now += 0.5
        packet = msg.Packet(msg.Stamp(self.reliable.job, epoch, source, 0, seq, 0, 0), message)
        effects = self.reliable.receive(packet, self.now)
        self.journal.received(self.now, encode(packet))
        return effects

    def sees(self, event: fx.Event) -> list[fx.Effect]:
        """Something else happens."""
        self.now += 0.5
        effects = self.reliable.observe(event, self.now)
        self.journal.observed(self.now, event)
        return effects

    def forms(self) -> Written:
        """All processes come."""
        for token, (role, rank) in enumerate([(Role.SERVER, 0), (Role.WORKER, 0), (Role.WORKER, 1)], 90):
            stranger = Member(NodeId(role, UNRANKED), token)
            self.hears(stranger, msg.Hello(rank, f"host-{token}", token, "", 2, 1, __version__))
        return self

    def is_killed(self) -> None:
        """Its process ends without a word."""
        self.journal.close(is_over=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def written(path: Path) -> Written:
    return Written(path).forms()


def read(path: Path, config: ClusterConfig = JOB) -> tuple[State, int]:
    """What a new process finds: the scheduler, and how many inputs it has replayed."""
    journal = Journal(path, config)
    state, _ = journal.read()
    journal.close(is_over=False)
    return state, journal.entries


def state_of(reliable: Reliable) -> str:
    """All that a scheduler knows, so that two can be compared."""
    return repr(unpickled(record_of(reliable)[RECORD.size :]).machine.membership.__dict__) + repr(reliable.links)


def test_a_new_process_is_what_the_last_one_was_at_the_time_of_its_last_input(written: Written) -> None:
    written.is_killed()
    journal = Journal(written.path, JOB)
    assert not journal.is_new
    state, _ = journal.read()
    assert state_of(state.reliable) == state_of(written.reliable)
    assert state.now == written.now and journal.entries == 3
    assert state.scheduler.membership.is_complete


def test_the_state_takes_the_place_of_what_was_before_it_and_the_file_stays_small(written: Written) -> None:
    member = Member(worker(0), written.machine.membership.awaited[worker(0)].incarnation)
    with mock.patch.object(journals, "ENTRIES_MAX", 50):
        for _ in range(1000):
            written.hears(member, msg.Alive())
            if written.journal.is_due(written.now):
                written.journal.write_state(written.now)
    written.is_killed()
    state, entries = read(written.path)
    assert entries == 1003 % 50
    assert state_of(state.reliable) == state_of(written.reliable)
    assert written.path.stat().st_size < 30_000
    assert not written.path.with_name("journal.new").exists()


def test_the_file_stays_small_also_if_no_process_lives_until_it_is_due(written: Written) -> None:
    member = Member(worker(0), written.machine.membership.awaited[worker(0)].incarnation)
    with mock.patch.object(journals, "ENTRIES_MAX", 50):
        for _ in range(10):
            for _ in range(30):
                written.hears(member, msg.Alive())
            if written.journal.is_due(written.now):
                written.journal.write_state(written.now)
            written.is_killed()
            written.journal = Journal(written.path, JOB)
            state, _ = written.journal.read()
            written.reliable, written.machine = state.reliable, state.scheduler
            assert written.journal.entries < 80


def test_what_is_beside_it_where_it_is_written_anew_is_not_written_to(written: Written, tmp_path: Path) -> None:
    """A process was killed while it wrote a state, or somebody has put a file there."""
    aside, mine = written.path.with_name("journal.new"), tmp_path / "mine"
    mine.write_text("a text of mine")
    for put in (mine.chmod, aside.hardlink_to, aside.symlink_to, os.mkfifo):
        put(0o666 if put == mine.chmod else aside if put == os.mkfifo else mine)
        written.journal.write_state(written.now)
        assert not aside.exists() and written.path.stat().st_mode & 0o777 == 0o600
    assert mine.read_text() == "a text of mine"
    aside.write_bytes(b"half a state")
    written.journal.close(is_over=True)
    assert not aside.exists()


def test_an_entry_that_was_not_written_to_its_end_was_never_acted_on(written: Written) -> None:
    whole = written.path.read_bytes()
    written.hears(Member(worker(0), written.machine.membership.awaited[worker(0)].incarnation), msg.Alive())
    longer = written.path.read_bytes()
    written.is_killed()
    for end in range(len(whole), len(longer)):
        written.path.write_bytes(longer[:end])
        journal = Journal(written.path, JOB)
        journal.read()
        journal.ticked(99.0)
        journal.close(is_over=False)
        assert read(written.path)[1] == 4, "what comes after it is written where it was torn"


def test_works_with_the_disk_that_had_not_ended_are_known_and_those_that_had_are_not(path: Path) -> None:
    written = Written(path, replace(JOB, snapshots="/data/run")).forms()
    first, second = fx.Persist("one", LockFolder("/a")), fx.Persist("two", LockFolder("/b"))
    written.journal.began(first)
    written.journal.began(second)
    written.journal.write_state(written.now)
    written.sees(fx.Persisted("one", "run"))
    written.is_killed()
    state, _ = read(path, replace(JOB, snapshots="/data/run"))
    assert [(work.token, work.work.folder) for work in state.works.values()] == [("two", "/b")]
    assert state.begun == 2


def test_what_the_last_input_led_to_and_perhaps_was_not_done_is_done_again(path: Path) -> None:
    written = Written(path, replace(JOB, supervised=True)).forms()
    lost = written.machine.membership.awaited[worker(1)]
    effects = written.sees(fx.ChildEnded(lost.node, "killed by signal 9 (SIGKILL)", clean=False))
    written.is_killed()
    _, again = Journal(path, replace(JOB, supervised=True)).read()
    logs = [effect for effect in effects if isinstance(effect, fx.Log)]
    assert logs and [effect for effect in again if isinstance(effect, fx.Log)] == logs


def test_only_its_owner_may_read_it_and_it_has_no_secret_and_no_values(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"nobody may know this: 0123456789abcdef")
    secret.chmod(0o600)
    config = replace(JOB, secret_file=str(secret))
    written = Written(tmp_path / "journal", config).forms()
    member = Member(worker(0), written.machine.membership.awaited[worker(0)].incarnation)
    packet = msg.Packet(msg.Stamp(written.reliable.job, 1, member, 0, 1, 0, 0), msg.Command(1, 7, "do what is said"))
    written.hears(member, packet.message, 1)
    envelope, header = encode(packet)
    written.journal.received(9.0, [envelope, header, b"weights " * 100])
    content = (tmp_path / "journal").read_bytes()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    assert secret.read_bytes() not in content and b"weights" not in content
    assert b"do what is said" in content, "bodies of commands are kept"


def test_it_goes_with_the_job(written: Written) -> None:
    written.journal.close(is_over=True)
    assert not written.path.exists()


def test_one_process_at_a_time_has_it(written: Written) -> None:
    for _ in range(2):
        with mock.patch.object(journals, "LOCK_WAIT_S", 0.1), pytest.raises(ConfigError, match="scheduler has open"):
            Journal(written.path, JOB)
        written.journal.write_state(written.now)  # into another file, of the same name
    written.is_killed()
    Journal(written.path, JOB).read()


def test_who_waits_for_it_gets_the_newest(written: Written) -> None:
    """The last process writes its state anew while another waits, and is killed."""

    def sleeps(_: float) -> None:
        if written.journal._descriptor >= 0:
            written.journal.write_state(written.now)
            written.is_killed()
            written.journal._descriptor = -1

    with mock.patch.object(time, "sleep", sleeps):
        journal = Journal(written.path, JOB)
    assert os.path.samestat(os.fstat(journal._descriptor), written.path.stat())
    journal.read()
    assert journal.entries == 0


def truncated(content: bytes) -> bytes:
    return content[: content.index(b"\n") + 1]


def damaged(content: bytes) -> bytes:
    middle = content.index(b"\n") + 100
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def cut_in_the_middle(content: bytes) -> bytes:
    middle = content.index(b"\n") + 100
    return content[:middle] + content[middle + 50 :]


def cut_in_the_state(content: bytes) -> bytes:
    return content[: content.index(b"\n") + 100]


def with_another_length(number: int) -> Callable[[bytes], bytes]:
    """A bit has changed in the length of a record, which now ends long after the file."""

    def of(content: bytes) -> bytes:
        start = content.index(b"\n") + 1
        for _ in range(number):
            start += RECORD.size + RECORD.unpack_from(content, start)[0]
        return content[: start + 3] + bytes([content[start + 3] ^ 0x40]) + content[start + 4 :]

    return of


def of_other(name: str, value: object) -> Callable[[bytes], bytes]:
    def of(content: bytes) -> bytes:
        heading, rest = content.split(b"\n", 1)
        return json.dumps({**json.loads(heading), name: value}).encode() + b"\n" + rest

    return of


def that_runs_code(content: bytes) -> bytes:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/kvdist-was-here",)

    evil = pickle.dumps(Evil())
    return truncated(content) + RECORD.pack(len(evil), len(evil) ^ LENGTH_MAX, zlib.crc32(evil)) + evil


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda content: b"a text of mine\n", "no journal of kvdist: name a file for the scheduler alone"),
        (lambda content: b"\0" * 5000, "no journal of kvdist"),
        (truncated, "has no state: the scheduler could not write it any more"),
        (damaged, "is damaged at byte"),
        (cut_in_the_middle, "is damaged at byte"),
        (cut_in_the_state, "is damaged at byte"),
        (with_another_length(0), "is damaged at byte"),
        (with_another_length(1), "is damaged at byte"),
        (of_other("job", 5), "is of another job than 'job', which this is"),
        (of_other("kvdist", "0.1"), "is of kvdist '0.1', and this is '.*': install the version"),
        (of_other("host", "elsewhere"), "is of host 'elsewhere', and this is '.*': a scheduler can only take"),
        (that_runs_code, "cannot be followed: the state of 0 entries gives ValueError: it names .*system"),
    ],
)
def test_what_is_no_use_is_refused_and_stays_as_it_is(written: Written, changed: Any, said: str) -> None:
    written.is_killed()
    content = changed(written.path.read_bytes())
    written.path.write_bytes(content)
    journal = Journal(written.path, JOB)
    with pytest.raises(ConfigError, match=said):
        journal.read()
    assert written.path.read_bytes() == content
    assert not Path("/tmp/kvdist-was-here").exists()


def test_other_settings_are_refused(written: Written) -> None:
    written.is_killed()
    with pytest.raises(ConfigError, match="is of a scheduler with num_workers=2, and this one has 3"):
        Journal(written.path, replace(JOB, num_workers=3)).read()


def test_a_file_that_others_can_write_is_refused(written: Written) -> None:
    written.is_killed()
    written.path.chmod(0o620)
    with pytest.raises(ConfigError, match=r"with mode 0620: a journal must belong to the user who runs the scheduler"):
        Journal(written.path, JOB)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_not_a_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(ConfigError, match="which (is not a file|cannot be opened)"):
        Journal(path, JOB)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KVDIST_JOURNAL is '.*/nowhere/journal', which cannot be opened \(No such"):
        Journal(tmp_path / "nowhere" / "journal", JOB)


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.runtime.test_journal import JOB, Written
from kvdist.core.machine import ProcessStarted
from kvdist.nodes import worker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written = Written(Path(sys.argv[1])).forms()
room = written.path.stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
for number in range(20):
    written.sees(ProcessStarted(worker(0), "host-" + str(number), number))
print("first", written.path.read_bytes().count(b"\\n"), written.path.stat().st_size, flush=True)
written.now += 60.0
assert written.journal.is_due(written.now)
written.journal.write_state(written.now)
print("no room", written.path.stat().st_size, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
written.now += 60.0
written.journal.write_state(written.now)
written.sees(ProcessStarted(worker(1), "the last", 1))
written.is_killed()
"""


def test_where_there_is_no_room_the_job_goes_on_and_who_would_come_back_meanwhile_is_refused(path: Path) -> None:
    """The limit of a process for the size of its files stands for a full disk: writes fail in part, and then whole."""
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[1] == "1" and first[2] == second[2], "the heading alone is left"
    assert done.stderr.count("(File too large): until it can, a loss of the scheduler ends the job") == 1
    assert "is written again" in done.stderr
    state, entries = read(path)
    assert entries == 1 and "the last" in str(state.scheduler.membership._started_on)


def test_a_journal_that_cannot_be_written_anew_stays_whole_and_grows(written: Written) -> None:
    aside = written.path.with_name("journal.new")
    aside.mkdir()
    written.journal.write_state(written.now)
    written.sees(fx.ProcessStarted(worker(0), "later", 1))
    written.is_killed()
    assert read(written.path)[1] == 4, "nothing was lost"
    assert aside.is_dir(), "the fault happened"


def test_journals_of_jobs_that_are_long_over_are_removed(tmp_path: Path) -> None:
    old, young, held = (tmp_path / f"journal-{name}" for name in ("old", "young", "held"))
    for one in (old, young):
        one.write_bytes(b"")
    before = time.time() - 2 * journals.STALE_S
    keeps = Journal(held, JOB)
    for one in (old, held):
        os.utime(one, (before, before))
    own = Journal(tmp_path / "journal-own", JOB)
    sweep(own.path)
    assert [one.exists() for one in (old, young, held, own.path)] == [False, True, True, True]
    keeps.close(is_over=True)


def test_methods_and_messages_and_arrays_come_back_as_they_were(written: Written) -> None:
    for one in (written.machine.resume, msg.Join(3, 0, (1, 2)), written.machine.keys):
        again = unpickled(record_of(one)[RECORD.size :])
        assert type(again) is type(one)


@pytest.mark.parametrize(
    "content",
    [
        b"cthis\ns\n.",
        b"cos\nsystem\n.",
        b"ckvdist.diagnostics.record\nbase64\n.",
        b"cnumpy\nload\n.",
        b"cbuiltins\ngetattr\n.",
    ],
)
def test_only_what_a_scheduler_consists_of_is_found_and_no_module_is_imported_for_it(content: bytes) -> None:
    with pytest.raises((ValueError, AttributeError), match="of which no scheduler consists|has no attribute"):
        unpickled(content)
    assert "this" not in sys.modules


class Clock:
    """The time of a node."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def formed(path: Path, clock: Clock) -> Node:
    """A scheduler to which all have come, and which is told of processes that end."""
    config = replace(JOB, on_loss="fail", supervised=True)
    node = Node(Scheduler(config, clock.now, 7), Scripted(), CONNECTED_JOB, 10.0, clock)
    node.keep(Journal(path, config))
    if not node.is_revived:
        heard(node, hello(Role.SERVER, 0, None, "s0", 90))
        heard(node, hello(Role.WORKER, 0, None, "w0", 91), hello(Role.WORKER, 1, None, "w1", 92))
    assert isinstance(node.machine, Scheduler) and node.machine.membership.is_complete
    return node


def test_a_process_that_is_interrupted_before_it_has_written_an_input_says_nothing(path: Path) -> None:
    """Ctrl-C comes when the machine has reacted to a message: whoever has sent it must not hear that it arrived."""
    clock = Clock()
    node = formed(path, clock)
    (source,) = (member for member in node.reliable.links if member.node == worker(0))
    node.transport.events = [Arrived("w0", message(source, msg.Barrier(1, 0, "")), None)]
    node.transport.said.clear()
    with mock.patch.object(Journal, "received", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        node.run()
    assert node.reliable.links[source].received == 1 and node.transport.said == []
    again = formed(path, clock)
    assert again.is_revived and again.reliable.links[source].received == 0, "so that it is heard when it is repeated"
    again.finish()


def test_a_process_after_one_that_was_killed_as_it_ended_the_job_ends_it_too(path: Path) -> None:
    clock = Clock()
    node = formed(path, clock)
    node.post(fx.ChildEnded(worker(1), "killed by signal 9 (SIGKILL)", clean=False))
    node.turn(0.0)
    assert node.stopped and "worker-1" in str(node.failure), "it has told everybody, and halts"
    assert node.journal is not None
    node.journal.close(is_over=False)
    clock.now += 30.0
    again = formed(path, clock)
    assert not again.stopped, "perhaps not everybody has heard it"
    clock.now += again.machine.limits.farewell_s
    again.turn(0.0)
    assert again.stopped and str(again.failure) == str(node.failure)
    again.finish()
    assert not path.exists()


def test_the_time_while_there_was_no_scheduler_does_not_count(path: Path) -> None:
    clock = Clock()
    node = formed(path, clock)
    clock.now += 1.0
    node.turn(0.0)
    assert node.journal is not None
    node.journal.close(is_over=False)
    said_at = clock.now
    clock.now += 5000.0
    again = formed(path, clock)
    assert again.clock() <= said_at
    again.turn(0.0)
    assert again.machine.membership.is_complete and not again.stopped
    again.finish()


def test_no_file_stays_open_when_the_state_is_written_anew(written: Written) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        written.journal.write_state(written.now)
    assert len(os.listdir("/proc/self/fd")) == count
