"""The inputs of a machine and its answers, as a record that can be written to a file. Pure.

A record has no payloads: only the sizes of values and gradients, and the ids of indexed values. Numbers, names and
times are kept exactly. Reading a record runs no code from it. `replay` plays it to a machine.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.snapshot import FileRecord, Manifest, SavedKey, SliceImage
from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core import machine as fx
from kvdist.core.joining import Introduction
from kvdist.core.server.slice_parts import NUMBERS
from kvdist.core.sharding import Slice
from kvdist.core.worker import requests as req
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.naming import NamedKey
from kvdist.nodes import Member, NodeId, Role
from kvdist.optimizer.states import SliceState
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import INDEX, Arrays, Coded, Encoding, as_octets, offsets
from kvdist.protocol.wire import decode

ROW_ID = np.dtype("<i8")


@dataclass(slots=True)
class Ascending:
    """Ids in a payload: `count` numbers of `width` bytes at byte `offset` that ascend to `last`."""

    offset: int
    count: int
    width: int
    last: int


@dataclass(slots=True)
class Received:
    """A received message: its envelope and header, the bytes of its payload (-1 for none), and the ids in it."""

    now: float
    envelope: bytes
    header: bytes
    nbytes: int
    ids: tuple[Ascending, ...] = ()

    def packet(self) -> msg.Packet:
        """Return the message, with zeros for values."""
        if self.nbytes < 0:
            return decode([self.envelope, self.header])
        payload = bytearray(self.nbytes)
        for one in self.ids:
            dtype = ROW_ID if one.width == ROW_ID.itemsize else INDEX
            np.frombuffer(payload, dtype, one.count, one.offset)[:] = np.arange(one.last - one.count, one.last) + 1
        return decode([self.envelope, self.header, bytes(payload)])


@dataclass(slots=True)
class Observed:
    """An event other than a message; `work` is the number of the work with the disk that it ends, from 0, or -1."""

    now: float
    event: fx.Event
    work: int = -1


@dataclass(slots=True)
class Ticked:
    """A timer of the machine that expired."""

    now: float


@dataclass(slots=True)
class Asked:
    """Calls of the user."""

    now: float
    requests: Sequence[Any]


@dataclass(slots=True)
class ThreadsSaid:
    """An answer to a worker's question about the user's threads."""

    question: str
    answer: float | str | None


@dataclass(slots=True)
class Sent:
    """A sent message: its envelope and header, which are empty if there was no connection."""

    to: Member
    envelope: bytes = b""
    header: bytes = b""


@dataclass(slots=True)
class Did:
    """Any other effect; see `words_of`."""

    words: tuple[Any, ...]


@dataclass(slots=True)
class Explained:
    """The explanation of a long wait, for people."""

    now: float
    text: str


Input = Received | Observed | Ticked | Asked
Entry = Input | ThreadsSaid | Sent | Did | Explained


@dataclass(frozen=True, slots=True)
class Beginning:
    """The arguments with which a machine was created.

    Attributes:
        now: time of the creation.
        job: tag of the job.
        limits: sizes and times.
        config, first_incarnation: settings of a scheduler, and the first incarnation that it assigns.
        introduction: introduction of a server or a worker.
        commands: commands for which a server has handlers.
        local_reduce: how a worker aggregates on its host; '' if it does not.
        replicas: number of other servers that keep a copy of a server's slices.
    """

    now: float
    job: int
    limits: Limits
    config: ClusterConfig | None = None
    first_incarnation: int = 0
    introduction: Introduction | None = None
    commands: tuple[int, ...] = ()
    local_reduce: str = ""
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A `Run` without the memory of its user."""

    plan: req.RunPlan
    nbytes: int
    """Bytes of its payload; -1 for none."""
    sinks: int
    """Number of arrays that take values."""
    flags: Any
    settings: tuple[tuple[float, float, float], ...]
    setting_of: Any
    keeps: bool
    stays: bool
    samples: int
    chunks: tuple[tuple[int, int], ...]
    """(rows, bytes) of each chunk of rows."""
    row_length: int
    encoded: req.Encoded | None
    states: Any

    def run(self) -> req.Run:
        """Return the run, with zeros for values."""
        return req.Run(
            self.plan,
            None if self.nbytes < 0 else _zeros(self.nbytes),
            self._sinks(),
            self.flags,
            self.settings,
            self.setting_of,
            {} if self.keeps else None,
            self.stays,
            self.samples,
            [req.RowChunk(rows, _zeros(nbytes)) for rows, nbytes in self.chunks],
            self.row_length,
            self.encoded,
            self.states,
        )

    def _sinks(self) -> list[Any]:
        counts = [rows * self.row_length for rows, _ in self.chunks] or self.plan.counts.tolist()
        columns = zip(counts, self.plan.dtypes.tolist(), strict=False)
        return [np.zeros(count, DType(code).storage) for count, code in columns][: self.sinks]


