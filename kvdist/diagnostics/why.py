"""``kvdist why FOLDER``: read the dumps of a job, and explain in a paragraph who was awaited, by whom, and why.

A dump has the last inputs and answers of a process (`ring`). The clocks of hosts differ, so the times of a dump are
shifted until no message arrives before it was sent. With ``--replay`` a new machine gets the inputs of each dump, and
must answer the same (`replay`).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvdist.config.paths import expanded
from kvdist.core.machine import ChildEnded, Event
from kvdist.diagnostics.record import Asked, Beginning, Entry, Explained, Observed, Reader, Received, Sent, Ticked
from kvdist.diagnostics.replay import Difference, replay
from kvdist.errors import KvdistError
from kvdist.nodes import NodeId, Role
from kvdist.protocol.messages import Roster, Stamp, Welcome
from kvdist.protocol.wire import decode, read_stamp

NAME = re.compile(r"(?:worker|server)-\d+|scheduler")
WAITING = re.compile(r"waiting (?P<seconds>[\d.]+) s for (?P<who>.*?) to (?P<deed>.*)", re.DOTALL)
INTERRUPTED = re.compile(r"ended by signal (?:1|2|15) |KeyboardInterrupt")
NOT_THE_USERS = re.compile(r"/kvdist/|/lib/python[^/]*/(?!site-packages/)|/site-packages/|<frozen ")
GAVE_UP = "(KVDIST_STALL_SHUTDOWN_S)"
"""Part of the failure of a worker that has waited for as long as the user allows."""
OF_A_WAIT = "a long wait"
"""The reason of a dump that was written while its process waited (`ring`)."""
LISTED_MAX = 4
"""The most processes that a sentence names."""


class NoDumps(KvdistError):
    """The folder has no dumps that can be read."""


@dataclass(frozen=True)
class Wait:
    """A wait of a process for others.

    Attributes:
        seconds: time that the wait had lasted.
        awaited: names of the awaited processes.
        deed: action that is awaited of them, such as ``push key 'fc1' (step 21)``.
        who: description of those awaited, if it names no process.
    """

    seconds: float
    awaited: tuple[str, ...]
    deed: str
    who: str = ""


@dataclass
class Dump:
    """The dump of a process."""

    about: Mapping[str, Any]
    beginning: Beginning
    entries: Sequence[Entry]
    ahead_s: float = 0.0
    """Seconds by which the clock of the process is ahead of the others'."""

    @property
    def process(self) -> str:
        """Name of the process, such as ``worker-1``."""
        return str(self.about["process"])

    @property
    def where(self) -> str:
        """Name of the process with its host and process id."""
        return f"{self.process} (host {self.about['host']}, pid {self.about['pid']})"

    def wall(self, now: float) -> float:
        """Convert a time of the process's clock to seconds since 1970."""
        return float(self.about["wall"]) + (now - float(self.about["monotonic"])) - self.ahead_s

    @property
    def ended_at(self) -> float:
        """Time at which the dump was written, in seconds since 1970."""
        return self.wall(float(self.about["monotonic"]))

    @property
    def explained(self) -> str:
        """Last explanation of a long wait; '' if there was none."""
        return next((entry.text for entry in reversed(self.entries) if isinstance(entry, Explained)), "")

    @cached_property
    def stamps(self) -> list[tuple[float, bool, Stamp]]:
        """(time, whether it was received, stamp) of every message."""
        found: list[tuple[float, bool, Stamp]] = []
        now = self.beginning.now
        for entry in self.entries:
            if isinstance(entry, Received | Observed | Ticked | Asked):
                now = entry.now
            if isinstance(entry, Received) or (isinstance(entry, Sent) and entry.envelope):
                found.append((now, isinstance(entry, Received), read_stamp(entry.envelope)[1]))
        return found

    def call(self) -> str:
        """Return the line of the program's main thread, such as ``train.py:12 in load``; '' if unknown."""
        calls = self.about["threads"].get("MainThread", [])
        own = [call for call in calls if not NOT_THE_USERS.search(call)]
        return next(iter(own), "")


# Reading.


def read_dumps(folder: Path) -> list[Dump]:
    """Return the dumps of the newest job in a folder, with aligned clocks.

    Raises:
        NoDumps: no dump can be read.
    """
    dumps, refused = [], []
    for path in sorted(folder.glob("*.dump")):
        try:
            dumps.append(read_dump(path))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            refused.append(f"{path.name} is not a dump of this version of kvdist ({type(error).__name__}: {error})")
    if not dumps:
        start = f"start the job with kvdist-launch --dump {folder}, or with KVDIST_DUMP={folder} in the environment"
        if not folder.is_dir():
            raise NoDumps(f"there is no folder {folder}; {start}")
        if not refused:
            raise NoDumps(
                f"{folder} has no dumps to explain. A job leaves them where it was started with --dump {folder} and has"
                " failed, was interrupted or waits long; a job that ended well leaves none"
            )
        raise NoDumps(f"{folder} has no dumps to explain: {'; '.join(refused)}. To have new ones, {start}")
    newest = max(dumps, key=lambda dump: dump.ended_at).beginning.job
    dumps = [dump for dump in dumps if dump.beginning.job == newest]
    align(dumps)
    return dumps


