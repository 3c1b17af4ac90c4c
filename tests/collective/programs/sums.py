"""A rank that sums noise with the others, and says what it has got: `digest` of all bytes, and whether it is right."""

import hashlib
import sys

import torch

import kvdist.collective as hvd
from kvdist.collective.engine import current

COUNTS = [int(word) for word in sys.argv[1:]]


def noise(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(count, generator=generator) for count in COUNTS]


def main():
    hvd.init()
    sums = hvd.grouped_allreduce(noise(hvd.rank()), op=hvd.Sum)
    expected = [torch.stack(ranks).sum(dim=0) for ranks in zip(*map(noise, range(hvd.size())), strict=True)]
    for one, other in zip(sums, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (one, other)
    shares = current().group()._channel.waits_in_begin  # as it does where it sums in memory that ranks share
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in sums)).hexdigest()
    place = f"{hvd.local_rank()} of {hvd.local_size()} here, {hvd.cross_rank()} of {hvd.cross_size()} across"
    print(f"rank {hvd.rank()} of {hvd.size()}: {place}; shares {shares}, digest {digest}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
