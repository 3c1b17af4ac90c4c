"""`KVDIST_LEDGER`: the fate of every push, line by line; and `kvdist ledger`, which reads it.

Each server appends to its file in that folder, a JSON object per line. Each line has ``slices``, the numbers of some
slices, and ``key``, the key of the first of them. The lines are:

- a round was closed: ``version``, and ``counted``, a list of [rank, incarnation, number of the push, from 1];
- that round could not be applied: the same with ``refused``, the reason;
- all went back to a snapshot: ``rolled_back``, its version. Pushes counted in later versions are undone;
- workers were lost: ``lost``, a list of [rank, incarnation]. Their later pushes are not counted in these slices;
- a push of a lost worker came after that: ``fenced``, [rank, incarnation, number of the push]. It was refused.

A worker that was started again has a higher incarnation. Its pushes are numbered anew: from 1 on ``dist_async``, and in
lockstep after the round at which it has joined.

The ledger is for debugging: it has a line for each block and round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.config.paths import expanded
from kvdist.core.server.holder import Holder
from kvdist.core.server.server import Server
from kvdist.core.server.shard import LatePush
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

NAMED_MAX = 8
"""The most keys that an answer names."""
FENCED_MAX = 256
"""The most late pushes that are remembered."""


class FileLedger:
    """The ledger of one server.

    Args:
        folder: the folder of its file, created if missing.
        name: returns the name of the server.
    """

    def __init__(self, folder: Path, name: Callable[[], str]) -> None:
        self._folder = folder
        self._name = name
        self._fenced: dict[tuple[Member, int], set[int]] = {}
        """(worker, step) of the latest late pushes → the slices for which a line is written, as pushes are repeated."""

    def round_closed(self, holder: Holder, contributions: Sequence[Any]) -> None:
        """Write the contributions of a round that has been closed."""
        self._write(holder, version=holder.round.version, counted=_rows(contributions))

    def refused(self, holder: Holder, contributions: Sequence[Any], reason: str) -> None:
        """Write that a closed round could not be applied, and why."""
        self._write(holder, version=holder.round.version, counted=_rows(contributions), refused=reason)

    def dropped(self, holder: Holder, lost: Mapping[int, Member]) -> None:
        """Write that no later push of these lost workers is counted."""
        self._write(holder, lost=sorted([rank, member.incarnation] for rank, member in lost.items()))

    def rolled_back(self, holder: Holder) -> None:
        """Write the version to which a block went back."""
        self._write(holder, rolled_back=holder.round.version)

    def fenced(self, member: Member, message: LatePush, holder: Callable[[int], Holder | None]) -> None:
        """Write that a push of a lost worker has been refused, once for each slice."""
        if isinstance(message, msg.JoinedPush):
            own = [one.step for one in message.contributors if one.member == member]
            steps = np.resize(np.array(own, np.uint32), len(message.ids))
        else:
            steps = message.steps
        for step in np.unique(steps).tolist():
            there = {one: holder(one) for one in message.ids[steps == step].tolist()}
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

    def _write(self, holder: Holder, slices: Sequence[int] | None = None, **what: object) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        ids = holder.ids.tolist() if slices is None else slices
        line = {"store": holder.store, "slices": ids, "key": holder.round.key, **what}
        with (self._folder / f"{self._name()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def keep(server: Server, folder: Path) -> None:
    """Let a server write a ledger into this folder."""
    server.shard.ledger = FileLedger(folder, lambda: str(server.me))


def fate(folder: Path, rank: int, push: int) -> str:
    """Describe the fate of a worker's push, by the ledgers in a folder.

    Returns:
        A sentence. For a lost worker a line for each incarnation that may have made the push, in their order.

    Raises:
        FileNotFoundError: the folder has no ledger.
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
    # An incarnation has not made the pushes below its first counted number: earlier incarnations have.
    able = [one for one in sorted(first) if first[one] <= push] or sorted(first)[-1:] or [0]
    who = f"push {push} of worker-{rank}"
    return "\n".join(_fate(folder, rank, one, push, f"{who} (incarnation {one})" if is_lost else who) for one in able)


def _fate(folder: Path, rank: int, incarnation: int, push: int, who: str) -> str:
    """Describe the fate of a push of a single incarnation of a worker."""
    counted: dict[int, int] = {}
    refused: dict[int, str] = {}
    lost: set[int] = set()
    fenced: set[int] = set()
    keys: dict[int, int | str] = {}
    for line in _lines(folder):
        slices = line["slices"]
        if "fenced" not in line:  # the slices of a fenced push may be of many keys
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
    """Add the arguments of ``kvdist ledger``, with its function as `command`."""
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
