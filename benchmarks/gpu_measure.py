"""How `gpu.py` measures one kernel: nobody's time counts whose result was not checked in the same run.

Rules that hold here:

* The one way to a `Result` is `measure`, which lets a contender compute fresh random inputs first, over outputs that
  were filled with what is wrong, and compares with arithmetic in float64 or with the reference's bits. A wrong result
  leaves the contender out, with the error in its place. So does whatever it raises.
* Contenders take turns, and each call works on another set of inputs than the one before; together the sets are larger
  than the cache.
* Times are those of the device, between two events. Before them it is given other work, so that the host gets ahead
  and its part of a launch is not counted, except where a function waits for the device by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvdist.kernels.interface import Device

CACHES = 4
"""How many times the cache the inputs of one turn fill at least."""
SETS_MAX = 32
HEAD_START_COPIES = 24
"""Copies of `HEAD_START_BYTES` before a turn: some milliseconds for the host to get ahead."""
HEAD_START_BYTES = 1 << 28

Inputs = dict[str, Any]


class WrongResult(Exception):
    """A contender has computed something else."""


class Unable(Exception):
    """A contender does not do this, and says why."""


@dataclass(frozen=True)
class Bound:
    """A contender with a set of inputs.

    Attributes:
        call: what is timed.
        results: what it has made, in the order of `Case.right`; asked for after a call.
    """

    call: Callable[[], object]
    results: Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One kernel on one size.

    Attributes:
        name: as in the tables.
        moved_bytes: each input read once, each output written once.
        make: a set of inputs of a seed; outputs are `poisoned`.
        right: what must come out of such a set, in float64, or of integers what must be equal.
        contenders: a name, and what binds it to a set.
        tolerance: the largest ‖found − right‖ / ‖right‖.
        share: how much of the bandwidth of a copy is aimed at.
        ratio: how many times as fast as the fastest other system is aimed at.
        over_host: bytes cross to the host or the host takes part, so that the copy bandwidth is no bound.
        by_host: timed by the host's clock, from call to result.
        of_ours: our backends belong into it, so that it says which of them are absent.
    """

    name: str
    moved_bytes: float
    make: Callable[[int], Inputs]
    right: Callable[[Inputs], Sequence[torch.Tensor]]
    contenders: Mapping[str, Callable[[Inputs], Bound]]
    tolerance: float = 1e-6
    share: float | None = None
    ratio: float | None = None
    over_host: bool = False
    by_host: bool = False
    of_ours: bool = True


@dataclass(frozen=True)
class Result:
    """One contender's time. `error` is what was found by the check of this run."""

    contender: str
    median_s: float
    low_s: float
    high_s: float
    calls: int
    error: float


@dataclass
class Row:
    """What was found out about a case: results, and who was left out, and why."""

    case: Case
    results: dict[str, Result] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Those of `left_out` that computed something else."""


class Clock(Protocol):
    """Takes the time of calls on a device."""

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Call each once, in order; how long each kept the device busy."""

    def wait(self) -> None:
        """Until everything is done."""


class EventClock:
    """Time between events of torch's current stream, which is also the one of whoever works on torch's tensors."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._from = torch.ones(HEAD_START_BYTES, dtype=torch.uint8, device=place)
        self._to = torch.empty_like(self._from)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for _ in range(HEAD_START_COPIES):
            self._to.copy_(self._from)
        for call, (start, end) in zip(calls, pairs, strict=True):
            start.record()
            call()
            end.record()
        self.wait()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def wait(self) -> None:
        torch.cuda.synchronize(self._place)


class HostClock:
    """The host's clock, around a call and the wait for its end."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        taken = []
        for call in calls:
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return taken


@dataclass(frozen=True)
class Sizes:
    """How much the cases work on."""

    elements: int = 1 << 26
    """Of each array of a sum or an optimizer: 256 MB of float32."""
    rows: int = 1_000_000
    table_rows: int = 4_000_000
    row_elements: int = 64
    bucket: tuple[int, ...] = ()
    """Elements of the tensors of a bucket; empty: those of ResNet-50."""
    keys: int = 25
    key_elements: int = 1 << 20


