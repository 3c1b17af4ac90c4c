"""What a program calls behind what: whether ranks that differ could both take their next operation for the usual one.

Gloo adds what does not belong together, and ends the process that gets more bytes than it expects. So of ranks that
differ none but one may have begun. An operation is begun without asking the others if the same one was agreed on behind
the same operation before, and no other one has ever come there. Where several have, such as a metric after some of the
steps, the last `PAST` operations are looked at in the place of one; if even these have been followed by several, the
others are asked each time.

All ranks come to the same judgement, because it follows from what they have called up to here, which is the same.
Forgetting is allowed at any time: it only lets a rank ask. Pure; there is one for each group.
"""

from __future__ import annotations

from kvdist.protocol.collective import DIGEST_BYTES

PAST = 16
"""So many operations are looked at where one does not tell what comes next."""
STEPS_MAX = 32_768
"""Steps that are remembered. All are forgotten beyond this, for programs whose names never end."""

_SEVERAL = b""


class Habits:
    """See the module."""

    def __init__(self) -> None:
        self._past = b""
        self._next: dict[bytes, bytes] = {}
        self._agreed: set[bytes] = set()

    def call(self, digest: bytes) -> tuple[bool, bytes]:
        """The program calls an operation.

        Returns:
            Whether it is the usual one, and what was called before, for `agree`.
        """
        past, near = self._past, self._past[-DIGEST_BYTES:]
        if len(self._next) >= 2 * STEPS_MAX:
            self._forget()
        for context in (near, past):
            if self._next.setdefault(context, digest) != digest:
                self._next[context] = _SEVERAL
        self._past = (past + digest)[-PAST * DIGEST_BYTES :]
        context = past if self._next[near] == _SEVERAL else near
        return self._next[context] == digest and context + digest in self._agreed, past

    def agree(self, past: bytes, digest: bytes) -> None:
        """All ranks have called this operation behind that past."""
        if len(self._agreed) >= 2 * STEPS_MAX:
            self._forget()
        self._agreed |= {past[-DIGEST_BYTES:] + digest, past + digest}

    def restart(self) -> None:
        """Know nothing any more: ranks have called different operations."""
        self._past = b""
        self._forget()

    def _forget(self) -> None:
        self._next.clear()
        self._agreed.clear()
