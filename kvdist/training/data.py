"""Splitting data: over workers (`SplitSampler`) and over the devices of a worker (`split_and_load`).

A `SplitSampler` yields the examples of a part; `Batches` tells it which of them a training step has used. Orders are
not stored: they follow from seed, epoch and part.

A saved state consists of numbers that JSON can express, and is checked completely before any of it is used. Importing
this module does not import torch.
"""

from __future__ import annotations

import abc
import itertools
import multiprocessing
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from kvdist.kvstore.values import is_tensor
from kvdist.schema import whole_number

State: TypeAlias = dict[str, Any]
"""Fields of a `SamplerPosition`, as numbers and None."""

LEAST = {"length": 0, "num_parts": 1, "part_index": 0, "epoch": 0, "visited": 0}
"""Number of a state → its least value."""


@dataclass(frozen=True)
class SamplerPosition:
    """Position of a part in its data: `visited` examples of epoch `epoch` are behind it."""

    length: int
    shuffle: bool
    seed: int | None
    num_parts: int
    part_index: int
    drop_last: bool
    epoch: int = 0
    visited: int = 0

    @property
    def can_be_made_again(self) -> bool:
        """Whether the order is the same when it is computed a second time."""
        return self.seed is not None or not self.shuffle

    @property
    def is_last(self) -> bool:
        """Whether all examples of the epoch have been visited."""
        return 0 < self.visited == part_length(self.length, self.num_parts, self.drop_last)

    @property
    def split(self) -> str:
        """How the data is divided, in words."""
        return f"num_parts={self.num_parts} and drop_last={self.drop_last}"

    def beginning_of(self, epoch: int) -> SamplerPosition:
        return replace(self, epoch=epoch, visited=0)

    def order(self) -> list[int]:
        """All examples that the part visits in the epoch."""
        count = part_length(self.length, self.num_parts, self.drop_last)
        start, stop = count * self.part_index, count * (self.part_index + 1)
        order = list(range(start, min(stop, self.length)))
        order += [position % self.length for position in range(max(start, self.length), stop)]
        if self.shuffle:
            # A str seeds by its SHA-512 hash: the same on every machine, and unrelated between epochs.
            seed = None if self.seed is None else f"{self.seed}/{self.epoch}/{self.part_index}"
            random.Random(seed).shuffle(order)
        return order


NAMES = tuple(field.name for field in fields(SamplerPosition))


def part_length(length: int, num_parts: int, drop_last: bool) -> int:
    """The number of examples that each part visits."""
    return length // num_parts if drop_last else -(-length // num_parts)


def resume(here: SamplerPosition, state: Any) -> SamplerPosition:
    """Find where a part continues from a saved state.

    Args:
        here: any position of the sampler that continues.
        state: a `SamplerPosition` as a dict, or a dict of rank to such a dict.

    Raises:
        ValueError: the state is invalid, or of other data, another order or, within an epoch, another split.
    """
    places = _read_all(state)
    for place in places.values():
        _require_same_data(here, place)
    last = _require_together(places)
    if last.split != here.split:
        if any(place != place.beginning_of(last.epoch) for place in places.values()):
            raise ValueError(_ANOTHER_SPLIT.format(last=last, here=here))
        return here.beginning_of(last.epoch)
    found = places.get(here.part_index)
    if found is None and _is_by_rank(state):
        found = replace(last, part_index=here.part_index)  # its worker was lost when the others saved: as far as they
    if found is None:
        raise _refusal(
            f"the state is that of part {last.part_index} of {last.num_parts}, but this is part {here.part_index}"
        )
    return found


_ANOTHER_SPLIT = (
    "the state was saved within epoch {last.epoch} with {last.split}, but this sampler has {here.split}: a SplitSampler"
    " does not divide the rest of an epoch again. Resume with the same number of workers, begin an epoch with"
    " set_epoch(), or use a QueueSampler, which resumes on any number of workers"
)
_SPLIT_AGAIN = (
    "{what} is of the rest of an epoch that was divided again for another number of workers, which a SplitSampler no"
    " longer does: begin an epoch with set_epoch(), or use a QueueSampler, which resumes on any number of workers"
)


