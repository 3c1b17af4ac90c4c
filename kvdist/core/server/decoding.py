"""Pushes that do not arrive as plain contributions: encoded pushes, and the sums of the workers of a host.

Encoded contributions are decoded at once, in a single pass: the bytes are read (a sixteenth of the elements' for
2-bit) and the elements written; the round then reads them like plain contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist.core.round import UNANSWERED, Contribution
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import Arrays, PayloadView, as_octets, decoded_dtypes, offsets

_ITEMSIZE = DType.FLOAT32.itemsize
_EMPTY = int(msg.Flag.EMPTY)
_NO_VALUES = np.zeros(0, np.uint8)


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


def as_push(message: msg.JoinedPush) -> msg.Push:
    """Return the sums of a host as pushes of the sender alone: see `parts_of_sum`."""
    columns = (message.flags, message.settings, message.setting_of, message.arrays)
    zeros = np.zeros_like(message.ids)
    return msg.Push(message.pull, message.runs, message.ids, zeros, message.versions, zeros, *columns)


def parts_of_sum(summed: Contribution, contributors: Sequence[msg.Contributor]) -> list[Contribution]:
    """Return a contribution of each worker that has pushed a part of a sum: the first has the sum, the others nothing.

    The sender of the sum gets the reply.
    """
    ranks = tuple([one.rank for one in contributors])
    parts = []
    for one in contributors:
        run = summed.run if one.member == summed.member else UNANSWERED
        about = (run, one.step, summed.version, one.samples, summed.flags, summed.setting, summed.values, summed.pull)
        parts.append(Contribution(one.member, *about, ranks))
    for part in parts[1:]:
        part.flags, part.values = part.flags | _EMPTY, _NO_VALUES
    return parts
