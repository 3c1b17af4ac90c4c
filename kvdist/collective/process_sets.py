"""Process sets: subsets of the ranks that do operations among themselves.

All ranks add and remove the same sets in the same order; numbers count up from 1 and are not reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from kvdist.collective.engine import ALL_RANKS, CollectiveEngine, current
from kvdist.collective.operations import MarkerOperation
from kvdist.collective.signature import ADD_SET, REMOVE_SET, Signature


class ProcessSet:
    """Subset of the ranks. `init` or `add_process_set` registers it on all ranks.

    Args:
        ranks: ranks of the members, as separate arguments or as a list.

    Raises:
        ValueError: a member is not an integer.

    Attributes:
        process_set_id: number of the set; None while it is not registered.
    """

    def __init__(self, *ranks: int | Iterable[int]) -> None:
        given = [rank for item in ranks for rank in (item if isinstance(item, Iterable) else [item])]
        if not all(isinstance(rank, Integral) for rank in given):
            raise ValueError(f"the members of a process set must be integers, got {given}")
        self._ranks: tuple[int, ...] | None = tuple(sorted(map(int, given)))
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int]:
        """Ranks of the members, ascending."""
        return list(range(current().world.size)) if self._ranks is None else list(self._ranks)

    def included(self) -> bool | None:
        """Whether this rank is a member; None while the set is not registered."""
        return None if self.process_set_id is None else current().world.rank in self.ranks

    def rank(self) -> int | None:
        """Position of this rank within the set; None while the set is not registered.

        Raises:
            ValueError: this rank is not a member.
        """
        included = self.included()
        if included is None:
            return None
        if not included:
            raise ValueError(f"rank {current().world.rank} is not in process set {self}")
        return self.ranks.index(current().world.rank)

    def size(self) -> int | None:
        """Number of members; None while the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def __repr__(self) -> str:
        ranks = "all ranks" if self._ranks is None else f"ranks {', '.join(map(str, self._ranks))}"
        return f"ProcessSet({ranks}; id {self.process_set_id})"

    def _number(self) -> int:
        if self.process_set_id is None:
            raise ValueError(f"{self} is not registered: pass it to init(process_sets=...) or add_process_set() first")
        return self.process_set_id

    def _forget(self) -> None:
        self.process_set_id = None


global_process_set = ProcessSet()
"""Process set of all ranks."""
global_process_set.process_set_id = ALL_RANKS
global_process_set._ranks = None


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set and return it. All ranks, members or not, must call it with the same set.

    Raises:
        ValueError: a set of these ranks already exists, the ranks are invalid, or ranks pass different sets.
    """
    return _add(process_set, may_exist=False)


def _add(process_set: ProcessSet | Iterable[int], may_exist: bool) -> ProcessSet:
    engine = current()
    try:
        made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        exists = _exists(made, engine, may_exist)
    except ValueError as error:
        engine.refuse(error, kind=ADD_SET)
        raise
    ranks = tuple(made.ranks)
    signature = Signature(ADD_SET, "", (), f"ranks {', '.join(map(str, ranks))}")
    if exists:
        engine.submit(MarkerOperation(signature)).result()
        return made
    made.process_set_id = engine.submit(MarkerOperation(signature, lambda: engine.open_set(ranks))).result()
    engine.at_close(made._forget)
    return made


def add_process_sets(process_sets: Sequence[ProcessSet | Iterable[int]]) -> None:
    """Register process sets, the same list on all ranks. A set whose ranks already form a set stays unregistered.

    Raises:
        ValueError: the ranks of a set are invalid or differ between ranks, or a rank has more sets than another rank.
    """
    engine = current()
    if process_sets:
        detail = f"{len(process_sets)} process sets"
        engine.submit(MarkerOperation(Signature("init", "", (), detail))).result()
    for process_set in process_sets:
        _add(process_set, may_exist=True)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks must call it.

    Returns:
        True, or False for a set that is not registered and for the set of all ranks.
    """
    engine, number = current(), process_set.process_set_id
    if number is None or number == ALL_RANKS or number not in engine.sets:
        return False
    removal = MarkerOperation(Signature(REMOVE_SET, "", (), f"id {number}"), lambda: engine.close_set(number))
    engine.submit(removal).result()
    process_set._forget()
    engine.not_at_close(process_set._forget)
    return True


def _exists(process_set: ProcessSet, engine: CollectiveEngine, may_exist: bool) -> bool:
    ranks, size = tuple(process_set.ranks), engine.world.size
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is registered already")
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a process set needs one or more distinct ranks from 0 to {size - 1}, got {list(ranks)}")
    number = next((number for number, known in engine.sets.items() if known == ranks), None)
    if number is not None and not may_exist:
        raise ValueError(f"a process set of ranks {list(ranks)} exists already, with the id {number}")
    return number is not None
