"""The same calls on two clusters, one whose servers have blocks of several slices and one whose blocks have one slice
each: nobody may notice.

A `Story` is a list of steps drawn from a seed. Each step is settled before the next, so that both clusters decide in
the same order; whatever a worker gets to know (values, errors, explanations) is then the same to the bit.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core.server.block import Block, Blocks
from kvdist.core.server.shard import Shard
from kvdist.protocol.messages import Flag, InitValues, Packet, Push, ReplaceValues, Values
from tests.core.wired import NAN, Wired

WITH_BYTES = (Push, InitValues, ReplaceValues, Values)
SETTINGS = [(NAN, NAN, NAN), (0.5, 0.0, 1.0), (0.25, 0.0, 2.0)]
SIZES = {"a": 3, "b": 1, "c": 0, "d": 4, "e": 2, "f": 5}
KEY = re.compile("(of )?key '.'|. So it is for . other keys of the same push")
"""Of several keys that are refused for one reason, an error names one, and how many others there are."""
LISTS = [list("abcd"), list("abcd"), list("abcd"), list("ab"), list("cdef"), list("dcba"), list("abcdef"), ["a"]]
"""The lists of keys that are moved together: one most of all, parts of it, overlapping ones, another order."""


class Watched(Wired):
    """A cluster in which bytes that left and were not acknowledged must not change."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._sums: dict[int, tuple[Any, int]] = {}
        super().__init__(*args, **options)

    def _transmit(self, source: str, to: Any, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, WITH_BYTES) and id(message) not in self._sums:
            self._sums[id(message)] = (message, checksum(message))
        super()._transmit(source, to, packet)

    def check_bytes(self) -> None:
        """Every payload that may still be read is as it was sent."""
        kept: dict[int, tuple[Any, int]] = {}
        for process in self.processes.values():
            for link in process.links.values():
                for _, message, _ in link.unacknowledged:
                    if isinstance(message, WITH_BYTES):
                        assert checksum(message) == self._sums[id(message)][1], "bytes changed under way"
                        kept[id(message)] = self._sums[id(message)]
        self._sums = kept

    def everything(self) -> dict[int, tuple[int, dict[int, int], list[Any]]]:
        """Slice → version, counted, value, on all servers."""
        found = {}
        for server in self.servers:
            for block in server.shard.blocks:
                counted = {rank: count for rank, count in block.round.counted.items() if count}
                for position, number in enumerate(block.ids.tolist()):
                    value = None if block.published is None else block.values(position).tolist()
                    found[number] = (block.version, counted, value)
        return dict(sorted(found.items()))


def checksum(message: Any) -> int:
    """Of all payload frames."""
    total = 0
    for frame in message.arrays.frames:
        total = zlib.crc32(frame, total)
    return total


@dataclass(frozen=True)
class Step:
    """One call of one worker, or something that happens to all."""

    verb: str
    rank: int = 0
    keys: tuple[str, ...] = ()
    grads: tuple[tuple[int, ...] | None, ...] = ()
    setting: tuple[float, float, float] = SETTINGS[0]
    flag: int = 0
    optimizer: str = ""


@contextmanager
def slices_alone() -> Iterator[None]:
    """Servers that handle each slice by itself."""
    with mock.patch.object(Blocks, "has_room_for", lambda self, nbytes, slices: False):
        yield