@dataclass(frozen=True)
class Bench:
    """Where and how it is measured.

    Attributes:
        place: the device, as torch calls it.
        devices: our backends that could be opened, by name.
        left_out: those that could not, and why.
        clock: of the device.
        sizes: how much work.
        cache_bytes: of the device.
        rounds: how often each contender visits each of its sets.
        seed: of all inputs; another one in each run.
    """

    place: str
    devices: Mapping[str, Device]
    left_out: Mapping[str, str]
    clock: Clock
    sizes: Sizes
    cache_bytes: int
    rounds: int
    seed: int

    def each(self, bind: Callable[[Device, Inputs], Bound]) -> dict[str, Callable[[Inputs], Bound]]:
        """Our backends as contenders."""

        def contender(device: Device) -> Callable[[Inputs], Bound]:
            return lambda inputs: bind(device, inputs)

        return {name: contender(device) for name, device in self.devices.items()}

    def generator(self, seed: int) -> torch.Generator:
        """Random numbers on the device."""
        return torch.Generator(self.place).manual_seed(seed)


def poisoned(count: int, dtype: torch.dtype, place: str) -> torch.Tensor:
    """An output that nothing has been written to: NaN, or 165 in each byte."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype, device=place)
    return torch.full((count * dtype.itemsize,), 165, dtype=torch.uint8, device=place).view(dtype)


def measure(case: Case, bench: Bench) -> Row:
    """Check every contender, then time those that were right, in turns."""
    row = Row(case, left_out=dict(bench.left_out) if case.of_ours else {})
    right = [one.detach().clone() for one in case.right(case.make(bench.seed))]
    errors: dict[str, float] = {}
    for name, bind in case.contenders.items():
        try:
            errors[name] = _checked(case, bind, bench, right)
        except WrongResult as error:
            row.left_out[name] = f"WRONG: {error}"
            row.wrong.append(name)
        except Exception as error:  # noqa: BLE001  # whatever a library raises, the others' rows are worth having
            row.left_out[name] = _told(error)
    del right
    if errors:
        try:
            taken = _timed(case, {name: case.contenders[name] for name in errors}, bench)
        except Exception as error:  # noqa: BLE001  # likewise
            row.left_out.update(dict.fromkeys(errors, f"not timed: {_told(error)}"))
            return row
        row.results = {name: _result(name, seconds, errors[name]) for name, seconds in taken.items()}
    return row


def _checked(case: Case, bind: Callable[[Inputs], Bound], bench: Bench, right: Sequence[torch.Tensor]) -> float:
    """The error of one call on inputs that nobody has used.

    Raises:
        WrongResult: it is larger than the case allows.
    """
    bound = bind(case.make(bench.seed))
    bound.call()
    bench.clock.wait()
    found = list(bound.results())
    if len(found) != len(right):
        raise WrongResult(f"{len(found)} results instead of {len(right)}")
    error = max(distance(one, wanted) for one, wanted in zip(found, right, strict=True))
    if not error <= case.tolerance:  # NaN is not
        raise WrongResult(f"the error is {error:.2g}, allowed is {case.tolerance:.2g}")
    return error


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """‖found − right‖ / ‖right‖ in float64; of integers 0 if they are equal, else infinite."""
    if found.shape != right.shape:
        raise WrongResult(f"the shape is {tuple(found.shape)} instead of {tuple(right.shape)}")
    if not right.is_floating_point():
        return 0.0 if torch.equal(found.to(right.device), right) else float("inf")
    wide = right.double()
    off, length = float(torch.linalg.vector_norm(found.to(right.device).double() - wide)), float(wide.norm())
    return off / length if length else off


def _timed(case: Case, contenders: Mapping[str, Callable[[Inputs], Bound]], bench: Bench) -> dict[str, list[float]]:
    count = min(SETS_MAX, max(2, -(-CACHES * bench.cache_bytes // max(1, int(case.moved_bytes)))))
    sets = [case.make(bench.seed + 1 + number) for number in range(count)]
    calls = {name: [bind(inputs).call for inputs in sets] for name, bind in contenders.items()}
    clock = HostClock(bench.clock.wait) if case.by_host else bench.clock
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(bench.rounds + 1):
        for name, each in calls.items():
            seconds = clock.seconds(each)
            if turn:  # the first compiles, and takes memory
                taken[name] += seconds
    return taken


def _result(name: str, seconds: list[float], error: float) -> Result:
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    return Result(name, statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered), error)


def _told(error: Exception) -> str:
    """What was raised, in one line."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, Unable) and text else f"{type(error).__name__}: {text}"
