"""A place in data that is split over workers: the epoch, what was visited of it, and what comes then.

An epoch is split into parts. Where a run goes on with another number of workers, what was left of it is split again:
each split that was given up so is a generation, and a place holds how much each part of each had visited. The orders
are not in it; they are made again from the seed, one generation after the other.

A place becomes a state to be saved, of numbers and lists that JSON can say. Whatever comes back from outside is checked
before any of it is used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

State: TypeAlias = dict[str, Any]
"""A `Place` in numbers, texts and lists."""

LEAST = {"length": 0, "num_parts": 1, "part_index": 0, "epoch": 0, "visited": 0}
"""The numbers of a state, and the least that each can be."""


@dataclass(frozen=True)
class Generation:
    """A split of an epoch, or of what was left of it, that was given up for another before its end."""

    drop_last: bool
    visited: tuple[int, ...]
    """How many of its examples each part had visited."""


@dataclass(frozen=True)
class Place:
    """Where one part is: `visited` counts since the epoch began, or since what was left of it was split again."""

    length: int
    shuffle: bool
    seed: int | None
    num_parts: int
    part_index: int
    drop_last: bool
    epoch: int = 0
    visited: int = 0
    generations: tuple[Generation, ...] = ()

    @property
    def is_beginning(self) -> bool:
        """Whether nothing of the epoch was visited yet."""
        return not (self.visited or self.generations)

    @property
    def can_be_made_again(self) -> bool:
        """Whether the order is the same when it is made a second time."""
        return self.seed is not None or not self.shuffle

    def beginning_of(self, epoch: int) -> Place:
        return replace(self, epoch=epoch, visited=0, generations=())

    def order(self) -> list[int]:
        """All examples that the part visits in the epoch, or since what was left of it was split again."""
        return self.share_of(self.examples())

    def examples(self) -> Sequence[int]:
        """What is split over the present parts: the data, or what the generations have left of it."""
        examples: Sequence[int] = range(self.length)
        for number in range(len(self.generations)):
            examples = self.left_of(examples, number)
        return examples

    def share_of(self, examples: Sequence[int]) -> list[int]:
        """What of `examples` the part visits."""
        return self._share(examples, self.num_parts, self.part_index, self.drop_last, not self.generations)

    def left_of(self, examples: Sequence[int], number: int) -> list[int]:
        """What of `examples` no part visited in a generation, each once, also what two parts were to visit."""
        generation = self.generations[number]
        done: set[int] = set()
        left: list[int] = []
        for part, visited in enumerate(generation.visited):
            share = self._share(examples, len(generation.visited), part, generation.drop_last, number == 0)
            _require_at_most(len(share), part, visited)
            left += share[visited:]
            if not generation.drop_last:
                done.update(share[:visited])
        return left if generation.drop_last else [index for index in dict.fromkeys(left) if index not in done]

    def _share(self, examples: Sequence[int], num_parts: int, part: int, drop_last: bool, is_first: bool) -> list[int]:
        """One part's share of `examples`; shuffled in an epoch's first generation, and so in those that follow."""
        length = len(examples)
        count = part_length(length, num_parts, drop_last)
        start, stop = count * part, count * (part + 1)
        share = list(examples[start:stop])
        share += [examples[position % length] for position in range(max(start, length), stop)]
        if is_first and self.shuffle:
            # A text seeds by its hash under SHA-512: the same on every machine, and no two epochs are related.
            seed = None if self.seed is None else f"{self.seed}/{self.epoch}/{part}"
            random.Random(seed).shuffle(share)
        return share

    def to_state(self) -> State:
        """The place as JSON can say it; of a size that grows with generations times parts."""
        generations = [{"drop_last": one.drop_last, "visited": list(one.visited)} for one in self.generations]
        return {**asdict(replace(self, generations=())), "generations": generations}


NAMES = tuple(field.name for field in fields(Place))


def part_length(length: int, num_parts: int, drop_last: bool) -> int:
    """How many of `length` examples each part visits."""
    return length // num_parts if drop_last else -(-length // num_parts)


def resume(here: Place, state: Any) -> tuple[Place, list[int] | None]:
    """Where the part of `here` goes on from a state.

    Args:
        here: any place of the sampler that goes on.
        state: one that `Place.to_state` made, or several of them, by rank.

    Returns:
        The place, and what is to be visited from there to the end of the epoch; None for all of the epoch.

    Raises:
        ValueError: it is no such state, belongs to other data or another order, or states of some parts are missing.
    """
    places = _read_all(state)
    for place in places.values():
        _require_same_data(here, place)
    last = _require_together(places)
    examples = last.examples()
    count = part_length(len(examples), last.num_parts, last.drop_last)
    for place in places.values():
        _require_at_most(count, place.part_index, place.visited)
    found = places.get(here.part_index)
    if found is None or (found.num_parts, found.drop_last) != (here.num_parts, here.drop_last):
        found = _split_again(here, places, last, count)
        if found.generations:
            examples = found.left_of(examples, len(last.generations))
    if found.is_beginning:
        return found, None
    rest = found.share_of(examples)[found.visited :]
    return (found, rest) if rest else (found.beginning_of(found.epoch + 1), None)


def _require_together(places: Mapping[int, Place]) -> Place:
    """Refuse states that are not of one moment, and return the place of a part that is not ahead of another."""
    last = min(places.values(), key=lambda place: place.epoch)
    for place in places.values():
        for name in ("num_parts", "drop_last", "epoch", "generations"):
            one, other = getattr(last, name), getattr(place, name)
            if one != other and not (_has_ended(place, last) and name in ("epoch", "generations")):
                raise _refusal(
                    f"the states are not of one moment: {name} is {one} in that of part {last.part_index} and {other}"
                    f" in that of part {place.part_index}"
                )
    return last


def _has_ended(place: Place, last: Place) -> bool:
    """Whether a part has ended the epoch of another: then it is at the beginning of the next one."""
    return place.is_beginning and place.epoch == last.epoch + 1


def _split_again(here: Place, places: Mapping[int, Place], last: Place, count: int) -> Place:
    """The beginning of the part of `here` in what those of `places` have left, each of `count` examples."""
    if len(places) < last.num_parts:
        saved, present = (
            f"of {one.num_parts}" + f" with drop_last={one.drop_last}" * (last.drop_last != here.drop_last)
            for one in (last, here)
        )
        raise _refusal(
            f"the state is that of part {', '.join(map(str, sorted(places)))} {saved}, and this is part"
            f" {here.part_index} {present}: that of every part is needed"
        )
    if all(place.is_beginning and place.epoch == last.epoch for place in places.values()):
        return here.beginning_of(last.epoch)
    visited = tuple(count if _has_ended(places[i], last) else places[i].visited for i in range(last.num_parts))
    generations = (*last.generations, Generation(last.drop_last, visited))
    return replace(here, epoch=last.epoch, visited=0, generations=generations)


def _require_same_data(here: Place, place: Place) -> None:
    for name in ("length", "shuffle", "seed"):
        mine, theirs = getattr(here, name), getattr(place, name)
        if mine != theirs:
            raise ValueError(f"the state is of data with {name}={theirs!r}, but this sampler has {name}={mine!r}")


def _require_at_most(count: int, part: int, visited: int) -> None:
    if visited > count:
        raise _refusal(f"part {part} is said to have visited={visited}, but it had {count} examples")


def _refusal(wrong: str) -> ValueError:
    return ValueError(
        f"{wrong}; give what state_dict() returned, or that of all workers:"
        ' sampler.load_state_dict({rank: state["sampler"] for rank, state in checkpoint.states.items()})'
    )


# Reading what came from outside.


def _read_all(state: Any) -> dict[int, Place]:
    """part → place."""
    if isinstance(state, Mapping) and state and all(map(_is_rank, state)):
        found = [_read(f"the state of rank {key}", one) for key, one in state.items()]
    else:
        found = [_read("the state", state)]
    places = {place.part_index: place for place in found}
    if len(places) < len(found):
        raise _refusal(f"there are {len(found)} states of {len(places)} parts, and each part has one")
    return places


def _is_rank(key: Any) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdecimal())


def _read(what: str, state: Any) -> Place:
    """`what` says in errors whose state it is."""
    if state is None:
        raise _refusal(f"{what} is None: nothing was saved there")
    if not isinstance(state, Mapping):
        raise _refusal(f"{what} is of type {type(state).__name__}")
    missing = [name for name in NAMES if name not in state]
    if missing:
        has = ", ".join(map(str, state)) or "nothing"
        raise _refusal(f"{what} lacks {', '.join(missing)} (it has {has})")
    place = Place(**{**{name: state[name] for name in NAMES}, "generations": _read_generations(what, state)})
    for name, least in LEAST.items():
        if not _is_count(state[name], least):
            raise _refusal(f"{what} has {name}={state[name]!r}, which must be a whole number of at least {least}")
    for name in ("shuffle", "drop_last"):
        if not isinstance(state[name], bool):
            raise _refusal(f"{what} has {name}={state[name]!r}, which must be true or false")
    if place.part_index >= place.num_parts:
        raise _refusal(f"{what} is of part_index={place.part_index}, but num_parts is {place.num_parts}")
    if not (place.is_beginning or place.can_be_made_again):
        raise _refusal(f"{what} is within an epoch, whose order cannot be made again without a seed")
    return place


def _read_generations(what: str, state: Mapping[Any, Any]) -> tuple[Generation, ...]:
    generations = state["generations"]
    if not isinstance(generations, list):
        raise _refusal(f"{what} has generations={generations!r}, which must be a list")
    for one in generations:
        known = isinstance(one, Mapping) and isinstance(one.get("drop_last"), bool)
        if not known or not _are_counts(one.get("visited")):
            raise _refusal(
                f"{what} has the generation {one!r}, which must hold drop_last (true or false) and visited (a list of"
                " whole numbers, one for each part)"
            )
    return tuple(Generation(one["drop_last"], tuple(one["visited"])) for one in generations)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(one, 0) for one in value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
