"""`KVDIST_LEDGER`: what became of every push, line by line; and `kvdist ledger`, which reads it.

Each server appends to a file of its own in that folder, one JSON object a line, with ``slices`` (their numbers) and
``key`` (of the first one) in each:

- a round that was closed: ``version``, and ``counted``, a list of [rank, incarnation, number of the push, from 1];
- one that was refused after that: the same with ``refused``, the reason;
- a server was lost, and all went back: ``rolled_back``, the version. What made later ones is undone;
- workers that were given up: ``lost``, a list of [rank, incarnation]. Nothing more of them is counted in these slices;
- a push of one of them that has come after that: ``fenced``, [rank, incarnation, number of the push]. It was refused.

A worker that was started again has a higher incarnation. Its pushes have numbers of their own: on ``dist_async`` they
begin at 1 again, in lockstep behind those of the round at which it has joined.

It is for debugging: a line for each block and round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.config.paths import expanded
from kvdist.core.server.server import Server
from kvdist.core.server.shard import LatePush, StoredHolder
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

NAMED_MAX = 8
"""Keys that an answer names."""
FENCED_MAX = 256
"""Late pushes that are remembered."""


class FileLedger:
    """The ledger of one server.

    Args:
        folder: where its file goes; made if it is not there.
        name: of the server, once it has one.
    """

    def __init__(self, folder: Path, name: Callable[[], str]) -> None:
        self._folder = folder
        self._name = name
        self._fenced: dict[tuple[Member, int], set[int]] = {}
        """(who, step) of the latest late pushes → the slices of which that is written, as pushes are repeated."""

    def round_closed(self, holder: StoredHolder, contributions: Sequence[Any]) -> None:
        """A round has been closed."""
        self._write(holder, version=holder.round.version, counted=_rows(contributions))

    def refused(self, holder: StoredHolder, contributions: Sequence[Any], reason: str) -> None:
        """It could not be applied."""
        self._write(holder, version=holder.round.version, counted=_rows(contributions), refused=reason)

    def dropped(self, holder: StoredHolder, lost: Mapping[int, Member]) -> None:
        """Nothing more of these workers will be counted."""
        self._write(holder, lost=sorted([rank, member.incarnation] for rank, member in lost.items()))

    def rolled_back(self, holder: StoredHolder) -> None:
        """What made later versions is undone."""
        self._write(holder, rolled_back=holder.round.version)

    def fenced(self, member: Member, message: LatePush, holder: Callable[[int], StoredHolder | None]) -> None:
        """A push of a worker that was given up before has been refused."""
        own = (
            message.ranks == member.node.rank
            if isinstance(message, msg.JoinedPush)
            else np.ones(len(message.ids), bool)
        )
        for step in np.unique(message.steps[own]).tolist():
            there = {one: holder(one) for one in message.ids[own & (message.steps == step)].tolist()}
            slices = [one for one, found in there.items() if found is not None]
            written = self._fenced.setdefault((member, step), set())
            slices = [one for one in slices if one not in written]
            if not slices:
                continue
            written.update(slices)
            if len(self._fenced) > FENCED_MAX:
                del self._fenced[next(iter(self._fenced))]
            first = there[slices[0]]
            assert first is not None
            self._write(first, slices, fenced=[member.node.rank, member.incarnation, step + 1])

    def _write(self, holder: StoredHolder, slices: Sequence[int] | None = None, **what: object) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        ids = holder.ids.tolist() if slices is None else slices
        line = {"store": holder.store, "slices": ids, "key": holder.round.key, **what}
        with (self._folder / f"{self._name()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def keep(server: Server, folder: Path) -> None:
    """Let a server write its ledger."""
    server.dense.ledger = server.sparse.ledger = FileLedger(folder, lambda: str(server.me))


def fate(folder: Path, rank: int, push: int) -> str:
    """What became of a push of a worker, by the ledgers in a folder.

    Returns:
        A sentence; of a worker that was given up one for each of its incarnations that may have made the push, a line
        each, in their order.

    Raises:
        FileNotFoundError: there are none.
    """
    first: dict[int, int] = {}
    """Incarnation of this rank → the number of the first push that was counted; 0 if none was."""
    is_lost = False
    for line in _lines(folder):
        for one, incarnation, number in line.get("counted", ()):
            if one == rank:
                first[incarnation] = min(first.get(incarnation) or number, number)
        for one, incarnation, *_ in (*line.get("lost", ()), line.get("fenced", (None, 0))):
            if one == rank:
                first.setdefault(incarnation, 0)
                is_lost = True
    # Pushes of lower numbers than an incarnation's first are those of earlier ones, before it joined.
    able = [one for one in sorted(first) if first[one] <= push] or sorted(first)[-1:] or [0]
    who = f"push {push} of worker-{rank}"
    return "\n".join(_fate(folder, rank, one, push, f"{who} (incarnation {one})" if is_lost else who) for one in able)


def _fate(folder: Path, rank: int, incarnation: int, push: int, who: str) -> str:
    """What became of a push of one incarnation of a worker."""
    counted: dict[int, int] = {}
    refused: dict[int, str] = {}
    lost: set[int] = set()
    fenced: set[int] = set()
    keys: dict[int, int | str] = {}
    for line in _lines(folder):
        slices = line["slices"]
        if "fenced" not in line:  # whose slices may be of many keys
            keys.update((number, line["key"]) for number in slices)
        if "rolled_back" in line:
            undone = {number for number in slices if counted.get(number, 0) > line["rolled_back"]}
            counted = {number: version for number, version in counted.items() if number not in undone}
            refused = {number: reason for number, reason in refused.items() if number not in undone}
        if [rank, incarnation] in line.get("lost", ()):
            lost.update(slices)
        if [rank, incarnation, push] == line.get("fenced"):
            fenced.update(slices)
        if [rank, incarnation, push] in line.get("counted", ()):
            counted.update(dict.fromkeys(slices, line["version"]))
            if "refused" in line:
                refused.update(dict.fromkeys(slices, line["refused"]))
    if not counted:
        why = "that process was given up before" if lost else "it has not been pushed, or its rounds are open"
        if fenced:
            why = f"{len(fenced)} slices have refused it, as it came after that process was given up"
        return f"{who} is counted nowhere: {why}"
    versions = sorted(set(counted.values()))
    said = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    text = f"{who} is counted in {said} of {len(counted)} slices"
    if missing := lost - counted.keys():
        text += f", and not in {len(missing)} others ({_named(keys[number] for number in sorted(missing))})"
    if refused:
        text += f"; {len(refused)} of them were refused: {next(iter(refused.values()))}"
    if late := fenced - counted.keys():
        text += f"; {len(late)} slices have refused it, as it came after that process was given up"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist ledger``, and as `command` what answers."""
    parser.add_argument("folder", metavar="DIR", help="the folder that KVDIST_LEDGER named during the job")
    parser.add_argument("--worker", type=int, required=True, metavar="RANK", help="rank of the worker that pushed")
    parser.add_argument("--push", type=int, required=True, metavar="N", help="which of its pushes, from 1")
    parser.set_defaults(command=_answer)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    try:
        return fate(Path(expanded(options.folder)), options.worker, options.push), 0
    except FileNotFoundError as error:
        return str(error), 1


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"there are no ledgers in {folder}: start the job with KVDIST_LEDGER={folder}")
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            yield json.loads(line)


def _rows(contributions: Sequence[Any]) -> list[list[int]]:
    return [[one.member.node.rank, one.member.incarnation, one.step + 1] for one in contributions]


def _named(keys: Iterator[int | str]) -> str:
    names = [name_of(key) for key in dict.fromkeys(keys)]
    return ", ".join(names[:NAMED_MAX]) + (", …" if len(names) > NAMED_MAX else "")
