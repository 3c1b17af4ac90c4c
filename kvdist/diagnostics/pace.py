"""`Verdicts`: which member is slow, why, since when, and at which cost, by the reports of all about their time. Pure.

Reports come at most once a second and are sums over steps. Rules:

* A worker is judged by its newest reports, at least 5 that cover 20 steps: fewer may be chance.
* A worker is compared with the median of the others' medians, and with its best time. If all workers report their
  examples, times are per example, so that batches may differ. Costs are always per step.
* A worker is slow if three quarters of its reports are slow, until their median is close to the others' again.
* The busy time of a worker is loading data, computing, and sending while it waits. The rest of its waiting is for
  others: in synchronous rounds the slow worker waits least, which shows whether rounds wait for it.
* A cause is named if it makes 80 % of the excess. A delay that all members share is not blamed on any of them.

Sources: the upper median and the coverage rule of TraceML; relative and individual scores of NVIDIA's resiliency
extension; Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis (2025), for the cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles

from kvdist.core import machine as fx
from kvdist.core.reliable import ACK_DELAY_S
from kvdist.core.scheduler.membership import Membership
from kvdist.nodes import Member, Role
from kvdist.protocol import messages as msg

STEPS_MIN, REPORTS_MIN, KEPT = 20, 5, 64
"""Steps and reports that a verdict needs, and reports of a member that are kept."""
SLOW, SLOWER, CLEAR = 1.5, 1.3, 1.2
"""Multiples: of the others' median that is slow, of a worker's best that is slower, of the median that is fast."""
BUSY, CALM = 2.0, 1.5
"""The same as `SLOW` and `CLEAR`, for the time in which a server computes."""
MATTERS, COVERS = 0.1, 0.8
"""The part of a round that is worth a report, and the part of an excess that names its cause."""
PAUSE_S, PAUSE, PAUSES_MAX = 1.5, 2.0, 2
"""Extra seconds of a step that make a pause, and multiple of the usual time; pauses that are reported per worker."""
LOOK_S, LOOK_MEMBER_S = 1.0, 0.002
"""Seconds between two checks of all members, and extra seconds for each member."""
SAID_MAX = 3
"""Verdicts that are reported at the end of the job."""
PARTS = ("data", "compute", "sending")
COMPARED = (*PARTS, "own", "step", "waiting")
SENTENCES = {
    "compute": "computes {factor:.1f}x slower than {others}",
    "changed": "has become {change:.1f}x slower",
    "data": "waits for its data for {mine} in a step ({others}: {theirs})",
    "sending": "waits for its slow line for {mine} in a step ({others}: {theirs})",
    "own": "takes {factor:.1f}x as long as {others} for a step, and not for one cause alone",
}
"""Part of the time that makes the excess → description of the slow worker."""
ADVICE = {
    "changed": "Look what else runs there, and for heat and swapping.",
    "data": "Give its DataLoader more workers, or bring the data nearer to it.",
    "sending": "Look at its cable and Wi-Fi, or send less: compression, or --policy diloco:100,bits=8.",
}
TINY_S = 1e-6


@dataclass(slots=True)
class Report:
    """A worker's mean times per step, in seconds, over some steps; or a server's over a span, as if it were a step."""

    at: float
    first: int
    """Number of the first of the steps."""
    steps: int
    samples: float
    data: float
    compute: float
    blocked: float
    sending: float

    def extra_s(self, usual_s: float) -> float:
        """Seconds by which all the steps together have taken longer than usual, without waiting."""
        return (self.data + self.compute - usual_s) * self.steps


@dataclass(slots=True)
class History:
    """The reports of a member, newest last."""

    reports: deque[Report] = field(default_factory=lambda: deque(maxlen=KEPT))
    steps: int = 0
    new: int = 0
    """Reports since the last check."""
    best: float = 0.0
    """Least median of its busy time so far; 0 before the first."""
    best_due: int = 0
    """Number of steps at which the next median counts. Medians do not overlap, or chance would choose the least."""
    pauses: int = 0

    def recent(self) -> list[Report]:
        """Return as many of the newest reports as a verdict needs, newest first; none if they are too few."""
        steps, found = 0, []
        for report in reversed(self.reports):
            found.append(report)
            steps += report.steps
            if steps >= STEPS_MIN and len(found) >= REPORTS_MIN:
                return found
        return []

    @property
    def busy(self) -> tuple[float, float]:
        """Part of its time in which a server has computed lately: first quartile (0 with too few reports), median."""
        lately = [
            one.compute / max(one.compute + one.blocked, TINY_S) for one in list(self.reports)[-2 * REPORTS_MIN :]
        ]
        return quantiles(lately, n=4)[0] if len(lately) == 2 * REPORTS_MIN else 0.0, median(lately)


@dataclass(slots=True)
class Timing:
    """Medians of a worker's recent reports. `data` to `low` are per example, or per step if examples are unknown."""

    member: Member
    history: History
    data: float
    compute: float
    sending: float
    own: float
    low: float
    """First quartile of the busy time."""
    samples: float
    """Examples of a step; 1 if unknown."""
    waiting: float
    """Seconds of waiting for others, in a step (a mean)."""

    @property
    def step(self) -> float:
        """Busy seconds of a step."""
        return self.own * self.samples

    @property
    def worse(self) -> float:
        """Busy time as a multiple of the worker's best."""
        return self.own / self.history.best

    @property
    def period(self) -> float:
        """Seconds from step to step."""
        return self.step + self.waiting


