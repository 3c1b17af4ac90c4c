"""Lost workers: whether the others go on, and the account of the pushes of the lost. Pure.

Invariants:

* A loss ends the job unless the policy is to continue or to wait, the cluster has been complete, and other workers are
  live, or may rejoin in time. The loss of a server ends it unless another server has a copy of all its slices.
* The same failure reported by two workers ends the job: a fault of the program would end them all in turn.
* Every server accounts for the number of pushes of a lost worker that its slices have counted. The account is final, as
  no more of its pushes are counted. The rosters have the combined account until all servers know it, because an example
  that counts in some slices is regarded as used in all.
* Only the worker that was chosen to initialise a key has its first value. If it is lost before, the job ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvdist.core import machine as fx
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.nodes import Member, Role
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: loaded where it is used
    from kvdist.core.scheduler.leases import Leases


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
        self._undone: set[Member] = set()
        """Workers that were lost before servers had gone back: their account is of undone pushes."""
        self.leases: Leases | None = None
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
        others = (there.members.keys() | there.newcomers.keys()) - {member.node}
        return bool(others) or self._may_rejoin or member.node in there.left

    def note(self, said: str) -> None:
        """Record the failure that a lost worker has reported, or ''."""
        self._said |= {said} - {""}

    def roll_back(self) -> None:
        """Leave out the pushes of the workers lost so far: the rollback that begins, or is in progress, undoes them."""
        self._undone = set(self._membership.unaccounted)
        self._membership.fates.clear()

    def settle(self, member: Member) -> list[fx.Effect]:
        """Handle the account of all servers for a lost worker: they count no more of its pushes."""
        del self._membership.unaccounted[member]
        answers = self._membership.views.answers
        for number in chain.from_iterable(answer.valueless.tolist() for answer in answers):
            is_giver = self._keys.giver_of(number) == member.node.rank
            if is_giver and (doomed := self._doomed(self._keys.key_of(number), member)):
                return doomed
        if member in self._undone:
            self._undone.discard(member)
            return []
        fates: dict[int, msg.Fate] = {}
        for fate in chain.from_iterable(answer.fates for answer in answers):
            if fate.incarnation == member.incarnation:
                before = fates.get(fate.store)
                fates[fate.store] = fate if before is None else _joined(before, fate)
        effects: list[fx.Effect] = [fx.Log(f"{member}: {_told(fate)}") for fate in fates.values()]
        if self.leases is not None:
            self.leases.account(member, fates.values())
        if any(fate.examples for fate in fates.values()):
            self._membership.fates[member] = tuple(fates.values())
            self._membership.views.is_stale = True
            self._membership.views.then(partial(self._tell, member))
        return effects

    def _tell(self, member: Member) -> list[fx.Effect]:
        """Record that all servers know the account of a lost worker."""
        self._membership.fates.pop(member, None)
        return []


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
