"""The optimizer that the workers of a store have chosen, as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdist.core.scheduler.keybook import KeyBook
from kvdist.core.server.row_block import obstacle
from kvdist.core.sharding import Keep, keep_for
from kvdist.nodes import Member
from kvdist.optimizer.registry import from_description
from kvdist.protocol.messages import ROWS, Configure, Declare

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
        ValueError: nobody knows such an optimizer, a key of the store has been torn that it must have together, or it
            cannot update one of the store's tables of rows.
    """
    optimizer = from_description(message.description)
    for entry in [] if book is None else book.tables:
        reason = obstacle(optimizer, entry.key, entry.shape, entry.form != ROWS)
        if reason:
            raise ValueError(reason)
    keep = keep_for(optimizer)
    torn = [] if book is None else book.torn(keep, num_servers)
    if torn:
        whole = "live whole on one server" if keep is Keep.WHOLE else "be cut between rows"
        raise ValueError(
            f"the parameters of {message.description['name']} must {whole}, and key {torn[0]!r} was initialised"
            " before: call set_optimizer before init"
        )
    return Optimizer(message.description, sender, keep, waiters=[(sender, message.request)])


def obstacle_to(message: Declare, chosen: Optimizer | None) -> str:
    """Why the optimizer of a store cannot update one of these keys, if that is a table of rows; '' if it can."""
    if chosen is None or not any(message.forms):
        return ""
    optimizer = from_description(chosen.description)
    for key, shape, form in zip(message.keys, message.shapes, message.forms, strict=True):
        reason = obstacle(optimizer, key, shape, form != ROWS) if form else None
        if reason:
            return reason
    return ""
