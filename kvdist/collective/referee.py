"""What a group asks about its operations: whether the other ranks are at the same ones, and what went wrong."""

from __future__ import annotations

import abc

from kvdist.collective.signature import Signature
from kvdist.errors import CollectiveError
from kvdist.protocol.collective import Joined, Play


class Referee(abc.ABC):
    """Sees that the ranks of a group are at the same operation."""

    @abc.abstractmethod
    def called(self, group: int, signature: Signature) -> None:
        """The program has called the next operation of a group. Waits for nobody."""

    @abc.abstractmethod
    def admit(self, group: int, sequence: int) -> None:
        """Called on the group's thread before each operation; blocks where the others must be heard first.

        Raises:
            CollectiveError: they are at another operation, or one is gone.
        """

    @abc.abstractmethod
    def done(self, group: int) -> None:
        """An operation is over, well or not."""

    @abc.abstractmethod
    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        """What to tell the user in the place of an error of torch; may wait a moment for news of the cause."""

    @abc.abstractmethod
    def stand_in(self, group: int, sequence: int) -> Play | Joined:
        """What a rank that has joined is to do next, once that is known.

        Raises:
            CollectiveError: one is gone, or the group has failed.
        """


class Trusting(Referee):
    """Asks nobody: for a process that is alone."""

    def called(self, group: int, signature: Signature) -> None: ...

    def admit(self, group: int, sequence: int) -> None: ...

    def done(self, group: int) -> None: ...

    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        return CollectiveError(f"{signature} failed: {error}")

    def stand_in(self, group: int, sequence: int) -> Play | Joined:
        return Joined(group, sequence, 0)
