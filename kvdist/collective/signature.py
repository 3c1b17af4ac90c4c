"""The signature of an operation: the facts that all ranks must agree on."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvdist.protocol.collective import DIGEST_BYTES

JOIN = "join"
"""The kind of `join`: the other ranks go on, and this rank takes part with zeros."""
REFUSED = "refused: "
"""Begin of the detail of an operation that a rank could not call; the reason follows."""
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
"""The kinds that add and remove a process set; the detail of the latter ends with the set's id."""
REDUCTIONS = ("allreduce", "grouped allreduce")
"""Kinds in which a rank that is out of data (`join`) takes part with zeros, under an operator of `LINEAR_OPS`."""
LINEAR_OPS = ("Sum", "Average")
"""Reduction operators for which zeros of a rank out of data do no harm: the first word of the detail."""
ASIDE = "\x1f"
"""Separates the compared part of a detail from text that is only shown, in which ranks may differ."""
ALWAYS_AGREED = (JOIN, ADD_SET, REMOVE_SET)
"""Kinds that always wait for agreement, predicted or not; so do refused operations."""


def kind_of(kind: str, count: int) -> str:
    """The kind of an operation on a number of tensors."""
    return kind if count == 1 else f"grouped {kind}"


def span(names: Sequence[str]) -> str:
    """The first and the last of some names; with three or more also a checksum of all names in their order."""
    if len(names) < 3:
        return " to ".join(names)
    order = zlib.crc32("\0".join(names).encode("utf-8", "surrogatepass"))
    return f"{names[0]} to {names[-1]}, in the order {order:08x}"


@dataclass(frozen=True)
class Signature:
    """An operation, without the parts in which ranks may differ.

    Attributes:
        kind: such as ``allreduce``.
        name: the user's name for it; '' for an operation without a name.
        tensors: of each tensor the dtype and the part of its shape that must agree, such as ``float32[17, 3]``;
            ``float32[*, 3]`` where the ranks may have different numbers of rows.
        detail: the rest, such as ``Sum`` or ``from rank 0``; text after `ASIDE` is not compared.
        device: the kind of device of the tensors, ``cpu`` or ``cuda``.
    """

    kind: str
    name: str
    tensors: tuple[str, ...]
    detail: str = ""
    device: str = "cpu"

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        shown = ", ".join(self.tensors[:3]) + (f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else "")
        of = f" of {shown}" if shown else ""
        where = f" on {self.device}" if self.device != "cpu" else ""
        detail = f" ({self.detail.replace(ASIDE, ': ')})" if self.detail else ""
        return f"{self.kind}{name}{of}{where}{detail}"

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that identify the signature."""
        text = "\0".join((self.kind, self.name, *self.tensors, self.detail.partition(ASIDE)[0], self.device))
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()

    @cached_property
    def key(self) -> str:
        """Pairs it with the other ranks' operations: kind and name; '' where their order does."""
        return f"{self.kind} {self.name}" if self.name else ""

    @property
    def is_refused(self) -> bool:
        """Whether its rank could not call it."""
        return self.detail.startswith(REFUSED)

    @property
    def takes_zeros(self) -> bool:
        """Whether a rank that has joined can take part in it."""
        return self.kind in REDUCTIONS and self.detail.partition(",")[0] in LINEAR_OPS


JOIN_SIGNATURE = Signature(JOIN, "", ())