def draw(seed: int, workers: int, steps: int, rare: float = 0.12, optimizers: Sequence[str] = ()) -> list[Step]:
    """A story in which every round is complete in the end."""
    random_ = random.Random(seed)
    alive = list(range(workers))
    pushed = [dict.fromkeys(SIZES, 0) for _ in range(workers)]
    story: list[Step] = []

    def push(rank: int, keys: Sequence[str], plain: bool) -> None:
        grads: list[tuple[int, ...] | None] = [tuple(random_.randint(-8, 8) for _ in range(SIZES[k])) for k in keys]
        setting, flag = SETTINGS[0], 0
        if not plain and random_.random() < rare:
            grads[random_.randrange(len(keys))] = None
        if not plain and random_.random() < rare:
            setting = random_.choice(SETTINGS)
        if not plain and random_.random() < rare:
            flag = int(Flag.AVERAGE)
        for key in keys:
            pushed[rank][key] += 1
        story.append(Step(random_.choice(["push", "pushpull"]), rank, tuple(keys), tuple(grads), setting, flag))

    while len(story) < steps:
        chance = random_.random()
        if chance < 0.6:
            keys = LISTS[0] if random_.random() < 0.8 else random_.choice(LISTS)
            for rank in random_.sample(alive, random_.randint(1, len(alive)) if random_.random() < 0.3 else len(alive)):
                push(rank, keys, plain=random_.random() < 0.5)
        elif chance < 0.8:
            keys = LISTS[0] if random_.random() < 0.6 else random_.choice(LISTS)
            story.append(Step("pull", random_.choice(alive), tuple(keys)))
        elif random_.random() < rare and len(alive) > 1 and workers - 1 in alive:
            story.append(Step("leave", alive.pop()))
        elif random_.random() < rare:
            keys = random_.choice(LISTS)
            values = tuple(tuple(random_.randint(0, 9) for _ in range(SIZES[k])) for k in keys)
            story.append(Step("replace", 0, tuple(keys), values))
        elif optimizers and random_.random() < rare and len(alive) == workers:
            story.append(Step("optimizer", optimizer=random_.choice(optimizers)))
        elif random_.random() < rare:
            story.append(Step("wait"))
        elif random_.random() < rare:
            story.append(Step("lose", random_.choice(alive), tuple(LISTS[0])))
    for key in SIZES:
        most = max(counts[key] for counts in pushed)
        for rank in alive:
            while pushed[rank][key] < most:
                push(rank, [key], plain=True)
    return story


def live(story: Sequence[Step], mode: str = "sync", workers: int = 3, servers: int = 1) -> tuple[list[Any], int]:
    """Play the story; returns all that anybody got to know, and how many rounds were of several slices."""
    wired = Watched(workers, servers, limits=Limits())
    first = {key: list(range(size)) for key, size in SIZES.items()}
    for dtype, keys in (("float32", "abcd"), ("float64", "e"), ("int32", "f")):
        for rank in range(workers):
            wired.declare(rank, {key: (SIZES[key],) for key in keys}, mode, dtype)
        wired.settle()
    wired.give(0, first)
    wired.settle()
    known: list[Any] = []
    asked: list[int] = []
    apply, rounds = Shard.apply, 0

    def counted(self: Shard, blocks: Sequence[Block], *arguments: Any) -> None:
        nonlocal rounds
        rounds += len(blocks[0]) > 1
        apply(self, blocks, *arguments)

    with mock.patch.object(Shard, "apply", counted):
        for step in story:
            request = _take(wired, step, known)
            if request is not None:
                asked.append(request)
            wired.settle()
            if step.verb == "lose":
                wired.advance(60.0)
            wired.check_bytes()
        wired.advance(100.0)
    for request in asked:
        error = wired.failed.get(request)
        assert error is not None or request in wired.completed, f"request {request} was never answered"
        values = {key: array.tolist() for key, array in wired.results[request].items()}
        known.append((type(error).__name__, KEY.sub("", str(error))) if error is not None else values)
    known.append(wired.everything())
    leases = [
        buffer.leases
        for server in wired.servers
        for block in server.shard.blocks
        for buffer in (block.published, *block.pool.free_buffers)
        if buffer is not None
    ]
    assert not any(leases), "nobody reads any more"
    return known, rounds


def _take(wired: Wired, step: Step, known: list[Any]) -> int | None:
    values: dict[int | str, Any] = dict(zip(step.keys, step.grads, strict=False))
    match step.verb:
        case "push":
            return wired.push(step.rank, values, setting=step.setting, flag=step.flag)
        case "pushpull":
            return wired.pushpull(step.rank, values, setting=step.setting, flag=step.flag)
        case "pull":
            return wired.pull(step.rank, *step.keys)
        case "lose":
            request = wired.pull(step.rank, *step.keys)
            wired.lose()
            return request
        case "replace":
            return wired.replace(values)
        case "optimizer":
            for rank in range(len(wired.workers)):
                wired.set_optimizer(rank, step.optimizer, learning_rate=0.5)
        case "leave":
            wired.leave(step.rank)
        case "wait":
            wired.advance(16.0)
            known.append([process.machine.explain(wired.now) for process in wired.processes.values()])
    return None


def assert_nobody_notices(story: Sequence[Step], **options: Any) -> int:
    """Play the story in both clusters and compare; returns how many rounds were of several slices."""
    grouped, rounds = live(story, **options)
    with slices_alone():
        alone, none = live(story, **options)
    assert none == 0
    for ours, theirs in zip(grouped, alone, strict=True):
        np.testing.assert_equal(ours, theirs)
    return rounds