def _zeros(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def recorded(request: req.Request) -> Any:
    """Return a request without the memory of its user."""
    if not isinstance(request, req.Transfer):
        return request
    runs: Any = tuple(map(_recorded_run, request.runs))
    return dataclasses.replace(request, runs=runs)


def _recorded_run(run: req.Run) -> RecordedRun:
    return RecordedRun(
        run.plan,
        -1 if run.payload is None else len(run.payload),
        len(run.sinks),
        run.flags,
        run.settings,
        run.setting_of,
        run.kept is not None,
        run.stays,
        run.samples,
        tuple([(chunk.rows, len(chunk.payload)) for chunk in run.chunks]),
        run.row_length,
        run.encoded,
        run.states,
    )


def played(request: Any) -> req.Request:
    """Return a recorded request as a machine takes it."""
    if not isinstance(request, req.Transfer):
        return request  # type: ignore[no-any-return]
    return dataclasses.replace(request, runs=[run.run() for run in request.runs])  # type: ignore[attr-defined]


def ids_of(message: msg.Message) -> tuple[Ascending, ...]:
    """Return the ids in the payload of a message, which a record keeps."""
    match message:
        case msg.CompressedPush(arrays=coded) if coded.encoding == Encoding.TOP_K:
            return _top_k(coded)
        case msg.PullRows(arrays=arrays):
            return _row_ids(arrays, range(len(arrays.counts)))
        case msg.InitRows(arrays=arrays) | msg.PushRows(arrays=arrays):
            return _row_ids(arrays, range(0, len(arrays.counts), 2))
        case msg.Replicate(arrays=arrays) if message.has_rows:
            return _row_ids(arrays, range(1))
        case msg.Fill(parts=parts, arrays=arrays) | msg.ReplaceState(parts=parts, arrays=arrays):
            ids = _row_ids(arrays, np.flatnonzero(parts == msg.ROW_IDS).tolist())
            return (*ids, *_numbers(arrays, (parts == NUMBERS) & (arrays.dtypes == DType.FLOAT64)))
    return ()


def _row_ids(arrays: Arrays, positions: Iterable[int]) -> tuple[Ascending, ...]:
    """Return the ids of rows in the arrays at these positions."""
    width, payload, found = ROW_ID.itemsize, b"".join(arrays.frames), []
    starts, _ = offsets(arrays.dtypes, arrays.counts)
    for start, count in ((int(starts[position]), int(arrays.counts[position])) for position in positions):
        if count:
            last = int(np.frombuffer(payload, ROW_ID, 1, start + (count - 1) * width)[0])
            found.append(Ascending(start, count, width, last))
    return tuple(found)


def _numbers(arrays: Arrays, which: npt.NDArray[np.bool_]) -> tuple[Ascending, ...]:
    """Return the numbers of optimizer states, the bits of each as an id: they decide which slices form a block."""
    width, payload, (starts, _) = ROW_ID.itemsize, b"".join(arrays.frames), offsets(arrays.dtypes, arrays.counts)
    spans = zip(starts[which].tolist(), arrays.counts[which].tolist(), strict=True)
    places = [start + width * i for start, count in spans for i in range(count)]
    return tuple([Ascending(one, 1, width, int(np.frombuffer(payload, ROW_ID, 1, one)[0])) for one in places])


def _top_k(coded: Coded) -> tuple[Ascending, ...]:
    octets = as_octets(coded)
    starts, _ = offsets(octets.dtypes, octets.counts)
    pairs = zip(starts.tolist(), coded.entries.tolist(), strict=True)
    return tuple(Ascending(start, count, INDEX.itemsize, count - 1) for start, count in pairs if count)


def words_of(effect: fx.Effect, work: int = -1) -> tuple[Any, ...]:
    """Describe an effect that sends no message; `work` is the number of its work with the disk."""
    match effect:
        case fx.Connect(to, endpoint):
            return "connect", str(to), endpoint
        case fx.Bind(_, member):
            return "bind", str(member), member.incarnation
        case fx.CompleteRequest(request):
            return "complete", request
        case fx.CompleteKeys(request, keys, error):
            return "complete keys", request, tuple(keys), "" if error is None else str(error)
        case fx.FailRequest(request, error):
            return "fail", request, f"{type(error).__name__}: {error}"
        case fx.Log(text):
            return "log", text
        case fx.Persist(_, task):
            return "persist", work, type(task).__name__, task.folder
        case fx.Halt(error):
            return "halt", "" if error is None else f"{type(error).__name__}: {error}"
    return type(effect).__name__, *[str(getattr(effect, field.name)) for field in dataclasses.fields(effect)]


# As text.

_DATACLASSES: dict[str, type[Any]] = {
    one.__name__: one
    for one in (
        *get_args(Entry), *get_args(fx.Event), *get_args(req.Request), Ascending, Beginning, ClusterConfig, req.Encoded,
        FileRecord, Introduction, req.KeyInfo, Limits, Manifest, Member, NodeId, msg.Progress, RecordedRun,
        req.RunPlan, req.RunSlice, msg.SavedFile, SavedKey, Slice, SliceImage, SliceState, msg.StepTimes,
    )
}  # fmt: skip
_ENUMS: dict[str, type[enum.Enum]] = {one.__name__: one for one in (DType, msg.DueWhen, Encoding, Role, req.RunKind)}


class Writer:
    """Converts entries of a record to values of JSON. A plan that many transfers use is written once."""

    def __init__(self) -> None:
        self._plans: dict[int, int] = {}

    def plain(self, value: Any) -> Any:
        """Convert a value to numbers, texts, lists and objects."""
        match value:
            case enum.Enum():
                return {"$": type(value).__name__, "v": value.value}
            case NamedKey():
                return {"$": "NamedKey", "v": int(value), "name": value.name}
            case None | bool() | int() | float() | str():
                return value
            case bytes():
                return {"$": "bytes", "v": base64.b64encode(value).decode()}
            case np.ndarray():
                data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
                return {"$": "array", "dtype": value.dtype.str, "shape": list(value.shape), "v": data}
            case np.generic():
                return value.item()
            case Mapping():
                return {"$": "map", "v": [[self.plain(key), self.plain(one)] for key, one in value.items()]}
            case req.RunPlan() if id(value) in self._plans:
                return {"$": "plan", "v": self._plans[id(value)]}
            case req.UseKernels():
                return {"$": "UseKernels", "v": value.request}
            case _ if type(value).__name__ in _DATACLASSES:
                return self._object(value)
        return [self.plain(one) for one in value]

    def _object(self, value: Any) -> dict[str, Any]:
        if isinstance(value, req.RunPlan):
            self._plans[id(value)] = len(self._plans)
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {"$": type(value).__name__, **{name: self.plain(getattr(value, name)) for name in names}}


class Reader:
    """Converts values of a `Writer` back to entries, in the same order."""

    def __init__(self) -> None:
        self._plans: list[Any] = []

    def value(self, plain: Any) -> Any:
        """Convert a value of JSON back.

        Raises:
            ValueError: the value has a kind that no `Writer` of this version writes.
        """
        if isinstance(plain, list):
            return tuple([self.value(one) for one in plain])
        if not isinstance(plain, dict):
            return plain
        name, inner = plain.get("$"), plain.get("v")
        match name:
            case "bytes":
                return base64.b64decode(inner)  # type: ignore[arg-type]
            case "array":
                return np.frombuffer(base64.b64decode(plain["v"]), plain["dtype"]).reshape(plain["shape"]).copy()
            case "map":
                return {self.value(key): self.value(one) for key, one in plain["v"]}
            case "plan":
                return self._plans[plain["v"]]
            case "NamedKey":
                return NamedKey(plain["v"], plain["name"])
            case "UseKernels":
                return req.UseKernels(plain["v"], REFERENCE)
            case str() if name in _ENUMS:
                return _ENUMS[name](inner)
            case str() if name in _DATACLASSES:
                return self._object(_DATACLASSES[name], plain)
        raise ValueError(f"an object of unknown kind {name!r:.60}")

    def _object(self, kind: type[Any], plain: dict[str, Any]) -> Any:
        place = len(self._plans)
        if kind is req.RunPlan:
            self._plans.append(None)
        value = kind(**{name: self.value(one) for name, one in plain.items() if name != "$"})
        if kind is req.RunPlan:
            self._plans[place] = value
        return value


def without_values(event: fx.Persisted) -> fx.Persisted:
    """Return the result of a work with the disk, with zeros for values and without its token."""

    def zeros(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, tuple):
            return tuple(map(zeros, value))
        if isinstance(value, SliceImage):
            return dataclasses.replace(value, weight=zeros(value.weight), state=zeros(value.state))
        return dataclasses.replace(value, arrays=zeros(value.arrays)) if isinstance(value, SliceState) else value

    return fx.Persisted(None, zeros(event.product), event.failure)