@dataclass(slots=True)
class Verdict:
    """A report that a member is slow, or stood still."""

    member: Member
    sentence: str
    since: float
    cost_s: float = 0.0
    """Seconds for which the others have waited because of it."""


class Verdicts:
    """Reports slow members: once when slowness begins, once when it ends, and the costliest at the end of the job.

    Args:
        membership: the members and their hosts.
        loads_bytes: bytes of values of each server, by its number in the placement.
    """

    def __init__(self, membership: Membership, loads_bytes: Sequence[int]) -> None:
        self._membership = membership
        self._loads_bytes = loads_bytes
        self._of: dict[Member, History] = {}
        self._active: dict[Member, Verdict] = {}
        self._said: list[Verdict] = []
        self._per_example = False
        self._looked_at = self._look_at = 0.0

    def heard(self, sender: Member, message: msg.StepTimes, now: float) -> list[fx.Effect]:
        """Add a report: times of a worker's last steps, or how busy a server was. Returns the logs that follow."""
        if (sender.node.role is Role.WORKER) is not bool(message.steps):
            return []
        history, steps = self._of.setdefault(sender, History()), max(message.steps, 1)
        numbers = (message.data_us, message.compute_us, message.blocked_us, message.sending_us)
        seconds = [number / steps / 1e6 for number in numbers]
        history.reports.append(Report(now, history.steps + 1, steps, message.samples / steps, *seconds))
        history.steps += steps
        history.new += 1
        if now < self._look_at:
            return []
        said: list[fx.Effect] = [fx.Log(text) for text in self._look(now)]
        self._looked_at, self._look_at = now, now + LOOK_S + LOOK_MEMBER_S * len(self._of)
        return said

    def summary(self) -> list[fx.Effect]:
        """Return logs of the members that have cost the job most."""
        costly = sorted([one for one in self._said if one.cost_s >= PAUSE_S], key=lambda one: -one.cost_s)[:SAID_MAX]
        return [fx.Log(f"{one.sentence} The job has waited {_s(one.cost_s)} for it in all.") for one in costly]

    def _look(self, now: float) -> Iterator[str]:
        there = {*self._membership.members.values(), *self._membership.servers.values()}
        self._of = {member: history for member, history in self._of.items() if member in there}
        self._active = {member: verdict for member, verdict in self._active.items() if member in there}
        servers = {one: history.busy for one, history in self._of.items() if one.node.role is Role.SERVER}
        workers = self._workers(max([busy for _, busy in servers.values()], default=0.0))
        if len(workers) > 1:
            ordered = {name: sorted([getattr(one, name) for one in workers]) for name in COMPARED}
            ordered["worse"] = sorted([one.worse for one in workers])
            for one in workers:
                yield from self._judge(one, ordered, now)
                yield from self._pauses(one, [other for other in workers if other is not one], now)
            if len(servers) > 1:
                yield from self._judge_servers(servers, workers, now)
        for history in self._of.values():
            history.new = 0

    def _workers(self, busy: float) -> list[Timing]:
        """Return the timings of the workers that have reported enough.

        Args:
            busy: part of its time in which the busiest server computes.
        """
        enough = [(one, history, history.recent()) for one, history in self._of.items() if one.node.role is Role.WORKER]
        enough = [one for one in enough if one[2]]
        per_example = all(report.samples for *_, reports in enough for report in reports)
        found = []
        for member, history, reports in enough:
            samples = median([one.samples for one in reports]) if per_example else 1.0
            # A server that computes, or has no answer yet, acknowledges late: the line is not to blame for that time.
            late_s = busy * median([one.data + one.compute + one.blocked for one in reports]) + ACK_DELAY_S
            sending = [max(0.0, min(one.sending, one.blocked) - late_s) for one in reports]
            parts = ([one.data for one in reports], [one.compute for one in reports], sending)
            own = [sum(each) / (one.samples if per_example else 1) for one, *each in zip(reports, *parts, strict=True)]
            middle, low = max(median(own), TINY_S), quantiles(own, n=4)[0]
            # A mean: if not every step exchanges values, a few steps have all of the waiting.
            waiting = fmean(one.blocked - sent for one, sent in zip(reports, sending, strict=True))
            data, compute, sent = (median(values) / samples for values in parts)
            found.append(Timing(member, history, data, compute, sent, middle, low, samples, waiting))
            if self._per_example is not per_example or not history.best:
                history.best, history.best_due = middle, 0
            if history.steps >= history.best_due:
                history.best_due = history.steps + sum(one.steps for one in reports)
                history.best = min(history.best, middle)
        self._per_example = per_example
        return found

    def _judge(self, one: Timing, ordered: Mapping[str, list[float]], now: float) -> Iterator[str]:
        """Report that a worker has become slow, or is as fast as others again."""
        typical = {name: _median_without(ordered[name], getattr(one, name)) for name in COMPARED}
        excess_s, waited_s = one.step - typical["step"], typical["waiting"] - one.waiting
        is_awaited = waited_s > max(excess_s / 2, 0.0)
        if one.member in self._active:
            steps = sum([report.steps for report in list(one.history.reports)[::-1][: one.history.new]])
            yield from self._go_on(one.member, one.own > CLEAR * typical["own"], is_awaited * waited_s * steps, now)
            return
        has_changed = one.low >= SLOWER * max(1.0, _median_without(ordered["worse"], one.worse)) * one.history.best
        if one.low < (SLOWER if has_changed else SLOW) * typical["own"] or excess_s < MATTERS * one.period:
            return
        excess = {name: getattr(one, name) - typical[name] for name in PARTS}
        part = max(PARTS, key=excess.__getitem__)
        part = part if excess[part] >= COVERS * (one.own - typical["own"]) else "own"
        kind = "changed" if has_changed and part == "compute" else part
        count = len(ordered["own"])
        mine, theirs = _both_s(getattr(one, part) * one.samples, typical[part] * one.samples)
        sentence = SENTENCES[kind].format(
            factor=one.own / typical["own"],
            change=one.worse,
            others=_others(count - 1),
            mine=mine,
            theirs=theirs,
        )
        saved_s = one.step - ordered["step"][-2 if one.step == ordered["step"][-1] else -1]
        since = _since(one, part, typical[part])
        when = "the start" if since == 1 else f"step {since:,}"
        words = [f"{sentence}, since {when}."]
        if is_awaited and saved_s < MATTERS * one.period:
            words.append(f"A round takes {_s(one.period)}, and others are as slow.")
        elif is_awaited:
            takes, would_take = _both_s(one.period, one.period - saved_s)
            words.append(f"A round takes {takes}, and would take {would_take} without this delay.")
        if kind in ADVICE:
            words.append(ADVICE[kind])
        elif is_awaited:
            quota = round(4 * one.samples * count) if self._per_example else 512
            words.append(f"With --policy quota:{quota},local_steps nothing would wait for it (docs/unequal.md).")
        yield self._begin(one.member, words, now, is_awaited * waited_s * (one.history.steps + 1 - since))

    def _pauses(self, one: Timing, others: Sequence[Timing], now: float) -> Iterator[str]:
        """Report that a worker stood still in a step, once it goes on as before, unless most others stood still too."""
        reports, usual_s = list(one.history.reports), one.step
        first_new = max(len(reports) - one.history.new - 2, 0)
        for report, *later in zip(
            reports[first_new:], reports[first_new + 1 :], reports[first_new + 2 :], strict=False
        ):
            extra_s = report.extra_s(usual_s)
            is_long = extra_s >= max(PAUSE_S, PAUSE * usual_s) and report.first > STEPS_MIN
            if not is_long or all(after.extra_s(SLOW * usual_s) > 0 for after in later):
                continue
            near = [
                (other.step, [by for by in other.history.reports if abs(by.at - report.at) <= extra_s + LOOK_S])
                for other in others
            ]
            too = sum(any(by.extra_s(step_s) >= extra_s / 2 for by in found) for step_s, found in near)
            waited = sum(any(by.blocked * by.steps >= extra_s / 2 for by in found) for _, found in near)
            if 2 * too <= len(others) and one.history.pauses < PAUSES_MAX and one.member not in self._active:
                one.history.pauses += 1
                text = f"{self._name(one.member)} stood still once, for {_s(extra_s)}, about step {report.first:,}."
                self._said.append(Verdict(one.member, text, now, extra_s if 2 * waited >= len(others) else 0.0))
                yield text

    def _judge_servers(
        self, busy: Mapping[Member, tuple[float, float]], workers: Sequence[Timing], now: float
    ) -> Iterator[str]:
        """Report slow servers, by the time in which they compute while all workers wait."""
        period_s, least_s = median([one.period for one in workers]), min([one.waiting for one in workers])
        loads = {one: sum(self._loads_bytes[at] for at in self._membership.numbers_of(one.node)) for one in busy}
        ordered = sorted([share for _, share in busy.values()])
        for member, (low, share) in busy.items():
            typical = _median_without(ordered, share)
            cost_s = min((share - typical) * period_s, least_s)
            if member in self._active:
                is_slow = share > CALM * typical and cost_s > MATTERS / 2 * period_s
                yield from self._go_on(member, is_slow, (now - self._looked_at) * cost_s / period_s, now)
            elif low >= BUSY * typical and cost_s >= MATTERS * period_s:
                has = loads[member] / max(sum(loads.values()), 1)
                others = _others(len(busy) - 1)
                mine, theirs = _both_s(share * period_s, typical * period_s)
                sentence = f"computes for {mine} in a round ({others}: {theirs})."
                spread = "More servers (-s), or a lower KVDIST_BIGARRAY_BOUND, spread them."
                advice = spread if has >= CALM / len(busy) else ADVICE["changed"]
                yield self._begin(member, [sentence, f"It has {has:.0%} of the bytes.", advice], now)

    def _begin(self, member: Member, words: Sequence[str], now: float, cost_s: float = 0.0) -> str:
        """Start a verdict with the first of these sentences, and return all of them as a text."""
        verdict = self._active[member] = Verdict(member, f"{self._name(member)} {words[0]}", now, cost_s)
        self._said.append(verdict)
        return " ".join([verdict.sentence, *words[1:]])

    def _go_on(self, member: Member, is_slow: bool, cost_s: float, now: float) -> Iterator[str]:
        verdict = self._active[member]
        if is_slow:
            verdict.cost_s += cost_s
        else:
            del self._active[member]
            yield f"{self._name(member)} is as fast as others again, after {_s(now - verdict.since)}."

    def _name(self, member: Member) -> str:
        return f"{member} ({self._membership.peers[member.node].host})"


def _since(one: Timing, part: str, typical: float) -> int:
    """Return the step from which on the kept reports are closer to the worker's present time than to the others'."""
    limit_s, since = (getattr(one, part) + typical) / 2 * one.samples, one.history.steps
    for report in reversed(one.history.reports):
        if (report.data + report.compute if part == "own" else getattr(report, part)) < limit_s:
            break
        since = report.first
    return since


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of these ascending numbers without `value`, which is among them."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _others(count: int) -> str:
    return "the others" if count > 1 else "the other"


def _s(seconds: float, other: float = 0.0) -> str:
    """Format a time, in a unit that suits the longer of the two compared times."""
    longer = max(seconds, other)
    return f"{seconds:.0f} s" if longer >= 10 else f"{seconds:.2f} s" if longer >= 0.1 else f"{1e3 * seconds:.0f} ms"


def _both_s(one: float, other: float) -> tuple[str, str]:
    """Format two compared times, in the same unit."""
    return _s(one, other), _s(other, one)
