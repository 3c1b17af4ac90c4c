"""The contributions of one host's workers, collected by one of them until all are there. Pure, as the worker is.

Where servers are on other hosts, the workers of a host give their pushes to the one with the lowest rank, its leader,
and one push for all of them crosses the network. Rules that hold here:

* A slice is forwarded when every live worker of the host has contributed, the leader among them, and never before. So
  a forwarded push never makes a server wait for somebody of this host.
* What stays incomplete is *handed back*: each sends its own contribution to the server, which then knows who is late.
  What was forwarded is never handed back, for a sum cannot be taken apart.
* A worker of the host has one push of a slice under way, as towards a server, and its push counter says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvdist.core.machine import NEVER
from kvdist.core.round import Setting, setting_of
from kvdist.core.server.buffers import Bits
from kvdist.core.worker.outbox import Part, Run
from kvdist.nodes import Member
from kvdist.protocol.arrays import Arrays, PayloadView
from kvdist.protocol.messages import Flag, Push

_HOLD = int(Flag.HOLD)


@dataclass(slots=True, eq=False)
class Share:
    """What one worker of this host adds to the next version of a slice."""

    member: Member
    run: int
    step: int
    version: int
    samples: int
    flags: int
    setting: Setting
    dtype: int
    values: Bits
    """As they lie in that worker's memory, or where they arrived."""
    pull: bool
    own: Run | None = None
    """The leader's run, for its own share."""


@dataclass(slots=True, eq=False)
class HostRound:
    """The shares of one slice that are there."""

    number: int
    since: float
    shares: dict[int, Share] = field(default_factory=dict)
    """Worker rank → its share."""


Slices = list[tuple[int, int]]
"""(run, slice), …"""


class HostSum:
    """What a leader has of its host's pushes.

    Args:
        me: the leader.
        members: rank → worker of this host, the leader among them.
        patience_s: how long a slice may stay incomplete before it is handed back.
    """

    def __init__(self, me: Member, members: Mapping[int, Member], patience_s: float) -> None:
        self.me = me
        self.members = dict(members)
        self.full: list[HostRound] = []
        """To be forwarded."""
        self.own_back: dict[int, tuple[Run, list[int]]] = {}
        """Run → its slices that the leader has to send by themselves."""
        self.back: dict[Member, Slices] = {}
        """What the others have to send by themselves."""
        self.is_over = False
        """Nothing is collected any more."""
        self._patience_s = patience_s
        self._rounds: dict[int, HostRound] = {}
        """Slice → its open round, the oldest first."""
        self._alone_up_to: dict[int, int] = {}
        """Slice → the last push counter whose contributions were handed back."""

    @property
    def deadline(self) -> float:
        """When the oldest open round is handed back."""
        oldest = next(iter(self._rounds.values()), None)
        return NEVER if oldest is None else oldest.since + self._patience_s

    def offer_own(self, part: Part, now: float) -> None:
        """The leader's own contributions."""
        arrays = Arrays(part.dtypes, part.counts, part.payload())
        run = part.run
        columns = (part.ids, part.steps, part.versions, part.flags, part.setting_of, part.dtypes)
        settings = [setting_of(numbers) for numbers in run.data.settings]
        values = PayloadView(arrays).arrays(0, len(part.ids))
        for number, step, version, flags, setting, dtype, array in zip(
            *(column.tolist() for column in columns), values, strict=True
        ):
            self._offer(
                number,
                Share(
                    self.me, run.number, step, version, run.data.samples, flags, settings[setting], dtype, array,
                    run.kind.pulls, run,
                ),
                now,
            )  # fmt: skip

    def offer(self, sender: Member, message: Push, now: float) -> None:
        """Another worker's contributions.

        Raises:
            ValueError: the payload is not as long as the message says.
        """
        columns = (
            message.ids, message.runs, message.steps, message.versions, message.samples, message.flags,
            message.setting_of, message.arrays.dtypes,
        )  # fmt: skip
        settings = [setting_of(numbers) for numbers in message.settings]
        values = PayloadView(message.arrays).arrays(0, len(message.ids))
        for number, run, step, version, samples, flags, setting, dtype, array in zip(
            *(column.tolist() for column in columns), values, strict=True
        ):
            share = Share(sender, run, step, version, samples, flags, settings[setting], dtype, array, message.pull)
            self._offer(number, share, now)

    def set_members(self, members: Mapping[int, Member]) -> None:
        """These workers of the host are alive. Who left cannot be waited for any more."""
        self.members = dict(members)
        for host_round in [one for one in self._rounds.values() if one.shares.keys() >= self.members.keys()]:
            self._complete(host_round)

    def hand_back_late(self, now: float) -> None:
        """Hand back what has been incomplete for too long."""
        for host_round in list(self._rounds.values()):
            if host_round.since + self._patience_s > now:
                break
            self.hand_back(host_round)

    def hand_back_of(self, member: Member) -> None:
        """Hand back what is incomplete and has a share of this worker, which wants to leave."""
        for host_round in [one for one in self._rounds.values() if member.node.rank in one.shares]:
            self.hand_back(host_round)

    def hand_back(self, host_round: HostRound) -> None:
        """Everybody sends this slice by itself."""
        self._rounds.pop(host_round.number, None)
        for share in host_round.shares.values():
            self._return(host_round.number, share)
            last = self._alone_up_to.get(host_round.number, -1)
            self._alone_up_to[host_round.number] = max(last, share.step)

    def end(self) -> None:
        """Hand back everything that is incomplete, and whatever comes from now on."""
        self.is_over = True
        for host_round in list(self._rounds.values()):
            self.hand_back(host_round)

    @property
    def awaited(self) -> set[int]:
        """The ranks that the oldest open round waits for."""
        oldest = next(iter(self._rounds.values()), None)
        return set() if oldest is None else self.members.keys() - oldest.shares.keys()

    def validate(self) -> None:
        """Check every invariant."""
        for number, host_round in self._rounds.items():
            present = host_round.shares.keys()
            assert number == host_round.number
            assert present, "a round begins with a share"
            assert not present >= self.members.keys(), "a full round is forwarded at once"
            assert len({share.step for share in host_round.shares.values()}) == 1, "shares of one round, one counter"

    def _offer(self, number: int, share: Share, now: float) -> None:
        if self.is_over or share.step <= self._alone_up_to.get(number, -1):
            self._return(number, share)
            return
        host_round = self._rounds.get(number)
        if host_round is None:
            host_round = self._rounds[number] = HostRound(number, now)
        host_round.shares[share.member.node.rank] = share
        if share.flags & _HOLD:
            self.hand_back(host_round)  # it is the server's memory that is to be read, so the server must know by whom
        elif host_round.shares.keys() >= self.members.keys():
            self._complete(host_round)

    def _complete(self, host_round: HostRound) -> None:
        del self._rounds[host_round.number]
        self.full.append(host_round)

    def _return(self, number: int, share: Share) -> None:
        if share.own is not None:
            self.own_back.setdefault(share.run, (share.own, []))[1].append(number)
        else:
            self.back.setdefault(share.member, []).append((share.run, number))


def parts_of(returned: Iterable[tuple[Run, list[int]]]) -> list[Part]:
    """Runs and slices of theirs, as what an outbox takes."""
    return [Part(run, sorted(run.data.plan.positions[number] for number in numbers)) for run, numbers in returned]
