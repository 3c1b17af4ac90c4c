"""Pushes that do not arrive as plain contributions: encoded pushes, and the joined push of the workers of a host.

Encoded contributions are decoded at once, in a single pass: the bytes are read (a sixteenth of the elements' for
2-bit) and the elements written; the round then reads them like plain contributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvdist import errors
from kvdist.core.round import Contribution, setting_of
from kvdist.core.server.block import Block
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import Arrays, PayloadView, as_octets, decoded_dtypes, offsets, stretches

_ITEMSIZE = DType.FLOAT32.itemsize
_ADDS_NOTHING = int(msg.Flag.EMPTY | msg.Flag.CARRIED)


def decoded(message: msg.CompressedPush, kernels: Kernels) -> msg.Push:
    """Return the same contributions with their elements, in a frame of ordinary memory."""
    from kvdist.optimizer.compression import decode  # a feature at a seam: loaded where it is used

    coded = message.arrays
    dtypes = decoded_dtypes(coded)
    starts, nbytes = offsets(dtypes, coded.counts)
    elements = np.empty(nbytes // _ITEMSIZE, DType.FLOAT32.storage)
    columns = (starts // _ITEMSIZE, coded.counts, coded.entries)
    payload = PayloadView(as_octets(coded)).arrays(0, len(starts))
    for data, start, count, entries in zip(payload, *(column.tolist() for column in columns), strict=True):
        stop = start + count
        decode(coded.encoding, coded.parameter, data, entries, elements[start:stop], kernels)
        elements[stop : stop + count % 2] = 0  # the padding, which is summed with that of the others
    return msg.Push(
        message.pull,
        message.runs,
        message.ids,
        message.steps,
        message.versions,
        message.samples,
        message.flags,
        message.settings,
        message.setting_of,
        Arrays(dtypes, coded.counts, elements.view(np.uint8).data),
    )


@dataclass(frozen=True, slots=True, eq=False)
class JoinedSlice:
    """The contributions of a host to a slice."""

    number: int
    run: int
    """The run of the sender, which gets the reply."""
    contributions: Sequence[Contribution]
    strangers: Sequence[int]
    """Ranks for which the sender may not speak."""
    counts: Sequence[int]
    """Elements of each row with bytes."""
    dtypes: Sequence[int]

    def require_fit(self, block: Block) -> None:
        """Check that the contributions fit a block of a single slice.

        Raises:
            PushRefused: they do not fit; the sender is broken.
        """
        obstacle = ""
        if self.strangers or not any(not contribution.silent for contribution in self.contributions):
            names = ", ".join(f"worker-{rank}" for rank in self.strangers) or "others only"
            obstacle = f"the sender speaks for {names}, and may speak for itself and the workers of its host"
        elif len({contribution.member for contribution in self.contributions}) < len(self.contributions):
            obstacle = f"slice {self.number} has two contributions of one worker"
        elif not block.round.policy.is_lockstep:
            obstacle = (
                f"{name_of(block.key)} is asynchronous: contributions are applied one by one, not summed on the way"
            )
        elif any(count != block.pool.size for count in self.counts) or any(code != block.dtype for code in self.dtypes):
            obstacle = f"slice {self.number} has another size or dtype than was declared"
        if obstacle:
            raise errors.PushRefused(obstacle)


def joined_slices(sender: Member, message: msg.JoinedPush, neighbours: Mapping[int, Member]) -> Iterator[JoinedSlice]:
    """Yield the contributions of a joined push, slice by slice.

    Args:
        sender: the leader of a host.
        message: its push.
        neighbours: rank → worker of that host, departed ones included.

    Raises:
        ValueError: the payload has another length than its header.
    """
    arrays = PayloadView(message.arrays).arrays(0, len(message.ids))
    settings = [setting_of(numbers) for numbers in message.settings]
    columns = (message.ranks, message.steps, message.versions, message.samples, message.flags, message.setting_of)
    ranks, steps, versions, samples, flags, setting = (column.tolist() for column in columns)
    codes = message.arrays.dtypes.tolist()
    for begin, end in stretches(message.ids):
        run = int(message.runs[begin])
        rows = range(begin, end)
        contributions = [
            Contribution(
                neighbours[ranks[i]], run, steps[i], versions[i], samples[i], flags[i], settings[setting[i]], arrays[i],
                message.pull, silent=neighbours[ranks[i]] != sender,
            )
            for i in rows
            if ranks[i] in neighbours
        ]  # fmt: skip
        strangers = [ranks[i] for i in rows if ranks[i] not in neighbours]
        with_bytes = [i for i in rows if not flags[i] & _ADDS_NOTHING]
        yield JoinedSlice(
            int(message.ids[begin]),
            run,
            contributions,
            strangers,
            [arrays[i].size for i in with_bytes],
            [codes[i] for i in with_bytes],
        )
