"""Pinned blocks in which results arrive before their upload: used again, and not released while a GPU reads them."""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kvstore.device import KEPT_MAX, PINNED_BYTES_MIN, PinnedBlocks, Upload
from kvdist.kvstore.placement import OnDevice
from tests.cases import each
from tests.devices import NumpyDevice

SIZES = [nbytes * PINNED_BYTES_MIN for nbytes in (6, 2, 10, 4, 8, 12, 1)]


def rise(blocks: PinnedBlocks, device: NumpyDevice, count: int) -> None:
    """A call whose result of so many elements comes to the device."""
    upload = Upload(blocks, [(count, DType.FLOAT32)], device)
    out = device.array(np.zeros(count, np.float32))
    upload.want(0, OnDevice(device, out))
    upload.results[0][...] = count
    upload.start()
    assert (out.memory == count).all()


def test_a_block_of_a_call_that_is_over_is_found_among_those_of_other_sizes():
    device, blocks = NumpyDevice(), PinnedBlocks()
    taken = [blocks.take(nbytes, device) for nbytes in SIZES[:KEPT_MAX]]
    for block in taken:
        blocks.give_back(block)
    assert blocks.take(9 * PINNED_BYTES_MIN, device) is taken[2]
    assert blocks.take(9 * PINNED_BYTES_MIN, device) not in taken, "it is under way"


def test_a_small_block_is_not_pinned_and_given_up_when_nobody_reads_it():
    device, blocks = NumpyDevice(), PinnedBlocks()
    block = blocks.take(PINNED_BYTES_MIN - 1, device)
    assert block.memory.size == PINNED_BYTES_MIN - 1 and device.pinned_bytes == 0
    device.upload(block.memory[:50], device.array(np.zeros(50, np.uint8)))
    block.marks.append(device.mark())
    blocks.give_back(block)
    assert not device.pending, "it was waited for"


def test_of_too_many_blocks_the_smallest_is_let_go_and_only_when_nobody_reads_it():
    device, blocks = NumpyDevice(), PinnedBlocks()
    taken = [blocks.take(nbytes, device) for nbytes in SIZES]
    device.upload(taken[-1].memory[:50], device.array(np.zeros(50, np.uint8)))
    taken[-1].marks.append(device.mark())
    for block in taken:
        blocks.give_back(block)
    assert not device.pending, "it was waited for"
    kept = [blocks.take(PINNED_BYTES_MIN, device) for _ in range(KEPT_MAX)]
    assert sorted(block.memory.size for block in kept) == sorted(SIZES)[-KEPT_MAX:]


@each("counts", [SIZES, SIZES[::-1], [1, 100_000, 7, 3, 90_000]])
def test_calls_of_all_sizes_bring_their_results(counts):
    device, blocks = NumpyDevice(), PinnedBlocks()
    for count in counts * 3:
        rise(blocks, device, count)
    blocks.close()
    assert not device.pending, "no block is let go while it is read"