def _require_together(places: Mapping[int, SamplerPosition]) -> SamplerPosition:
    """Refuse states of different moments; return the position of a part that is not ahead of another."""
    last = min(places.values(), key=lambda place: place.epoch)
    for place in places.values():
        for name in ("num_parts", "drop_last", "epoch"):
            one, other = getattr(last, name), getattr(place, name)
            if one != other and not (name == "epoch" and place == place.beginning_of(last.epoch + 1)):
                raise _refusal(
                    f"the states are of different times: {name} is {one} in that of part {last.part_index} and {other}"
                    f" in that of part {place.part_index}"
                )
    return last


def _require_same_data(here: SamplerPosition, place: SamplerPosition) -> None:
    for name in ("length", "shuffle", "seed"):
        mine, theirs = getattr(here, name), getattr(place, name)
        if mine != theirs:
            raise ValueError(f"the state is of data with {name}={theirs!r}, but this sampler has {name}={mine!r}")


def _refusal(wrong: str) -> ValueError:
    return ValueError(
        f"{wrong}; give what state_dict() returned, or that of all workers:"
        ' sampler.load_state_dict({rank: state["sampler"] for rank, state in checkpoint.states.items()})'
    )


# Reading a state from outside.


def _read_all(state: Any) -> dict[int, SamplerPosition]:
    """Check and read the states of parts: part → position."""
    if _is_by_rank(state):
        found = [_read(f"the state of rank {key}", one) for key, one in state.items()]
    else:
        found = [_read("the state", state)]
    places = {place.part_index: place for place in found}
    if len(places) < len(found):
        raise _refusal(f"{len(found)} states belong to {len(places)} parts; pass one state for each part")
    return places


def _is_by_rank(state: Any) -> bool:
    return isinstance(state, Mapping) and bool(state) and all(map(_is_rank, state))