def read_dump(path: Path) -> Dump:
    """Read a dump.

    Raises:
        ValueError: the file is not a dump, or a dump of another version.
    """
    with open(path, encoding="utf-8") as lines:
        about = json.loads(next(lines, ""))
        reader = Reader()
        beginning = reader.value(about.pop("beginning"))
        return Dump(about, beginning, [reader.value(json.loads(line)) for line in lines])


def align(dumps: Sequence[Dump]) -> None:
    """Set `ahead_s` of each dump against the first dump, for other hosts and where messages went both ways."""
    first, *others = dumps
    for other in others:
        there, back = quickest(first, other), quickest(other, first)
        if there is not None and back is not None and first.about["host"] != other.about["host"]:
            other.ahead_s = (there - back) / 2


def quickest(source: Dump, target: Dump) -> float | None:
    """Return the shortest time that a message took, by the two clocks; None if no message is in both records."""
    sent = {
        (str(stamp.source), stamp.seq): source.wall(now)
        for now, came, stamp in source.stamps
        if not came and stamp.seq and _is_of(stamp, source)
    }
    took = [
        target.wall(now) - sent[str(stamp.source), stamp.seq]
        for now, came, stamp in target.stamps
        if came and (str(stamp.source), stamp.seq) in sent
    ]
    return min(took, default=None)


def _is_of(stamp: Stamp, dump: Dump) -> bool:
    return str(stamp.source) == dump.process


# Explaining.


