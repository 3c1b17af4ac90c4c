"""Encoded contributions become plain ones as soon as they arrive, so that nothing behind this knows of encodings.

One pass: the bytes are read (a sixteenth of the elements' for 2-bit) and the elements written; the round then reads
them as it reads any other contribution.
"""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.optimizer.compression import decode
from kvdist.protocol.arrays import Arrays, PayloadView, as_octets, decoded_dtypes, offsets
from kvdist.protocol.messages import CompressedPush, Push

_ITEMSIZE = DType.FLOAT32.itemsize


def decoded(message: CompressedPush, kernels: Kernels) -> Push:
    """The same contributions with their elements, in one frame of ordinary memory."""
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
    return Push(
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
