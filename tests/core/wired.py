"""Machines wired back to back: what one transmits the other receives, in order, when the test says so. No network.

`Wired(...)` starts the processes; `settle()` delivers until nobody has anything more to say; `advance(seconds)` lets
time pass. Everything said is in `log`, one readable line a message. What is to be done with the disk waits in `works`,
until the test lets it be done: really, or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.locks import Locks
from kvdist.checkpoint.snapshot import EVERYTHING, DiskTask
from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.machine import (
    Bind,
    ChildEnded,
    CompleteKeys,
    CompleteRequest,
    Connect,
    Effect,
    Event,
    FailRequest,
    Halt,
    Log,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    Send,
    TellLauncher,
    Transmit,
)
from kvdist.core.reliable import ACK_DELAY_S, Reliable
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.commands import Handler
from kvdist.core.server.replica import ReplicatedServer
from kvdist.core.server.server import Server
from kvdist.core.worker.host_aggregation import HostAggregation
from kvdist.core.worker.requests import (
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Leave,
    LoadStore,
    Register,
    Request,
    Run,
    RunKind,
    RunPlan,
    SaveStore,
    TakePart,
    Transfer,
    make_plan,
)
from kvdist.core.worker.worker import Worker
from kvdist.dtypes import DType, from_name
from kvdist.kernels.interface import Device
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import HOST_MARK, Member, Role
from kvdist.optimizer.offload import arithmetic_on
from kvdist.optimizer.registry import create
from kvdist.protocol.arrays import Coded, views
from kvdist.protocol.messages import Configure, Flag, Message, Packet, SavedFile
from kvdist.protocol.wire import encode
from kvdist.runtime.io_thread import outcome
from kvdist.runtime.journal import RECORD, State, record_of, unpickled
from kvdist.version import __version__

LOCKS = Locks()

Array = npt.NDArray[Any]
JOB = 4711
NAN = math.nan
SERVER_DECIDES = (NAN, NAN, NAN)


@dataclass(frozen=True, eq=False)
class OpenWork:
    """A work that nobody has done yet."""

    who: str
    token: object
    work: DiskTask


class Wired:
    """A cluster of pure machines. Workers and servers are called ``worker-0``, ``server-1``, …, as they will be."""

    def __init__(
        self,
        num_workers: int = 2,
        num_servers: int = 1,
        limits: Limits | None = None,
        form: bool = True,
        bigarray_bound: int = 1_000_000,
        server_host: str = "host-{rank}",
        hosts: Sequence[str] = (),
        local_reduce: str = "auto",
        servers_on: str = "elsewhere",
        handlers: Mapping[int, Handler] | None = None,
        devices: Sequence[Device] = (),
        on_loss: str = "fail",
        scheduler_away_s: float | None = None,
        snapshots: str | None = None,
        min_workers: int | None = None,
        return_s: float | None = None,
        replicas: int = 0,
    ) -> None:
        self.devices = devices
        """Per server the GPU on which it computes; none for their hosts."""
        self.handlers = handlers or {}
        """What servers run when they are sent a command."""
        self.hosts = hosts
        """Per worker the host whose processes can share its memory."""
        self.servers_on = servers_on
        self.local_reduce = local_reduce
        self.now = 0.0
        self.server_host = server_host
        self.limits = limits or Limits()
        self.log: list[str] = []
        self.completed: dict[int, Any] = {}
        """Request → its result."""
        self.failed: dict[int, Exception] = {}
        self.answered: dict[int, dict[int, Exception | None]] = {}
        """Request → the indices of the keys that were answered alone, each with its error."""
        self.stopped: dict[str, Exception | None] = {}
        self.reports: list[str] = []
        self.told: list[str] = []
        """What the launcher has been told."""
        self.results: dict[int, dict[int | str, Array]] = {}
        """Request → per key the memory that takes the value."""
        self.infos: dict[int | str, KeyInfo] = {}
        self.wire: deque[tuple[str, str, Packet]] = deque()
        """(from, to, what), not delivered yet."""
        self.works: deque[OpenWork] = deque()
        """What is to be done with the disk."""
        self._addresses: dict[tuple[Role, int], str] = {(Role.SCHEDULER, 1): "scheduler"}
        self._next_request = 0
        self.config = config = ClusterConfig(
            Role.SCHEDULER,
            "host-s",
            1,
            num_workers,
            num_servers,
            bigarray_bound=bigarray_bound,
            on_loss=on_loss,
            scheduler_away_s=scheduler_away_s,
            snapshots=snapshots,
            min_workers=min_workers,
            return_s=return_s,
            replicas=replicas,
            limits=self.limits,
        )
        self.scheduler = Scheduler(config, 0.0)
        self.processes: dict[str, Reliable] = {"scheduler": Reliable(self.scheduler, JOB)}
        self.servers = [self._server(rank, num_workers, num_servers) for rank in range(num_servers)]
        self.workers = [self._worker(rank, num_workers, num_servers) for rank in range(num_workers)]
        if form:
            self.form()

    def form(self) -> None:
        """Let everybody join; the log starts anew."""
        for rank in range(len(self.workers)):
            self.ask(rank, Register)
        self.advance(0.0)
        self.log.clear()

    # Time and messages.

    def deliver(self, count: int = 1) -> None:
        """Deliver the oldest messages under way."""
        for _ in range(count):
            _source, to, packet = self.wire.popleft()
            if to not in self.stopped:
                self.carry_out(to, self.processes[to].receive(packet, self.now))

    def settle(self) -> None:
        """Deliver until nothing is under way."""
        while self.wire:
            self.deliver()

    def work(self, failure: str = "") -> DiskTask:
        """Do the oldest work that waits for the disk, or let it fail; returns it."""
        one = self.works.popleft()
        self.finish(one, failure)
        return one.work

    def finish(self, one: OpenWork, failure: str = "") -> None:
        """Do a work that was taken out of `works`; what comes of it is not delivered yet."""
        product, reason = (None, failure) if failure else outcome(one.work, LOCKS, None)
        self.observe(one.who, Persisted(one.token, product, reason))

    def settle_works(self, kind: type = object, failure: str = "") -> list[DiskTask]:
        """Deliver and do works until nothing is left; those of a kind fail if there is a `failure`."""
        done = []
        self.settle()
        while self.works:
            done.append(self.work(failure if isinstance(self.works[0].work, kind) else ""))
            self.settle()
        return done

    def lose(self) -> int:
        """What is under way is gone; returns how many messages that were."""
        count = len(self.wire)
        self.wire.clear()
        return count

    def advance(self, seconds: float) -> None:
        """Let time pass: every deadline on the way is kept, and all that is said is delivered."""
        until = self.now + seconds
        while True:
            self.settle()
            due = min((self.processes[name].deadline for name in self._running), default=math.inf)
            if due > until:
                break
            self.now = max(self.now, due)
            self.tick()
        self.now = until

    def tick(self) -> None:
        """Do what is due now, everywhere."""
        for name in self._running:
            if self.processes[name].deadline <= self.now:
                self.carry_out(name, self.processes[name].tick(self.now))

    def observe(self, name: str, event: Event) -> None:
        """Something happens to a process that is not a message."""
        self.carry_out(name, self.processes[name].observe(event, self.now))

    def hear(self, to: str, packet: Packet) -> None:
        """A process receives something from outside this cluster."""
        self.carry_out(to, self.processes[to].receive(packet, self.now))

    def member(self, name: str) -> Member:
        """The process as the others address it."""
        return self.processes[name].machine.me

    def carry_out(self, name: str, effects: Sequence[Effect]) -> None:
        """Do what a machine wants done."""
        for effect in effects:
            match effect:
                case Transmit(to, packet):
                    self._transmit(name, to, packet)
                case Bind(stranger, member):
                    self._addresses[member.node.role, member.incarnation] = self._address(stranger)
                case CompleteRequest(request, result):
                    assert request not in self.completed, "a request is answered once"
                    self.completed[request] = result
                    self._note_keys(result)
                case CompleteKeys(request, keys, error):
                    assert request not in self.completed, "keys are answered before the whole is complete"
                    self.answered.setdefault(request, {}).update(dict.fromkeys(keys, error))
                case FailRequest(request, error):
                    self.failed[request] = error
                case Halt(error) if name not in self.stopped:
                    self.stopped[name] = error
                    # As the node does: last acknowledgements leave before the process ends.
                    self.carry_out(name, self.processes[name].tick(self.now + ACK_DELAY_S))
                case Log(text):
                    self.reports.append(text)
                case TellLauncher(line):
                    self.told.append(line)
                case Persist(token, work):
                    self.works.append(OpenWork(name, token, work))
                case Connect() | Halt():
                    pass
                case Send():
                    raise AssertionError("Reliable stamps every Send")
        self.processes[name].validate()

    # What users ask.

    def ask(self, rank: int, make: Any) -> int:
        """Hand a worker one request; returns its number."""
        self._next_request += 1
        self.submit(rank, [make(self._next_request)])
        return self._next_request

    def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """Hand a worker several requests at once."""
        worker = self.workers[rank]
        process = self.processes[f"worker-{rank}"]
        self.carry_out(f"worker-{rank}", process.perform(lambda: worker.submit(requests, self.now), self.now))

    def declare(
        self,
        rank: int,
        keys: Mapping[int | str, tuple[int, ...]],
        mode: str = "sync",
        dtype: str = "float32",
        store: int = 0,
    ) -> int:
        """Declare keys by their shapes."""
        kind = from_name(dtype)
        kinds = tuple(kind for _ in keys)
        return self.ask(rank, lambda n: DeclareKeys(n, store, mode, tuple(keys), tuple(keys.values()), kinds))

    def initialise(
        self, values: Mapping[int | str, Sequence[float]], mode: str = "sync", dtype: str = "float32", store: int = 0
    ) -> None:
        """All workers declare, worker 0 gives the values, and everything is settled."""
        shapes = {key: (len(value),) for key, value in values.items()}
        for rank in range(len(self.workers)):
            self.declare(rank, shapes, mode, dtype, store)
        self.settle()
        self.give(0, values)
        self.settle()

    def give(self, rank: int, values: Mapping[int | str, Sequence[float]]) -> int:
        """Send first values."""
        return self._transfer(rank, RunKind.INITIALISE, values)

    def replace(self, values: Mapping[int | str, Sequence[float]]) -> int:
        """Send new values in place of the present ones, as worker 0 does."""
        return self._transfer(0, RunKind.REPLACE, values)

    def push(self, rank: int, values: Mapping[int | str, Sequence[float] | None], **options: Any) -> int:
        """Contribute; None is an empty contribution."""
        return self._transfer(rank, RunKind.PUSH, values, **options)

    def pushpull(self, rank: int, values: Mapping[int | str, Sequence[float] | None], **options: Any) -> int:
        """Contribute and read."""
        return self._transfer(rank, RunKind.PUSHPULL, values, **options)

    def pull(self, rank: int, *keys: int | str, key_by_key: bool = False) -> int:
        """Read."""
        return self._transfer(rank, RunKind.PULL, dict.fromkeys(keys), key_by_key=key_by_key)

    def barrier(self, rank: int, timeout_s: float | None = None, statement: str = "", giver: int = -1) -> int:
        """Arrive at a barrier."""
        return self.ask(rank, lambda number: EnterBarrier(number, 0, timeout_s, statement, giver))

    def return_scheduler(self) -> None:
        """The scheduler was killed, and what was under way to and from it is lost; another goes on from its state."""
        self.wire = deque(one for one in self.wire if "scheduler" not in one[:2])
        own = [one for one in self.works if one.who == "scheduler"]
        works = {number: Persist(one.token, one.work) for number, one in enumerate(own)}
        content = record_of(State(self.now, self.processes["scheduler"], works))
        state = unpickled(content[RECORD.size :])
        self.scheduler, self.processes["scheduler"] = state.scheduler, state.reliable
        self.works = deque(one for one in self.works if one.who != "scheduler")
        self.works += [OpenWork("scheduler", work.token, work.work) for work in state.works.values()]
        names = {process.machine.me: name for name, process in self.processes.items()}
        for member in list(state.reliable.links):
            self.observe("scheduler", PeerDisconnected(member, "the scheduler was started again", True))
        for name in self._running:
            if name != "scheduler":
                self.observe(name, PeerDisconnected(SCHEDULER_MEMBER, "reset"))
                self.observe(name, PeerConnected(SCHEDULER_MEMBER))
        for member in list(state.reliable.links):
            if names.get(member) in self._running:
                self.observe("scheduler", PeerConnected(member))

    def kill(self, name: str, cause: str = "killed by signal 9 (SIGKILL)") -> None:
        """A process ends, and the launcher says so."""
        self.stopped[name] = None
        machine = self.processes[name].machine
        assert isinstance(machine, Worker | Server)
        life = machine.joining.introduction.life
        self.observe("scheduler", ChildEnded(machine.me.node, cause, clean=False, life=life))

    def come_back(self, rank: int, seconds: float = 1.0) -> None:
        """A worker that was lost is started again, and joins as soon as it may; so much time passes."""
        last = self.workers[rank].joining.introduction
        introduction = replace(last, token=last.token + 1000, life=last.life + 1)
        self._addresses[Role.WORKER, introduction.token] = f"worker-{rank}"
        worker = self.workers[rank] = Worker(introduction, self.limits, self.now)
        self.processes[f"worker-{rank}"] = Reliable(worker, JOB)
        self.stopped.pop(f"worker-{rank}", None)
        self.ask(rank, Register)
        self.advance(seconds)

    def return_server(self, rank: int) -> None:
        """A server that was lost is started again, and takes its place."""
        last = self.servers[rank].joining.introduction
        introduction = replace(last, token=last.token + 10_000, life=last.life + 1)
        self._addresses[Role.SERVER, introduction.token] = f"server-{rank}"
        server = self.servers[rank] = self._kind_of_server(introduction, self.limits, REFERENCE, self.now)
        self.processes[f"server-{rank}"] = Reliable(server, JOB)
        self.stopped.pop(f"server-{rank}", None)
        self.advance(1.0)

    def take_part(self, rank: int, store: int = 0) -> int:
        """Ask from which version on rounds wait for a worker."""
        return self.ask(rank, lambda number: TakePart(number, store))

    def set_optimizer(self, rank: int, name: str, **numbers: Any) -> int:
        """Choose the optimizer."""
        description = create(name, **numbers).describe()
        return self.ask(rank, lambda number: Configure(number, 0, description))

    def save(
        self,
        rank: int,
        folder: Path | str,
        *keys: int | str,
        contents: tuple[str, ...] = EVERYTHING,
        step: int = 0,
        store: int = 0,
        **options: Any,
    ) -> int:
        """Save some keys, which are all of the store."""
        infos = tuple(self.infos[key] for key in keys)
        given = {"run": "0123456789abcdef", "keep": 0, "file": SavedFile("", 0, ""), **options}
        return self.ask(rank, lambda n: SaveStore(n, store, str(folder), contents, step=step, keys=infos, **given))

    def load(self, rank: int, folder: Path | str, contents: tuple[str, ...] = EVERYTHING, store: int = 0) -> int:
        """Restore the store."""
        return self.ask(rank, lambda n: LoadStore(n, store, str(folder), contents))

    def leave(self, rank: int, failure: str = "") -> int:
        """Say goodbye."""
        return self.ask(rank, lambda number: Leave(number, failure))

    def value(self, request: int, key: int | str) -> list[float]:
        """What a finished read brought."""
        assert request in self.completed, f"request {request} is not finished: {self.failed.get(request)}"
        values: list[float] = self.results[request][key].tolist()
        return values

    # Inside.

    @property
    def _kind_of_server(self) -> type[Server]:
        return ReplicatedServer if self.config.replicas else Server

    @property
    def _running(self) -> list[str]:
        return [name for name in self.processes if name not in self.stopped]

    def _introduction(self, role: Role, rank: int, num_workers: int, num_servers: int) -> Introduction:
        token = (1000 if role is Role.SERVER else 2000) + rank
        self._addresses[role, token] = f"{role}-{rank}"
        endpoint = f"tcp://{self.server_host.format(rank=rank)}:9000" if role is Role.SERVER else ""
        if role is Role.SERVER and self.hosts:
            endpoint += f"{HOST_MARK}{self.servers_on}.{rank}"
        if role is Role.WORKER and self.hosts:
            endpoint = f"tcp://127.0.0.1:{9100 + rank}{HOST_MARK}{self.hosts[rank]}.{100 + rank}"
        scheduler = "tcp://host-s:1"
        return Introduction(
            role, token, rank, f"host-{rank}", 100 + rank, endpoint, num_workers, num_servers, __version__, scheduler
        )

    def _server(self, rank: int, num_workers: int, num_servers: int) -> Server:
        introduction = self._introduction(Role.SERVER, rank, num_workers, num_servers)
        arithmetic = arithmetic_on(self.devices[rank], REFERENCE) if self.devices else None
        options = {"handlers": self.handlers, "arithmetic": arithmetic}
        machine = self._kind_of_server(introduction, self.limits, REFERENCE, 0.0, **options)
        self.processes[f"server-{rank}"] = Reliable(machine, JOB)
        return machine

    def _worker(self, rank: int, num_workers: int, num_servers: int) -> Worker:
        introduction = self._introduction(Role.WORKER, rank, num_workers, num_servers)
        aggregation = None if self.config.snapshots else HostAggregation(self.local_reduce, self.limits)
        machine = Worker(introduction, self.limits, 0.0, aggregation)
        self.processes[f"worker-{rank}"] = Reliable(machine, JOB)
        return machine

    def _address(self, member: Member) -> str:
        return self._addresses[member.node.role, member.incarnation]

    def _transmit(self, source: str, to: Member, packet: Packet) -> None:
        address = self._address(to)
        encode(packet)  # raises for what no message can carry
        self.log.append(f"{self.now:.2f} {packet.stamp.source} -> {to}: {told(packet.message)}")
        self.wire.append((source, address, packet))

    def _note_keys(self, result: object) -> None:
        if isinstance(result, tuple):
            self.infos.update({info.key: info for info in result})

    def _transfer(
        self,
        rank: int,
        kind: RunKind,
        values: Mapping[int | str, Sequence[float] | None],
        priority: int = 0,
        setting: tuple[float, float, float] = SERVER_DECIDES,
        flag: int = 0,
        key_by_key: bool = False,
        samples: int = 0,
    ) -> int:
        infos = [self.infos[key] for key in values]
        plan = make_plan(infos, self.limits.slice_bytes)
        arrays = [_array(values[info.key], info.dtype) for info in infos]
        results: dict[int | str, Array] = {info.key: _unwritten(info) for info in infos}
        runs = []
        for run in plan.runs:
            flags = [flag if arrays[i] is not None else flag | Flag.EMPTY for i in run.key_of]
            sinks = [results[infos[piece.index].key][piece.start : piece.stop] for piece in run.pieces]
            payload = None if kind is RunKind.PULL else memoryview(_payload(run, arrays))
            runs.append(Run(run, payload, sinks, np.array(flags, np.uint8), (setting,), samples=samples))
        label = f"{kind.value} of key {', '.join(map(repr, values))}"
        request = self.ask(rank, lambda number: Transfer(number, kind, label, runs, priority, key_by_key))
        self.results[request] = results
        return request


def _unwritten(info: KeyInfo) -> Array:
    return np.full(info.size, NAN if info.dtype.storage.kind == "f" else 77, info.dtype.storage)


def _array(values: Sequence[float] | None, dtype: DType) -> Array | None:
    return None if values is None else np.array(values, dtype.storage)


def _payload(run: RunPlan, arrays: Sequence[Array | None]) -> bytes:
    parts = []
    for piece in run.pieces:
        array = arrays[piece.index]
        if array is not None:
            part = array[piece.start : piece.stop].tobytes()
            parts.append(part + b"\0" * (-len(part) % 8))
    return b"".join(parts)


def told(message: Message) -> str:
    """A message in words: its kind and its fields."""
    names = [one.name for one in fields(message)]
    shown = [f"{name}={_shown(getattr(message, name))}" for name in names if name not in HIDDEN]
    return f"{type(message).__name__}({', '.join(shown)})"


HIDDEN = {"samples", "setting_of", "num_workers", "num_servers", "version", "placement", "settings"}
"""Fields that would only make transcripts longer."""


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(value.tolist())
    if isinstance(value, Coded):
        return f"{value.counts.tolist()} in {value.nbytes} bytes"
    if hasattr(value, "payload"):
        arrays = [array.tolist() for array, n in zip(views(value), value.counts, strict=True)]
        return str(arrays)
    if isinstance(value, tuple) and value and hasattr(value[0], "member"):
        return "[" + ", ".join(str(peer.member) for peer in value) + "]"
    return repr(value)