def _is_rank(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _read(what: str, state: Any) -> SamplerPosition:
    """Check and read the state of a part; `what` names it in errors."""
    if state is None:
        raise _refusal(f"{what} is None: that worker saved no state")
    if not isinstance(state, Mapping):
        raise _refusal(f"{what} is of type {type(state).__name__}")
    missing = [name for name in NAMES if name not in state]
    if missing:
        has = ", ".join(map(str, state)) or "nothing"
        raise _refusal(f"{what} lacks {', '.join(missing)} (it has {has})")
    if state.get("generations", []) != []:  # of kvdist 0.2.0
        raise ValueError(_SPLIT_AGAIN.format(what=what))
    place = SamplerPosition(**{name: state[name] for name in NAMES})
    for name, least in LEAST.items():
        if not _is_count(state[name], least):
            raise _refusal(f"{what} has {name}={state[name]!r}, which must be a whole number of at least {least}")
    for name in ("shuffle", "drop_last"):
        if not isinstance(state[name], bool):
            raise _refusal(f"{what} has {name}={state[name]!r}, which must be true or false")
    if place.part_index >= place.num_parts:
        raise _refusal(f"{what} is of part_index={place.part_index}, but num_parts is {place.num_parts}")
    if place.visited and not place.can_be_made_again:
        raise _refusal(f"{what} is within an epoch, whose order cannot be reproduced without a seed")
    count = part_length(place.length, place.num_parts, place.drop_last)
    if place.visited > count:
        raise _refusal(
            f"the state of part {place.part_index} has visited={place.visited}, but the part had {count} examples"
        )
    return place.beginning_of(place.epoch + 1) if place.is_last else place


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_READS_AHEAD = (
    "the position in the data is not known: this process has child processes, and if they belong to a DataLoader with"
    " num_workers > 0, it has asked for examples that no step has used yet. Iterate `for batch in"
    " trainer.batches(loader)`, which counts the batches that reached step(); or give the number that was used:"
    " state_dict(visited=...)"
)
_UNKNOWN_BATCHES = (
    "how many examples each batch has is not known, because the DataLoader has num_workers > 0 and a batch sampler of"
    " its own, or in_order=False. Use batch_size or torch's BatchSampler, or num_workers=0, or give the number that was"
    " used: state_dict(visited=...)"
)


class SplitSampler:
    """Sampler for ``DataLoader(sampler=...)`` that yields the indices of this worker's fixed part of a data set.

    Typical use is ``SplitSampler(len(dataset), store.num_workers, store.rank)``. Parts are of equal length, so all
    workers make the same number of steps. Each part is a contiguous range of the data set and is shuffled within
    itself, unlike with torch's ``DistributedSampler``: shuffle data that is sorted, for example by class, beforehand.

    Train on ``for batch in trainer.batches(loader)``; then `state_dict` is the position after the last step. Without
    `batches`, every index that was requested from the sampler counts as visited, in a process without child processes
    of `multiprocessing`. With child processes, which may be those of a ``DataLoader`` with ``num_workers`` above 0 that
    requests indices ahead of the steps, `state_dict` needs the number of used examples: ``state_dict(visited=n)``,
    where n is ``batches_done * batch_size``, or less if the last batch was shorter. The number counts from the start of
    the epoch, also after a resume within it; ``state_dict()["visited"]`` after `load_state_dict` is the number to
    continue from. A thread that iterates a loader ahead of the steps is not noticed.

    Args:
        length: number of examples in the data set.
        num_parts: number of parts, normally `store.num_workers`.
        part_index: part of this worker, normally `store.rank`.
        shuffle: True for a new random order within the part in each epoch; False for ascending indices.
        seed: seed of the orders, which differ from epoch to epoch; None for different orders in every run.
        drop_last: True leaves out the last ``length % num_parts`` examples in every epoch. False keeps all: parts
            become longer by 1 where needed, and the last parts are filled up with the first examples of the data set,
            which are then visited twice.

    Raises:
        ValueError: a number is out of range, or every part would be empty.
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = True,
    ) -> None:
        _check_parts(length, num_parts, part_index)
        if drop_last and 0 < length < num_parts:
            raise ValueError(
                f"{length} examples in {num_parts} equal parts leave every part empty;"
                " use fewer workers or drop_last=False"
            )
        self._next = SamplerPosition(length, shuffle, seed, num_parts, part_index, drop_last)
        """Where the next iteration begins."""
        self._rest: list[int] | None = None
        """What the next iteration visits, where that is the rest of an epoch."""
        self._begun: SamplerPosition | None = None
        """Where the latest iteration began; None if `_next` was set after it."""
        self._order: list[int] = []
        """What the latest iteration visits."""
        self._visited = 0
        """How many examples of its epoch the latest iteration has been asked for."""
        self._iterations = 0
        """Number of iterations, and of calls that set `_next`."""
        self._used: SamplerPosition | None = None
        """The position after the last step, while `Batches` reports steps; None: requested examples count."""
        self._is_followed = False
        """Whether `Batches` reports the steps of the next iteration."""
        self._left_early = False
        """Whether the latest iteration was followed and has not reached its end."""
        self._unknown = ""
        """Why the number of examples that were used is not known; empty if it is."""

    @property
    def epoch(self) -> int:
        """Number, from 0, of the epoch of the next example; at the end of an epoch, the number of the next epoch.

        After `load_state_dict`, ``for epoch in range(sampler.epoch, epochs)`` makes the remaining epochs.
        """
        return self._place(None).epoch if self._used is None else self._used.epoch

    def __len__(self) -> int:
        if self._rest is not None:
            return len(self._rest)
        return part_length(self._next.length, self._next.num_parts, self._next.drop_last)

    def __iter__(self) -> Iterator[int]:
        order = self._next.order() if self._rest is None else self._rest
        self._begun, self._order, self._visited = self._next, order, self._next.visited
        self._next, self._rest = self._next.beginning_of(self._next.epoch + 1), None
        self._iterations += 1
        self._left_early, self._is_followed = self._is_followed, False
        if not self._left_early:
            self._used = None
        self._unknown = ""
        return self._counted(order, self._visited)

    def _counted(self, order: list[int], before: int) -> Iterator[int]:
        if multiprocessing.active_children():  # a loader has started its processes before it asks for an example
            self._unknown = _READS_AHEAD
        for visited, index in enumerate(order, before + 1):
            self._visited = visited
            yield index

    def state_dict(self, visited: int | None = None) -> State:
        """Return the position in the data, with which `load_state_dict` resumes.

        The dict contains only numbers and can be the `state` of a checkpoint. At the end of an epoch the position is
        the start of the next epoch.

        Args:
            visited: number of examples of the current epoch that this worker has used; the class says when it is
                needed. None: the examples up to the last step with ``trainer.batches(loader)``, otherwise all requested
                examples.

        Raises:
            ValueError: an order without a seed cannot be reproduced, or `visited` is out of range.
            RuntimeError: `visited` is None, and the number of used examples is unknown.
        """
        if visited is None and self._used is None and self._unknown:
            raise RuntimeError(self._unknown)
        place = self._used if visited is None and self._used is not None else self._place(visited)
        if place.visited and not place.can_be_made_again:
            raise ValueError("the order of this epoch cannot be reproduced: pass a seed to SplitSampler")
        return asdict(place)

    def _place(self, visited: int | None) -> SamplerPosition:
        if self._begun is None:
            before, found, end = self._next, self._next.visited, self._next.visited
        else:
            before, found, end = self._begun, self._visited, self._end
        if visited is not None:
            found = require_whole("visited", visited)
        if not before.visited <= found <= end:
            raise ValueError(
                f"visited is {found}; it counts from the beginning of epoch {before.epoch}, and this worker began at"
                f" {before.visited} and has received examples up to {end}"
            )
        return self._next if found == end else replace(before, visited=found)

    @property
    def _end(self) -> int:
        """How many examples of its epoch have been visited at the end of the latest iteration."""
        return 0 if self._begun is None else self._begun.visited + len(self._order)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Restore a position from `state_dict`: the next iteration yields the remaining examples of that epoch.

        Args:
            state: result of `state_dict` of the same part, or a dict of rank to such results, for example
                ``{rank: state["sampler"] for rank, state in checkpoint.states.items()}`` if each worker saved
                ``{"sampler": sampler.state_dict()}``. States of another number of parts are accepted at the beginning
                of an epoch only; a `QueueSampler` resumes on any number of workers.

        Raises:
            ValueError: the state is invalid, belongs to another data set, order or part, or was saved within an epoch
                with another number of parts.
        """
        self._next = resume(self._next, state)
        self._rest = self._next.order()[self._next.visited :] if self._next.visited else None
        self._reset()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which with a seed determines its order.

        Without this call iterations count as epochs 0, 1, 2, …. If `load_state_dict` has restored a position within
        this epoch, the next iteration yields the rest of it.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            ValueError: `epoch` is negative.
        """
        if require_whole("epoch", epoch) < 0:
            raise ValueError(f"the epoch is {epoch}; epochs count from 0")
        if epoch != self._next.epoch:
            self._next, self._rest = self._next.beginning_of(epoch), None
        self._reset()

    def _reset(self) -> None:
        """Forget the latest iteration: the position is where the next iteration begins."""
        self._begun, self._used, self._unknown, self._left_early = None, None, "", False
        self._iterations += 1

    # What `Batches` calls.

    def _skip(self, examples: int) -> None:
        """Leave these out of the next iteration: others have gone on meanwhile."""
        order = self._next.order() if self._rest is None else self._rest
        if examples < len(order):
            self._next, self._rest = replace(self._next, visited=self._next.visited + examples), order[examples:]
        else:
            self._next, self._rest = self._next.beginning_of(self._next.epoch + 1), None
        self._reset()

    def _follow(self) -> None:
        """Let the next iteration begin at the position after the last step, and leave that to `_use` from then on."""
        used, begun = self._used, self._begun
        if self._left_early and used is not None and begun is not None and used != self._next:
            # Batches that no step has used may be of an epoch before the latest one; then that one begins anew.
            is_within = replace(used, visited=begun.visited) == begun
            self._next = used if is_within else begun
            self._rest = self._order[used.visited - begun.visited :] if is_within else self._order
        self._used = self._next if used is None else used
        self._is_followed = True

    def _use(self, iteration: int, visited: int | None, unknown: str) -> None:
        """A step has used examples of an iteration, up to `visited`; None for a number that is `unknown`, and why."""
        if iteration == self._iterations:
            self._used = None if visited is None else self._place(visited)
            self._unknown = unknown


class DrivenSampler(abc.ABC):
    """A sampler that iterates its loader itself, within `Batches`."""

    @abc.abstractmethod
    def drive(self, trainer: Any, loader: Any, batch: int | None, drops_last: bool) -> Iterator[Any]:
        """Iterate a loader with batches of size `batch`; None if the size is unknown."""

    @property
    @abc.abstractmethod
    def unused(self) -> int:
        """Number of examples delivered since the last step; the next step sums them."""

    @abc.abstractmethod
    def restore(self, position: Mapping[str, Any]) -> None:
        """Go to the position in the data of a loaded checkpoint."""

    @abc.abstractmethod
    def rolled_back(self) -> None:
        """Discard batches that the loader has read ahead, after a rollback to a snapshot."""

    @abc.abstractmethod
    def _use(self, iteration: int, used: int | None, unknown: str) -> None:
        """A step has used examples of an iteration; see `SplitSampler._use`."""


class Batches:
    """Iterates a loader and lets its `SplitSampler` or `QueueSampler` count the batches that have reached a step.

    The result of `kvdist.Trainer.batches`. Each iteration is an iteration of the loader, except with a
    `QueueSampler`. A loader with another sampler, or without a sampler, is only iterated.

    Args:
        loader: a ``torch.utils.data.DataLoader``, or another iterable.
        feed: receives the positions of the delivered batches.
        trainer: the trainer whose steps use the batches; None without a trainer.
    """

    def __init__(self, loader: Any, feed: Feed, trainer: Any = None) -> None:
        self._loader = loader
        self._feed = feed
        self._trainer = trainer

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        sampler, batch_size, drops_last = _batching(self._loader)
        has_joined = self._trainer is not None and not isinstance(sampler, DrivenSampler) and self._trainer._take_part()
        if has_joined and isinstance(sampler, SplitSampler) and self._skip(sampler, batch_size, drops_last):
            return
        if sampler is None:
            if self._trainer is not None and (undivided := _undivided(self._loader)):
                self._trainer._warn_of_whole_data(undivided)
            yield from self._timed(self._loader)
            return
        if isinstance(sampler, DrivenSampler):
            yield from sampler.drive(self._trainer, self._loader, batch_size, drops_last)
            return
        if self._trainer is not None:
            self._trainer._warn_of_parts()
        before = sampler._iterations
        sampler._follow()
        iteration, count, last = before, 0, 0
        for batch in self._timed(self._loader):
            if not count:
                iteration, begin, end = sampler._iterations, sampler._end - len(sampler._order), sampler._end
                last = begin
            count += 1
            if iteration != before:
                visited = sampler._visited if batch_size is None else min(begin + count * batch_size, end)
                if batch_size is None:
                    used = (None, _UNKNOWN_BATCHES) if _reads_ahead(self._loader, sampler) else (visited, "")
                else:
                    used = (end if drops_last and end - visited < batch_size else visited, "")
                self._feed.reached[sampler] = (iteration, *used)
                if used[0] is not None:
                    self._feed.examples += visited - last
                    last = visited
            yield batch
        self._ended(sampler, iteration if count else sampler._iterations, before)

    def _timed(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader if self._trainer is None else self._trainer._clock.loading(loader)

    def _skip(self, sampler: SplitSampler, batch_size: int | None, drops_last: bool) -> bool:
        """Leave out the batches of the steps that others have made without this worker; whether none is left."""
        length = len(sampler)
        if batch_size is None:
            return False
        batches = length // batch_size if drops_last else -(-length // batch_size)
        skipped = min(self._feed.behind, batches)
        self._feed.behind -= skipped
        if skipped:
            sampler._skip(length if skipped == batches else skipped * batch_size)
        return bool(skipped) and skipped == batches

    def _ended(self, sampler: SplitSampler, iteration: int, before: int) -> None:
        """Handle the end of the loader: the epoch ends with the next step, or now if no batch is left for it."""
        sampler._is_followed = False  # also where the loader never asked it
        if before != iteration == sampler._iterations:
            sampler._left_early = False
            if self._feed.reached.get(sampler, (before,))[0] == iteration:
                self._feed.reached[sampler] = (iteration, sampler._end, "")
            else:
                sampler._use(iteration, sampler._end, "")


Reached: TypeAlias = "dict[SplitSampler | DrivenSampler, tuple[int, int | None, str]]"
"""Sampler → the position in it up to which batches were handed out."""


def count_as_used(reached: Reached) -> None:
    """Record that steps have used all batches up to these positions, and forget the positions."""
    for sampler, position in reached.items():
        sampler._use(*position)
    reached.clear()


class Feed:
    """Batches that a training loop has got from `Trainer.batches`, until their steps count."""

    def __init__(self) -> None:
        self.reached: Reached = {}
        """The positions up to which batches were handed out whose steps do not count yet; see `count_as_used`."""
        self.examples = 0
        """Examples that `SplitSampler`s have handed out since the last step."""
        self.queue: DrivenSampler | None = None
        """The queue that `batches` has iterated last."""
        self.behind = 0
        """Steps of the others that `batches` leaves out, because this worker has joined a running job."""
        self.undivided = 0
        """Examples that `batches` reads on every worker, as no sampler divides them; 0 for none."""
        self.position: Mapping[str, Any] | None = None
        """Position in the data of a checkpoint that was loaded."""

    @property
    def unused(self) -> int:
        """Examples of a queue that no push has brought to the store; of a `SplitSampler` those since the last step."""
        return self.examples if self.queue is None else self.queue.unused

    @property
    def unpushed(self) -> int:
        """The same of a queue alone, whose examples count when pushes bring them; 0 without a queue."""
        return 0 if self.queue is None else self.queue.unused

    def examples_of(self, batch_size: float | None = None, samples: int | None = None) -> int:
        """Return the number of examples that a push after a step with these arguments brings; 0 if it is not known.

        With a queue these are all examples that no push has brought, also those of earlier steps.
        """
        if samples is not None:
            return samples
        size = 0 if batch_size is None else max(1, round(batch_size))
        return self.unused if self.unused or self.queue is not None else size

    def count_as_used(self) -> None:
        """Count all that was handed out as used."""
        count_as_used(self.reached)


def _batching(loader: Any) -> tuple[SplitSampler | DrivenSampler | None, int | None, bool]:
    """The sampler of a loader that counts batches, and how the loader makes them.

    Returns:
        The sampler, None for another one; the batch size, None where it is not known beforehand; whether a smaller last
        batch is left out.
    """
    from torch.utils.data import BatchSampler, DataLoader  # there is a trainer, so there is torch

    maker: Any = getattr(loader, "batch_sampler", None)
    if maker is None:
        maker = getattr(loader, "sampler", None)
    sampler: Any = maker if isinstance(maker, SplitSampler | DrivenSampler) else getattr(maker, "sampler", None)
    if not isinstance(sampler, SplitSampler | DrivenSampler):
        return None, None, False
    if isinstance(loader, DataLoader) and getattr(loader, "in_order", True):
        if sampler is maker:
            return sampler, 1, False
        if type(maker) is BatchSampler or type(maker).__module__ == "torchdata.stateful_dataloader.sampler":
            return sampler, maker.batch_size, maker.drop_last
    return sampler, None, False


def _undivided(loader: Any) -> int:
    """The examples of a torch loader that visits its whole data set; 0 where it may visit a part, or is another one."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, Subset):
        return 0
    maker = loader.batch_sampler
    sampler = maker.sampler if type(maker) is BatchSampler else loader.sampler if maker is None else maker
    if type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
        return 0
    return len(loader.dataset)  # type: ignore[arg-type]


def _reads_ahead(loader: Any, sampler: SplitSampler) -> bool:
    """Whether a loader requests examples before their batch is due; a loader without `num_workers` may."""
    num_workers = getattr(loader, "num_workers", None)
    return num_workers > 0 if isinstance(num_workers, int) else bool(sampler._unknown)


def split_and_load(data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Split a batch along an axis into a part per device, and move each part to its device.

    Args:
        data: a torch tensor, or a NumPy array, which remains an array in host memory.
        devices: list of torch devices or their names; for a NumPy array only ``cpu``. A single device is allowed, and
            so is a repeated device.
        batch_axis: axis to split.
        even_split: require parts of equal size.

    Returns:
        A list with a part per device. Parts that did not have to move are views.

    Raises:
        ValueError: as in `split_data`, or a NumPy array is to be moved to a device other than the host.
    """
    parts = split_data(data, len(devices), batch_axis, even_split)
    if is_tensor(data):
        pinned = data.is_pinned()  # only from there may a copy go on while the program does
        return [part.to(device, non_blocking=pinned) for part, device in zip(parts, devices, strict=True)]
    elsewhere = [str(device) for device in devices if str(device) != "cpu"]
    if elsewhere:
        raise ValueError(f"a NumPy array cannot move to {elsewhere[0]}; give torch.from_numpy(array) instead")
    return parts


def split_data(data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Split a tensor or array along an axis, without copying.

    Args:
        data: a torch tensor or a NumPy array.
        num_slice: number of parts.
        batch_axis: axis to split.
        even_split: require parts of equal size. With False the first ``size % num_slice`` parts are longer by 1, and
            with fewer examples than parts the last parts are empty.

    Returns:
        A list of `num_slice` views.

    Raises:
        TypeError: `data` is neither a tensor nor an array.
        ValueError: the size is not divisible by `num_slice` and `even_split` is True, or the axis does not exist.
    """
    if not is_tensor(data) and not isinstance(data, np.ndarray):
        raise TypeError(f"only torch tensors and NumPy arrays can be split, not {type(data).__name__}")
    if num_slice < 1:
        raise ValueError(f"cannot split into {num_slice} parts; name at least one device")
    if not -data.ndim <= batch_axis < data.ndim:
        raise ValueError(f"data of shape {tuple(data.shape)} has no axis {batch_axis}")
    axis = batch_axis % data.ndim
    size = data.shape[axis]
    if even_split and size % num_slice:
        raise ValueError(
            f"a batch of {size} along axis {axis} cannot be split evenly into {num_slice} parts; use a batch size that"
            f" {num_slice} divides, or even_split=False"
        )
    each, longer = divmod(size, num_slice)
    bounds = [part * each + min(part, longer) for part in range(num_slice + 1)]
    before = (slice(None),) * axis
    return [data[(*before, slice(start, stop))] for start, stop in itertools.pairwise(bounds)]


def require_whole(name: str, value: object) -> int:
    """Return a number of a sampler.

    Raises:
        TypeError: it is no whole number, but perhaps the data set itself.
    """
    try:
        return whole_number(name, value)
    except TypeError as error:
        if name != "length" or isinstance(value, str) or not hasattr(value, "__len__"):
            raise
        raise TypeError(f"{error}; give len(data)") from None


def _check_parts(length: int, num_parts: int, part_index: int) -> None:
    for name, value in (("length", length), ("num_parts", num_parts), ("part_index", part_index)):
        require_whole(name, value)
    if length < 0:
        raise ValueError(f"length is {length}; it counts the examples of the data set, at least 0")
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it must be at least 1")
    if not 0 <= part_index < num_parts:
        raise ValueError(f"part_index is {part_index}; with num_parts={num_parts} it must be from 0 to {num_parts - 1}")
