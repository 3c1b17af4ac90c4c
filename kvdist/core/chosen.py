"""The optimizer that the workers of a store have chosen, as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdist.core.keybook import KeyBook
from kvdist.core.sharding import Keep, keep_for
from kvdist.nodes import Member
from kvdist.optimizer.registry import from_description
from kvdist.protocol.messages import Configure

Description = dict[str, str | int | float | bool | None]


@dataclass(slots=True)
class Optimizer:
    """The optimizer of a store, and who waits until every server has it."""

    description: Description
    chosen_by: Member
    keep: Keep
    """What of a key it wants to see together."""
    installed: bool = False
    failure: str = ""
    waiters: list[tuple[Member, int]] = field(default_factory=list)


def choose(message: Configure, sender: Member, book: KeyBook | None, num_servers: int) -> Optimizer:
    """What a worker asks for first.

    Raises:
        ValueError: nobody knows such an optimizer, or a key of the store has been torn that it must have together.
    """
    keep = keep_for(from_description(message.description))
    torn = [] if book is None else book.torn(keep, num_servers)
    if torn:
        whole = "live whole on one server" if keep is Keep.WHOLE else "be cut between rows"
        raise ValueError(
            f"the parameters of {message.description['name']} must {whole}, and key {torn[0]!r} was initialised"
            " before: call set_optimizer before init"
        )
    return Optimizer(message.description, sender, keep, waiters=[(sender, message.request)])
