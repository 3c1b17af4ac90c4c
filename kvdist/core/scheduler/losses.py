"""Workers that the cluster has given up: whether the others go on, and what became of what those had pushed. Pure.

Rules that hold here:

* A loss ends the job unless its policy says that the others go on or wait, the cluster has been complete, and others
  are there, or may come back in time. That of a server does, unless another one has a copy of all that it has.
* The same failure said by two processes ends the job: a mistake of the program would take one worker after the other.
* Every server says once, for each roster that gives somebody up, how many pushes of theirs it has counted in its
  slices. That never becomes untrue, as it counts nothing of them any more. The scheduler says to all servers what all
  of them have said, as an example that counts in some slices counts as seen in all.
* Only the worker that was told to give a key its first value has it. If that is lost before, the job ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvdist.core import machine as fx
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.nodes import Member, Role, worker
from kvdist.protocol import messages as msg


@dataclass(slots=True)
class LossAccount:
    """What servers have said of one roster that gives workers up."""

    heard: set[Member] = field(default_factory=set)
    fates: dict[tuple[int, int, int], msg.Fate] = field(default_factory=dict)
    """(rank, incarnation, store) → over all servers."""
    valueless: list[int] = field(default_factory=list)

    def add(self, server: Member, message: msg.Settled) -> None:
        """Add the account of a server."""
        self.heard.add(server)
        self.add_slices(message)

    def add_slices(self, message: msg.Settled) -> None:
        """Add the account of some slices."""
        self.valueless += message.valueless.tolist()
        for fate in message.fates:
            of = (fate.rank, fate.incarnation, fate.store)
            before = self.fates.get(of)
            self.fates[of] = fate if before is None else _joined(before, fate)


class AccountedLeases(Protocol):
    """Knows what lost workers had leased."""

    def account(self, epoch: int, fates: Iterable[msg.Fate]) -> list[fx.Effect]:
        """All servers have applied this roster, and say so of those that it gives up."""


class Losses:
    """All workers that were given up.

    Args:
        membership: who is in the cluster.
        keys: knows who gives first values.
        on_loss: the policy.
        returns: whether one may come back that was the last.
        doomed: ends the job, because a key can never get its first value from this worker.
    """

    def __init__(
        self,
        membership: Membership,
        keys: Keys,
        on_loss: msg.OnLoss,
        returns: bool,
        doomed: Callable[[int | str, Member], list[fx.Effect]],
    ) -> None:
        self._membership = membership
        self._keys = keys
        self._on_loss = on_loss
        self._may_rejoin = returns
        self._doomed = doomed
        self._said: set[str] = set()
        """Why lost workers had to end, in their own words."""
        self._accounts: dict[int, LossAccount] = {}
        """By epoch."""
        self._taking_over: dict[Member, float] = {}
        """Servers that take over the slices of lost ones → the epoch of the roster that tells them."""
        self._come_late: dict[Member, int] = {}
        """Servers that have taken the place of others → the first roster that they hear."""
        self.leases: AccountedLeases | None = None
        """What lost workers had leased, if anything is leased at all."""

    def may_go_on(self, member: Member, said: str) -> bool:
        """Whether the others go on without this process, which has `said` why it must end, if anything."""
        there = self._membership
        if self._on_loss is msg.OnLoss.FAIL or not there.is_complete:
            return False
        if member.node.role is Role.SERVER:
            return there.may_lose(member.node)
        if said in self._said:
            return False
        others = (there.there.keys() | there.newcomers.keys()) - {member.node}
        return bool(others) or self._may_rejoin or member.node in there.left

    def note(self, said: str) -> None:
        """A worker is given up that has `said` why, if anything."""
        self._said |= {said} - {""}

    def account(self, server: Member, message: msg.Settled) -> list[fx.Effect]:
        """A server has accounted for the workers that a roster gives up, and counts no more of their pushes."""
        if message.epoch >= self._taking_over.get(server, fx.NEVER):
            del self._taking_over[server]
            for account in self._accounts.values():  # what the lost server may not have said
                account.add_slices(message)
        else:
            self._accounts.setdefault(message.epoch, LossAccount()).add(server, message)
        return self.finish()

    def takes_over(self, server: Member) -> None:
        """Expect a second account from this server, which takes over the slices of a lost one with the next roster."""
        self._taking_over[server] = self._membership.epoch + 1

    def exempt(self, server: Member) -> None:
        """Expect no account of earlier losses from this server, which replaces a lost one."""
        self._come_late[server] = self._membership.epoch + 1

    def finish(self) -> list[fx.Effect]:
        """Finish the losses that all servers have accounted for."""
        servers = self._membership.servers.values()
        ended = [
            (epoch, account)
            for epoch, account in sorted(self._accounts.items())
            if {one for one in servers if self._come_late.get(one, 0) <= epoch} <= account.heard
        ]
        effects: list[fx.Effect] = []
        for epoch, account in () if self._taking_over else ended:
            del self._accounts[epoch]
            effects += self._finish(epoch, account)
        return effects

    def _finish(self, epoch: int, account: LossAccount) -> list[fx.Effect]:
        lost = {member.node.rank: member for member in self._membership.lost if member.node.role is Role.WORKER}
        for number in account.valueless:
            giver = self._keys.giver_of(number)
            if giver in lost:
                return self._doomed(self._keys.key_of(number), lost[giver])
        fates = account.fates.values()
        effects: list[fx.Effect] = [
            fx.Log(f"{Member(worker(one.rank), one.incarnation)}: {_told(one)}") for one in fates
        ]
        if self.leases is not None:
            effects += self.leases.account(epoch, fates)
        if any(fate.examples for fate in fates):
            said = msg.Settled(epoch, tuple(fates), np.zeros(0, np.uint32))
            effects += [fx.Send(server, said) for server in self._membership.servers.values()]
        return effects


def _joined(one: msg.Fate, other: msg.Fate) -> msg.Fate:
    least, most = min(one.least, other.least), max(one.most, other.most)
    slices = sum(fate.slices for fate in (one, other) if fate.most == most)
    examples = max(one.examples, other.examples)
    return msg.Fate(one.rank, one.incarnation, one.store, least, most, slices, one.of + other.of, examples)


def _told(fate: msg.Fate) -> str:
    store = f" in store {fate.store}" if fate.store else ""
    where, whole = f"{fate.slices} of {fate.of} slices", f"its first {fate.least} pushes are in the weights"
    if fate.least < 2:
        whole = "its first push is in the weights" if fate.least else "no push of it is in the weights"
    if fate.least == fate.most:
        return f"{whole}{store}, and nothing of the next"
    if fate.least + 1 == fate.most:
        return f"{whole}{store}, and push {fate.most} in part: in {where}"
    return f"{whole}{store}, and of some keys its first {fate.most}: in {where}"
