"""What an operation is, as far as all ranks must agree on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from kvdist.protocol.collective import DIGEST_BYTES

JOIN = "join"
"""The kind of `join`: the others go on without this rank, which takes part with zeros."""
REFUSED = "refused"
"""The kind of what a rank reports in the place of an operation that it could not call; `detail` says why."""
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
"""The kinds with which all ranks come to know a process set, and forget it; the latter's detail ends with its id."""
REDUCTIONS = ("allreduce", "grouped allreduce")
"""Kinds in which a rank that has joined can take part, by zeros of the shapes that the signature tells."""
LINEAR_OPS = ("Sum", "Average")
"""What they may make of the tensors then: the first word of the detail."""
ALWAYS_AGREED = (JOIN, REFUSED, ADD_SET, REMOVE_SET)
"""Kinds that are waited for each time, also when the ranks have agreed on the same before."""


@dataclass(frozen=True)
class Signature:
    """One operation, without what may differ between the ranks.

    Attributes:
        kind: such as ``allreduce``.
        name: what the user calls it; '' for an operation without a name, which goes by its place in the program.
        tensors: of each tensor the dtype and the part of its shape that must agree, such as ``float32[17, 3]``;
            ``float32[*, 3]`` where the ranks may have different numbers of rows.
        detail: the rest, such as ``Sum`` or ``from rank 0``.
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
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{name}{of}{where}{detail}"

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that differ where anything differs."""
        text = "\0".join((self.kind, self.name, *self.tensors, self.detail, self.device))
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()

    @property
    def takes_zeros(self) -> bool:
        """Whether a rank that has joined can take part in it."""
        return self.kind in REDUCTIONS and self.detail.partition(",")[0] in LINEAR_OPS


JOIN_SIGNATURE = Signature(JOIN, "", ())
