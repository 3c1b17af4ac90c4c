"""All slices of a server: what pushes and pulls do to them, and who is answered what. Pure, as the server is.

Walk of a push: `push` → every slice is compared with the table (`_checked`) → `Group.offer`, where the same run of
small slices comes from every worker, else `Shard.offer` → when full `close` → everybody who waited has an entry in its
`Answers`. What arises from one message for one worker leaves in as few messages as can be (`take_answers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from kvdist.checkpoint.slices import ReadSlice, SavedSlice, WantedSlice
from kvdist.config import Limits
from kvdist.core import slice_saving, state_parts
from kvdist.core.answers import Answers
from kvdist.core.cuts import Cuts
from kvdist.core.effects import Effect, Persisted, Send
from kvdist.core.forms import Forms
from kvdist.core.group import Group, GroupPull, GroupPush, joined_stretches
from kvdist.core.groups import Groups
from kvdist.core.halves import Halves
from kvdist.core.joined import obstacle_to, slices_of
from kvdist.core.policy import POLICIES
from kvdist.core.rounds import Rounds
from kvdist.core.shard import Allocate, Block, Buffer, Contribution, PullRequest, Setting, Shard, Verdict, setting_of
from kvdist.core.sharding import slices_of as cut_slices
from kvdist.core.traffic import Traffic
from kvdist.core.whole import Wholes, contributors, next_round
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.nodes import Member, server
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.interface import Arithmetic, SliceUpdater
from kvdist.protocol.arrays import U8, U32, Arrays
from kvdist.protocol.layout import PayloadView, padded_sizes, stretches, views
from kvdist.protocol.messages import (
    Assign,
    ErrorCode,
    InitValues,
    JoinedPush,
    Outcome,
    Pull,
    PullState,
    Push,
    ReplaceState,
    ReplaceValues,
    Waiting,
)
from kvdist.protocol.saving import Mark


class Table:
    """The slices that live on one server.

    Args:
        limits: sizes and times.
        arithmetic: who computes.
        allocate: gives memory for values.
    """

    def __init__(self, limits: Limits, arithmetic: Arithmetic, allocate: Allocate) -> None:
        self.limits = limits
        self.kernels = arithmetic.kernels
        self.shards: dict[int, Shard] = {}
        self.workers: Mapping[int, Member] = {}
        """Rank → the live worker there."""
        self.far: set[Member] = set()
        """The workers to whom values cross a network."""
        self.traffic = Traffic()
        self.rounds = Rounds()
        self._name = "this server"
        self._allocate = allocate
        self._new_updater = arithmetic.new_updater
        self._updaters: dict[int, SliceUpdater] = {}
        """Store → what updates its values; absent while a sum replaces them."""
        self._store_of: dict[int, int] = {}
        """Slice → its store."""
        self._forms = Forms()
        self._answers: dict[Member, Answers] = {}
        self._groups = Groups()
        self._wholes = Wholes()
        self._open: set[int] = set()
        """Slices with an open round or waiting pulls."""
        self.cuts = Cuts()
        self.cuts.add(self)

    # What the scheduler decides.

    def assign(self, message: Assign, rank: int, num_servers: int) -> None:
        """Keep the slices of these keys that are cut for the server of this rank."""
        self._name = str(server(rank))
        policy = POLICIES[message.mode]
        placement = message.placement
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        places = (placement.first_slices, placement.homes)
        dtype_of = {code: DType(code) for code in set(message.dtypes)}
        entered: list[tuple[int, int, DType]] = []
        for key, shape, code, pulled_as, form, first, home in zip(*columns, *places, strict=True):
            if form or (home != rank and home < num_servers):
                continue  # a table of rows, or all of it is kept by another server
            dtype, mine = dtype_of[code], []
            for piece in cut_slices(shape, dtype.itemsize, form, home, num_servers, first, placement.slice_bytes):
                if piece.server == rank and piece.number not in self.shards:
                    shard = Shard(
                        key, piece.number, dtype, piece.count, policy, self._allocate, shape=shape, start=piece.start
                    )
                    if pulled_as != code:
                        shard.halves = Halves(DType(pulled_as), [piece.count], self.kernels, self._allocate)
                    self.shards[piece.number] = shard
                    self._store_of[piece.number] = message.store
                    entered.append((piece.number, piece.count, dtype))
                    mine.append(shard)
            self._wholes.add(mine)
        self._forms.enter(entered)

    def set_optimizer(self, store: int, optimizer: Optimizer, now: float) -> None:
        """From now on pushes to the store are gradients. Raises `DeviceError` where the optimizer cannot run."""
        updater = self._new_updater(optimizer)
        self._take_all_apart(now)
        self._updaters[store] = updater

    def roster(self, workers: Mapping[int, Member], now: float) -> None:
        """These are the live workers. Who left cannot be waited for any more, and waits for nothing itself."""
        self._take_all_apart(now)
        gone = self.workers.keys() - workers.keys()
        self.workers = workers
        for number in sorted(self._open):
            shard = self.shards[number]
            shard.pulls = [pull for pull in shard.pulls if pull.member.node.rank not in gone]
            self._close_if_ready(shard, now)

    # Checkpoints: see `Keeper`.

    def taken(self, number: int, contents: Sequence[str]) -> tuple[SavedSlice, Buffer | None]:
        """A slice as it is now."""
        return slice_saving.taken(self.shards[number], self._updaters.get(self._store_of[number]), contents)

    def wanted(self, store: int) -> list[WantedSlice]:
        """What a checkpoint must have of the arrays of a store."""
        mine = [shard for number, shard in self.shards.items() if self._store_of[number] == store]
        return [slice_saving.wanted(shard, self._updaters.get(store)) for shard in mine]

    def restore(self, store: int, found: Sequence[ReadSlice], now: float) -> None:
        """Go on from what was found."""
        self._take_all_apart(now)
        self._forget_departed(store)
        for one in found:
            slice_saving.restore(self.shards[one.number], one, self._updaters.get(store))

    def _forget_departed(self, store: int) -> None:
        """What those who have left have pushed to open rounds was for the values that there were until now."""
        for number in [number for number in self._open if self._store_of[number] == store]:
            shard = self.shards[number]
            shard.slots = {rank: one for rank, one in shard.slots.items() if rank in self.workers}
            if not shard.slots and not shard.pulls:
                self._open.discard(number)

    def persisted(self, event: Persisted) -> list[Effect]:
        """A file of a checkpoint is written, or could not be."""
        return self.cuts.persisted(event, self.workers, self._name)

    def explain(self, now: float) -> str | None:
        """The oldest open round, and who is missing in it."""
        rounds = [
            (shard.open_since, shard.number, shard.version, self._present(shard))
            for shard in (self.shards[number] for number in self._open)
            if shard.slots
        ] + [
            (group.open_since, int(group.ids[0]), int(group.versions[0]), group.slots.keys())
            for group in self._groups
            if group.slots
        ]
        if not rounds:
            return None
        since, number, version, present = min(rounds, key=lambda one: one[:2])
        shard = self.shards[number]
        missing = ", ".join(f"worker-{rank}" for rank in shard.policy.missing(present, self.workers.keys()))
        return f"round {version} of key {shard.key!r} has waited {now - since:.1f} s for {missing}"

    def validate(self) -> None:
        """Check every invariant."""
        assert not self._answers, "answers leave with the message that caused them"
        self.cuts.validate(self.workers)
        for group in self._groups:
            group.validate(self.workers.keys())
        for number, shard in self.shards.items():
            if number in self._groups:
                continue
            alone = self._norms_for(shard) is None
            shard.validate(self.workers.keys(), alone)
            assert alone or not next_round(self._wholes.of(shard), self.workers.keys()), "a full round is closed"
            waits = bool(shard.slots or shard.pulls)
            assert not waits or number in self._open, "who waits is known"

    # What workers say.

    def mark(self, sender: Member, message: Mark, now: float) -> None:
        """A checkpoint is to have the sender's pushes up to here."""
        self._take_apart(message.ids, now)
        self.cuts.mark(sender, message, self.workers, self._name)

    def initialise(self, sender: Member, message: InitValues | ReplaceValues, now: float) -> None:
        payload = PayloadView(message.arrays)
        self._take_apart(message.ids, now)
        arrays = payload.arrays(0, len(message.ids))
        answers, replaces = self._to(sender), isinstance(message, ReplaceValues)
        block = Block(padded_sizes(message.arrays.dtypes, message.arrays.counts), self._allocate)
        ids, runs = message.ids.tolist(), message.runs.tolist()
        for i in self._checked(sender, message.runs, message.ids, message.arrays):
            shard = self.shards[ids[i]]
            put = shard.replace if replaces else shard.initialise
            put(arrays[i], block.allocate)
            if self.cuts.awaited:
                self.cuts.look(shard, self.workers)
            answers.counted(runs[i], shard, Outcome.INITIALISED)
            if shard.number in self._open:
                self._close_if_ready(shard, now)

    def pull_state(self, sender: Member, message: PullState, now: float) -> None:
        """Send parts of what the optimizer remembers. The sender waits for none of its pushes."""
        self._take_apart(message.ids, now)
        for i in self._checked(sender, message.runs, message.ids):
            shard, part, run = self.shards[int(message.ids[i])], int(message.parts[i]), int(message.runs[i])
            updater = self._updaters.get(self._store_of[shard.number])
            try:
                if shard.counted.get(sender.node.rank, 0) < message.steps[i]:
                    raise PushRefused(f"a push of {sender} to key {shard.key!r} is still under way: pull before")
                with self.kernels.active():
                    found = state_parts.read(shard, updater, part, self.kernels)
            except PushRefused as error:
                self._to(sender).refuse(run, shard.number, ErrorCode.REFUSED, str(error))
            else:
                dtype = DType.FLOAT64 if part == state_parts.NUMBERS else state_parts.wide(shard.dtype)
                self._to(sender).state(sender, run, shard, dtype, found)

    def replace_state(self, sender: Member, message: ReplaceState, now: float) -> None:
        """Take parts of what the optimizer remembers in place of the present ones."""
        arrays = views(message.arrays)
        self._take_apart(message.ids, now)
        for i in self._checked(sender, message.runs, message.ids):
            shard, part = self.shards[int(message.ids[i])], int(message.parts[i])
            updater = self._updaters.get(self._store_of[shard.number])
            try:
                with self.kernels.active():
                    state_parts.replace(shard, updater, part, arrays[i], self.kernels)
            except PushRefused as error:
                self._to(sender).refuse(int(message.runs[i]), shard.number, ErrorCode.REFUSED, str(error))
            else:
                self._to(sender).counted(int(message.runs[i]), shard, Outcome.INITIALISED)

    def push(self, sender: Member, message: Push, now: float) -> None:
        payload = PayloadView(message.arrays)
        settings = [setting_of(numbers) for numbers in message.settings]
        good = self._checked(sender, message.runs, message.ids, message.arrays, message.flags)
        for begin, end in joined_stretches(message.runs):
            stretch = slice(begin, end)
            whole = len(good) == len(message.ids)
            push = GroupPush.of(sender, message, stretch, payload, settings) if whole else None
            group = None if push is None else self._group_for(message.ids[stretch], push)
            if group is not None and push is not None:
                group.offer(push, now)
                self._close_group_if_ready(group, now)
            else:
                self._take_apart(message.ids[stretch], now)
                self._push_slices(sender, message, [i for i in good if begin <= i < end], payload, settings, now)

    def push_joined(self, sender: Member, message: JoinedPush, neighbours: Mapping[int, Member], now: float) -> None:
        """The contributions of several workers of the sender's host; the sender is answered for all of them.

        Args:
            sender: who sums for its host.
            message: one row per slice and worker.
            neighbours: rank → worker of that host, also those that have left since.
            now: the time.
        """
        self._take_apart(message.ids, now)
        for joined in slices_of(sender, message, neighbours):
            shard = self.shards.get(joined.number)
            obstacle = f"slice {joined.number} is not kept by {self._name}"
            if shard is not None:
                obstacle = obstacle_to(joined, shard)
            if shard is None or obstacle:
                self._to(sender).refuse(joined.run, joined.number, ErrorCode.REFUSED, obstacle)
                continue
            try:
                verdict = shard.offer_joined(joined.contributions, now)
            except PushRefused as error:
                self._to(sender).refuse(joined.run, joined.number, ErrorCode.REFUSED, str(error))
                continue
            if verdict is Verdict.ACCEPTED:
                self._open.add(joined.number)
                self._close_if_ready(shard, now)
            else:
                for contribution in joined.contributions:
                    self._answer_contribution(shard, contribution)

    def _group_for(self, ids: U32, push: GroupPush) -> Group | None:
        """The group of these slices, made now if need be; None if the contribution is not for one."""
        group = self._groups.find(ids)
        if group is not None:
            return group if group.fits(push) else None
        if not self._groups.is_worth_it(ids) or self._groups.of(ids) or self.cuts.awaits(ids):
            return None
        shards = [self.shards[number] for number in ids.tolist()]
        if any(shard.slots or shard.pulls or shard.published is None for shard in shards):
            return None
        if len({shard.outgoing_dtype for shard in shards}) > 1:
            return None
        stores = {self._store_of[shard.number] for shard in shards}
        updater = self._updaters.get(min(stores))
        if len(stores) > 1 or len(set(ids.tolist())) < len(ids):
            return None
        if updater is not None and not updater.joinable(ids.tolist()):
            return None
        group = Group(shards, ids.copy(), shards[0].dtype, updater, self._allocate)
        self._groups.add(group)
        return group if group.fits(push) else None

    def _push_slices(
        self,
        sender: Member,
        message: Push,
        positions: Sequence[int],
        payload: PayloadView,
        settings: Sequence[Setting],
        now: float,
    ) -> None:
        if not positions:
            return
        first, last = positions[0], positions[-1] + 1
        arrays = payload.arrays(first, last)
        columns = (message.runs, message.ids, message.steps, message.versions, message.samples, message.flags)
        runs, ids, steps, versions, samples, flags = (column[first:last].tolist() for column in columns)
        setting_of = message.setting_of[first:last].tolist()
        for i in (position - first for position in positions):
            shard = self.shards[ids[i]]
            contribution = Contribution(
                sender, runs[i], steps[i], versions[i], samples[i], flags[i], settings[setting_of[i]], arrays[i],
                message.pull,
            )  # fmt: skip
            try:
                verdict = shard.offer(contribution, now)
            except PushRefused as error:
                self._to(sender).refuse(runs[i], ids[i], ErrorCode.REFUSED, str(error))
                continue
            if verdict is Verdict.ACCEPTED:
                self._open.add(ids[i])
                self._close_if_ready(shard, now)
            elif verdict is Verdict.ALREADY_COUNTED:
                self._answer_contribution(shard, contribution)

    def pull(self, sender: Member, message: Pull, now: float) -> None:
        good = self._checked(sender, message.runs, message.ids)
        for begin, end in stretches(message.runs):
            stretch = slice(begin, end)
            group = self._groups.find(message.ids[stretch])
            pull = GroupPull(sender, int(message.runs[begin]), message.steps[stretch], message.versions[stretch])
            if group is not None and group.is_even(pull):
                group.open_since = group.open_since if group.slots or group.pulls else now
                group.pulls.append(pull)
                self._answer_group_pulls(group)
            else:
                self._take_apart(message.ids[stretch], now)
                self._pull_slices(sender, message, [i for i in good if begin <= i < end], now)

    def _pull_slices(self, sender: Member, message: Pull, positions: Sequence[int], now: float) -> None:
        for i in positions:
            shard = self.shards[int(message.ids[i])]
            if not shard.pulls:
                shard.open_since = shard.open_since if shard.slots else now
            pull = PullRequest(sender, int(message.runs[i]), int(message.steps[i]), int(message.versions[i]))
            shard.pulls.append(pull)
            self._answer_pulls(shard)
            if shard.pulls:
                self._open.add(shard.number)

    def _checked(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Sequence[int]:
        """The positions whose slice is kept here and whose array has its shape; the others are refused."""
        if self._forms.fit(ids, arrays):
            return range(len(ids))
        wrong = dict(self._forms.misfits(ids, arrays, flags))
        for i, is_kept in wrong.items():
            what = "has another size or dtype than was declared" if is_kept else f"is not kept by {self._name}"
            self._to(sender).refuse(int(runs[i]), int(ids[i]), ErrorCode.REFUSED, f"slice {int(ids[i])} {what}")
        return [i for i in range(len(ids)) if i not in wrong]

    def _close_if_ready(self, shard: Shard, now: float) -> None:
        updater = self._norms_for(shard)
        if updater is not None:
            self._close_whole_if_ready(self._wholes.of(shard), updater)
            return
        updater = self._updaters.get(self._store_of[shard.number])
        while shard.is_ready(self.workers.keys()):
            contributions = list(shard.slots.values())
            try:
                contributions = self.rounds.close_slice(shard, updater, self.kernels)
            except (OptimizerMismatch, PushRefused) as error:
                self._refuse(shard, contributions, error)
            else:
                self._answer_round(shard, contributions)
            if self.cuts.awaited:
                self.cuts.look(shard, self.workers)
        self._answer_open(shard)

    def _norms_for(self, shard: Shard) -> SliceUpdater | None:
        """What updates the shard, if that needs to see all slices of the parameter."""
        updater = self._updaters.get(self._store_of[shard.number])
        return updater if updater is not None and updater.optimizer.needs_norms else None

    def _present(self, shard: Shard) -> Set[int]:
        """The ranks that an open round need not wait for."""
        return shard.slots.keys() if self._norms_for(shard) is None else contributors(self._wholes.of(shard))

    def _close_whole_if_ready(self, shards: Sequence[Shard], updater: SliceUpdater) -> None:
        while rounds := next_round(shards, self.workers.keys()):
            try:
                self.rounds.close_whole(shards, rounds, updater)
            except (OptimizerMismatch, PushRefused) as error:
                for shard, contributions in zip(shards, rounds, strict=True):
                    self._refuse(shard, contributions, error)
            else:
                for shard, contributions in zip(shards, rounds, strict=True):
                    self._answer_round(shard, contributions)
            for shard in shards if self.cuts.awaited else ():
                self.cuts.look(shard, self.workers)
        for shard in shards:
            self._answer_open(shard)

    def _refuse(self, shard: Shard, contributions: Sequence[Contribution], error: Exception) -> None:
        mismatch = isinstance(error, OptimizerMismatch)
        code = ErrorCode.OPTIMIZER_MISMATCH if mismatch else ErrorCode.REFUSED
        for contribution in contributions:
            shard.refused[contribution.member.node.rank] = (contribution.step, (code, str(error)))
            self._answer_contribution(shard, contribution)

    def _answer_round(self, shard: Shard, contributions: Sequence[Contribution]) -> None:
        for contribution in contributions:
            self.traffic.summed += 0 if contribution.is_empty else contribution.values.nbytes
            self._answer_contribution(shard, contribution)

    def _answer_open(self, shard: Shard) -> None:
        self._answer_pulls(shard)
        if not shard.slots and not shard.pulls:
            self._open.discard(shard.number)

    def _close_group_if_ready(self, group: Group, now: float) -> None:
        while group.is_ready(self.workers.keys()):
            pushes = self.rounds.close_group(group, self.kernels)
            if pushes is None:
                self._dissolve(group, now)
                return
            for push in pushes:
                self.traffic.summed += push.values.nbytes
                self._to(push.member).group(push.member, push.run, group, push.pull)
        self._answer_group_pulls(group)

    def _take_all_apart(self, now: float) -> None:
        for group in self._groups:
            self._dissolve(group, now)

    def _take_apart(self, ids: U32, now: float) -> None:
        """These slices are about to be looked at one by one."""
        for group in self._groups.of(ids):
            self._dissolve(group, now)

    def _dissolve(self, group: Group, now: float) -> None:
        self._groups.dissolve(group)
        for shard in group.shards:
            if shard.slots or shard.pulls:
                self._open.add(shard.number)
                self._close_if_ready(shard, now)

    # What workers are told.

    def _to(self, member: Member) -> Answers:
        answers = self._answers.get(member)
        if answers is None:
            answers = self._answers[member] = Answers()
        return answers

    def _answer_contribution(self, shard: Shard, contribution: Contribution) -> None:
        if contribution.silent:
            return
        answers = self._to(contribution.member)
        if (refusal := shard.refusal_of(contribution)) is not None:
            answers.refuse(contribution.run, shard.number, *refusal)
        elif contribution.pull and contribution.holds and shard.halves is None:
            answers.held(contribution.run, shard)
        elif contribution.pull:
            answers.value(contribution.run, shard)
        else:
            answers.counted(contribution.run, shard, Outcome.COUNTED)

    def _answer_pulls(self, shard: Shard) -> None:
        for pull in shard.take_satisfied_pulls():
            self._to(pull.member).value(pull.run, shard)

    def _answer_group_pulls(self, group: Group) -> None:
        for pull in group.take_satisfied_pulls():
            self._to(pull.member).group(pull.member, pull.run, group, with_values=True)

    def take_answers(self) -> list[Effect]:
        effects: list[Effect] = []
        for member, answers in self._answers.items():
            if self.workers.get(member.node.rank) != member:
                continue  # It left, or was replaced, while others were still in the round.
            effects += answers.messages(member, self.limits.slice_bytes, self.traffic, member not in self.far)
        self._answers = {}
        if self.cuts.ready:
            effects += self.cuts.take_effects(self.workers, self._name)
        return effects

    def hints(self, now: float) -> list[Effect]:
        """Tell those who have waited long in which round, and for whom. Groups among them are taken apart for that."""
        hints: dict[Member, Waiting] = {}
        for group in self._groups:
            if (group.slots or group.pulls) and now - group.open_since >= self.limits.explain_after_s:
                self._dissolve(group, now)
        for number in sorted(self._open):
            shard = self.shards[number]
            if now - shard.open_since < self.limits.explain_after_s:
                continue
            missing = shard.policy.missing(self._present(shard), self.workers.keys()) if shard.slots else ()
            subject = f"round {shard.version} of key {shard.key!r}"
            if shard.published is None:
                subject, missing = f"the first value of key {shard.key!r}", (0,)
            waiters = [c.member for c in shard.slots.values()] + [pull.member for pull in shard.pulls]
            for member in waiters:
                hints.setdefault(member, Waiting(subject, missing, now - shard.open_since))
        return [Send(member, hint) for member, hint in hints.items()]