@dataclass
class Story:
    """The explanation of a job, from all its dumps together."""

    dumps: Sequence[Dump]
    by_name: dict[str, Dump] = field(init=False)
    verdict: Mapping[str, Any] | None = field(init=False)
    """First failure of the job, the scheduler's if it has one; None if the job was interrupted, or only waits."""
    waits: dict[str, Wait] = field(init=False)

    def __post_init__(self) -> None:
        # Of a rank that was started again, the newest dump counts.
        self.by_name = {dump.process: dump for dump in sorted(self.dumps, key=lambda dump: dump.ended_at)}
        scheduler_first = sorted(self.dumps, key=lambda dump: (dump.process != "scheduler", dump.ended_at))
        failures = [dump.about["failure"] for dump in scheduler_first if dump.about["failure"]]
        has_given_up = any(GAVE_UP in failure["text"] for failure in failures)  # the launcher interrupts the others
        self.interrupted = not has_given_up and any(INTERRUPTED.search(dump.about["reason"]) for dump in self.dumps)
        self.verdict = None if self.interrupted or not failures else failures[0]
        self.waits = {dump.process: wait for dump in self.dumps if (wait := self._wait_of(dump))}

    def _wait_of(self, dump: Dump) -> Wait | None:
        texts = [dump.about["wait"], dump.explained]
        for text in reversed(texts) if self.interrupted else texts:
            found = WAITING.search(text)
            if found is not None:
                awaited = tuple(name for name in NAME.findall(found["who"]) if name != dump.process)
                return Wait(float(found["seconds"]), awaited, found["deed"], "" if awaited else found["who"])
        return None

    def paragraph(self) -> str:
        """Return the whole explanation."""
        verdict = self.verdict
        if verdict is None:
            sentences = self._of_a_wait()
        elif GAVE_UP in verdict["text"]:
            sentences = self._of_a_wait_that_was_given_up(verdict)
        elif verdict["type"] == "PeerLostError":
            sentences = self._of_a_loss(verdict)
        elif verdict["type"] == "DeadlockError":
            sentences = self._of_a_deadlock(verdict)
        else:
            sentences = iter([f"The job ended because of this: {verdict['text']}.", *self._of_a_wait(False)])
        return " ".join(sentences)

    def _of_a_loss(self, verdict: Mapping[str, Any]) -> Iterator[str]:
        node = verdict["node"]
        dump = self._end_of(node)
        yield f"The job ended at {clock(self._lost_at(verdict))} because of {self._where(node)}: {verdict['cause']}."
        if dump is not None:
            if dump.about["reason"] != verdict["cause"]:
                yield f"Its own reason: {dump.about['reason']}."
            if call := dump.call():
                yield f"Its main thread was at {call}."
        yield from self._last_word(node)
        yield from self._waits_for(node)
        if dump is None:
            yield from _advice(node, verdict["cause"], verdict["host"])
        others = [dump.process for dump in self.dumps if dump.process != node]
        if others:
            yield f"{listed(others)} ended only because of that."

    def _of_a_wait_that_was_given_up(self, verdict: Mapping[str, Any]) -> Iterator[str]:
        name = verdict.get("node") or "a worker"
        cause = verdict.get("cause", verdict["text"]).removeprefix(f"{name}: ")
        yield f"No process was lost; {name} gave up {cause}."
        yield from self._of_a_wait(False)

    def _of_a_deadlock(self, verdict: Mapping[str, Any]) -> Iterator[str]:
        _, _, rest = verdict["text"].partition("deadlock: ")
        yield f"No process was lost; workers waited for each other, and none could go on. {rest or verdict['text']}."
        named = [self.by_name[name] for name in dict.fromkeys(NAME.findall(verdict["text"])) if name in self.by_name]
        places = [f"{dump.process} at {call}" for dump in named if (call := dump.call())]
        if places:
            yield f"They waited in these lines: {'; '.join(places)}."

    def _of_a_wait(self, alone: bool = True) -> Iterator[str]:
        if alone:
            reasons = "it was interrupted" if self.interrupted else "these dumps are of long waits"
            yield f"No process of this job was lost; {reasons}."
            if missing := self._missing():
                yield f"The cluster was never complete: {missing} had not registered with the scheduler."
                return
        party = self.awaited()
        nameless = {name: wait for name, wait in self.waits.items() if wait.who}
        if party is None and nameless:
            for name, wait in sorted(nameless.items()):
                yield f"{upper(name)} waited {wait.seconds:.1f} s for {wait.who} to {wait.deed}."
            return
        if party is None:
            yield "None of them had waited long for another (KVDIST_EXPLAIN_AFTER_S, 10 s unless set)."
            return
        name, in_cycle = party
        if in_cycle:
            yield f"They waited for each other in a circle that {name} is part of, so that none could go on."
            yield self._sentence([name], self.waits[name])
        else:
            yield f"Everybody waited for {self._where(name)}."
        yield from self._waits_for(name)
        dump = self.by_name.get(name)
        if dump is None:
            yield from self._last_word(name)
            yield f"{name} has written no dump, so it waited for nobody. See what it does: {STACK_ADVICE}."
        elif not in_cycle and (call := dump.call()):
            yield f"{upper(name)} itself waited for nobody: its main thread was at {call}."

    def _missing(self) -> str:
        """Return who had not registered, if the cluster was never complete; '' if it was, or if that is unknown."""
        dump = self.by_name.get("scheduler")
        if dump is None or dump.beginning.config is None or any(one.about["dropped"] for one in self.dumps):
            return ""
        said = [entry for one in self.dumps for entry in one.entries if isinstance(entry, Received | Sent)]
        if any(read_stamp(entry.envelope)[0].message is Roster for entry in said if entry.envelope):
            return ""  # a worker may have received the roster after the scheduler had written its dump
        sent = [entry for entry in dump.entries if isinstance(entry, Sent) and entry.envelope]
        told = [(entry.to.node.role, decode([entry.envelope, entry.header]).message) for entry in sent]
        welcomed = {(role, message.rank) for role, message in told if isinstance(message, Welcome)}
        sizes = {Role.SERVER: dump.beginning.config.num_servers, Role.WORKER: dump.beginning.config.num_workers}
        missing = [(role, rank) for role, size in sizes.items() for rank in range(size) if (role, rank) not in welcomed]
        return listed(str(NodeId(*one)) for one in missing) if missing else ""

    def awaited(self) -> tuple[str, bool] | None:
        """Return the process at the end of most chains of waits, or in a circle of waits; and whether in a circle."""
        ends: dict[str, int] = defaultdict(int)
        for name in self.waits:
            seen = [name]
            while (wait := self.waits.get(seen[-1])) is not None and wait.awaited:
                after = min(wait.awaited, key=lambda one: (one in self.waits, one))
                if after in seen:
                    return after, True
                seen.append(after)
            if len(seen) > 1:
                ends[seen[-1]] += 1
        return (max(ends, key=lambda name: ends[name]), False) if ends else None

    def _waits_for(self, name: str) -> Iterator[str]:
        """Explain who waited for a process, then who waited for those waiters, and so on."""
        reached, level = {name}, {name}
        while level:
            groups: dict[Wait, list[str]] = defaultdict(list)
            for waiter, wait in self.waits.items():
                if waiter not in reached and level & set(wait.awaited):
                    groups[Wait(0.0, wait.awaited, wait.deed)].append(waiter)
            for wait, waiters in groups.items():
                yield self._sentence(waiters, wait)
            level = {waiter for waiters in groups.values() for waiter in waiters}
            reached |= level

    def _sentence(self, waiters: Sequence[str], wait: Wait) -> str:
        """Say who waited for whom, with the longest time that any of these processes had waited."""
        seconds = max(self.waits[waiter].seconds for waiter in waiters)
        since = f" {seconds:.1f} s" if seconds >= 0.1 else ""
        return f"{upper(listed(waiters))} waited{since} for {listed(wait.awaited)} to {wait.deed}."

    def _end_of(self, name: str) -> Dump | None:
        """Return the dump that a process wrote at its end; None if it has only the dump of a wait, which may be old."""
        dump = self.by_name.get(name)
        return None if dump is None or dump.about["reason"] == OF_A_WAIT else dump

    def _lost_at(self, verdict: Mapping[str, Any]) -> float:
        """Return when a process ended, by observers or by its dump; else when the first process ended because of it."""
        name = verdict["node"]
        seen = [
            dump.wall(entry.now)
            for dump in self.dumps
            for entry in dump.entries
            if isinstance(entry, Observed) and _is_end_of(name, entry.event)
        ]
        if not seen and (own := self._end_of(name)) is not None:
            return own.ended_at
        ended = (dump.ended_at for dump in self.dumps if verdict["text"] in dump.about["reason"])
        return max(seen, default=0.0) or min(ended)

    def _last_word(self, name: str) -> Iterator[str]:
        """Explain when a process was last heard, and by whom."""
        heard = [
            (dump.wall(now), dump.process, stamp.step)
            for dump in self.dumps
            for now, came, stamp in dump.stamps
            if came and str(stamp.source) == name
        ]
        if heard:
            when, who, step = max(heard)
            in_step = f", in step {step}" if step and name.startswith("worker") else ""
            yield f"It was last heard of at {clock(when)}, by {who}{in_step}."

    def _where(self, name: str) -> str:
        dump = self.by_name.get(name)
        if dump is not None:
            return dump.where
        for failure in (dump.about["failure"] for dump in self.dumps):
            found = re.search(rf"{name} \(host [^)]*\)", failure["text"]) if failure else None
            if found:
                return found[0]
        return name


