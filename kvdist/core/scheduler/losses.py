"""Lost workers: whether the others go on, and the account of the pushes of the lost. Pure.

Invariants:

* A loss ends the job unless the policy is to continue or to wait, the cluster has been complete, and other workers are
  live, or may rejoin in time. The loss of a server ends it unless another server has a copy of all its slices.
* The same failure reported by two workers ends the job: a fault of the program would end them all in turn.
* Every server accounts once, for each roster with lost workers, for the number of their pushes that its slices have
  counted. The account is final, as no more of their pushes are counted. The scheduler sends the combined accounts to
  all servers, because an example that counts in some slices is regarded as used in all.
* Only the worker that was chosen to initialise a key has its first value. If it is lost before, the job ends.
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
    """Accounts of the servers for the lost workers of a roster."""

    heard: set[Member] = field(default_factory=set)
    fates: dict[tuple[int, int, int], msg.Fate] = field(default_factory=dict)
    """(rank, incarnation, store) → fate over all servers."""
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
    """Leases of lost workers."""

    def account(self, epoch: int, fates: Iterable[msg.Fate]) -> list[fx.Effect]:
        """Handle the accounts of all servers for the lost workers of the roster of this epoch."""


class Losses:
    """All lost workers.

    Args:
        membership: members of the cluster.
        keys: keys of the cluster, with the workers that initialise them.
        on_loss: policy for losses.
        returns: whether the last worker may rejoin after its loss.
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
        """Failures that lost workers have reported themselves."""
        self._accounts: dict[int, LossAccount] = {}
        """Epoch of a roster → accounts of the servers."""
        self._taking_over: dict[Member, int] = {}
        """Server that takes over slices of a lost server → epoch of the roster with this failover."""
        self._come_late: dict[Member, int] = {}
        """Server that replaces a lost server → epoch of its first roster."""
        self.leases: AccountedLeases | None = None
        """Leases of lost workers, if examples are leased."""

    def may_go_on(self, member: Member, said: str) -> bool:
        """Return whether the others go on without a process that has reported the failure `said`, or ''."""
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
        """Record the failure that a lost worker has reported, or ''."""
        self._said |= {said} - {""}

    def account(self, server: Member, message: msg.Settled) -> list[fx.Effect]:
        """Handle a server's account for the lost workers of a roster: it counts no more of their pushes."""
        if message.epoch >= self._taking_over.get(server, fx.NEVER):
            del self._taking_over[server]
            for account in self._accounts.values():  # which the lost server may not have reported
                account.add_slices(message)
        else:
            self._accounts.setdefault(message.epoch, LossAccount()).add(server, message)
        return self.finish()

    def takes_over(self, server: Member) -> None:
        """Expect a second account from a server that takes over the slices of a lost server with the next roster."""
        self._taking_over[server] = self._membership.epoch + 1

    def exempt(self, server: Member) -> None:
        """Expect no account of earlier losses from a server that replaces a lost server."""
        self._come_late[server] = self._membership.epoch + 1

    def finish(self) -> list[fx.Effect]:
        """Finish the losses for which all servers have accounted."""
        servers = self._membership.servers.values()
        if self._taking_over.keys() & set(servers):
            return []
        ended = [
            (epoch, account)
            for epoch, account in sorted(self._accounts.items())
            if {one for one in servers if self._come_late.get(one, 0) <= epoch} <= account.heard
        ]
        effects: list[fx.Effect] = []
        for epoch, account in ended:
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