STACK_ADVICE = "py-spy dump --pid PID shows its calls"


def _is_end_of(name: str, event: Event) -> bool:
    return isinstance(event, ChildEnded) and str(event.node) == name and not event.clean


def _advice(name: str, cause: str, host: str) -> Iterator[str]:
    """Advise where to look for the end of a process that wrote no dump."""
    if "SIGKILL" in cause:
        on = f" on {host}" if host else ""
        yield f"Signal 9 often comes from the kernel when memory is short: see dmesg{on}."
    else:
        yield f"{name} has written no dump of its end; its last lines of output may say more."


def upper(text: str) -> str:
    """Begin a text with a capital, unless it begins with the name of a process."""
    return text if NAME.match(text) else text[:1].upper() + text[1:]


def listed(names: Iterable[str]) -> str:
    """Join names, as in ``worker-0, worker-1 and 3 more``."""
    known = sorted(dict.fromkeys(names))
    shown = known[:LISTED_MAX] + ([f"{len(known) - LISTED_MAX} more"] if len(known) > LISTED_MAX else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def clock(wall: float) -> str:
    """Format a time of day, with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(wall)) + f".{int(wall % 1 * 1000):03d}"


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist why``, with its function as `command`."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder given to kvdist-launch --dump, or KVDIST_DUMP")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="run the recorded messages through kvdist again and show the first difference, for a bug report",
    )
    parser.set_defaults(command=_answer)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    folder = Path(expanded(options.folder))
    return compared(folder) if options.replay else (explained(folder), 0)


def explained(folder: Path) -> str:
    """Return the paragraph about the newest job whose dumps are in a folder.

    Raises:
        NoDumps: the folder has no dumps.
    """
    return Story(read_dumps(folder)).paragraph()


def compared(folder: Path) -> tuple[str, int]:
    """Replay each dump. Returns a line for each, with its first difference, and 1 if any has a difference, else 0.

    Raises:
        NoDumps: the folder has no dumps.
    """
    dumps = read_dumps(folder)
    wrong = [_difference(dump) for dump in dumps]
    lines = [
        f"{dump.where}: {said or f'{len(dump.entries)} events, and the same answers'}"
        for dump, said in zip(dumps, wrong, strict=True)
    ]
    return "\n".join(lines), int(any(wrong))


def _difference(dump: Dump) -> str:
    dropped = dump.about["dropped"]
    if dropped:
        return f"its first {dropped} events are gone; for a replay set KVDIST_DUMP_EVENTS above {len(dump.entries)}"
    outcome = replay(dump.beginning, dump.entries)
    if not isinstance(outcome, Difference):
        return ""
    return (
        f"other answers to input {outcome.number}, {outcome.told}: recorded is {outcome.recorded}, replayed"
        f" {outcome.replayed}"
    )
