"""Adasum: a sum of orthogonal gradients, an average of parallel ones, and a blend in between.

Adasum(a, b) = (1 - a·b / 2a·a) a + (1 - a·b / 2b·b) b, applied to pairs, pairs of pairs and so on, so the number of
ranks is a power of two. Each tensor of an operation is a separate vector.

The algorithm is vector halving with distance doubling. At each level a rank and its partner exchange halves of their
pieces, the ranks with pieces of the same two vectors add up their dot products, and each combines its piece. At the end
each rank has one piece of the result, and all gather them. Every rank sends twice the size of the tensors for any
number of ranks. Dot products and coefficients are float64; half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.operations import AllReduce, writing
from kvdist.collective.reduction import scale_
from kvdist.reduce_op import Adasum

TINY = torch.finfo(torch.float64).tiny ** 0.5
"""A squared norm below it counts as zero."""


class AdasumOperation(AllReduce):
    """All ranks get the Adasum of their tensors.

    Args:
        name: the user's name for it; '' for none.
        tensors: floating-point tensors, of any dtypes.
        outputs: tensors for the results, `tensors` themselves if in place.
        size: number of ranks of the group, a power of two.
        prescale, postscale: factors before and after.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        size: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of two of ranks, got {size}")
        super().__init__(name, tensors, outputs, Adasum, prescale, postscale)

    def begin(self, channel: Channel) -> Sequence[Work]:
        with writing(self._outputs):
            for dtype in (torch.float32, torch.float64):
                members = [i for i, tensor in enumerate(self._tensors) if _computed_in(tensor.dtype) is dtype]
                if members:
                    self._reduce(members, dtype, channel)
        return []

    def _reduce(self, members: list[int], dtype: torch.dtype, channel: Channel) -> None:
        sizes = [self._tensors[i].numel() for i in members]
        total = sum(sizes)
        piece = -(-total // channel.size)
        flat = self._tensors[members[0]].new_zeros(piece * channel.size, dtype=dtype)
        views = torch.split(flat[:total], sizes)
        for i, view in zip(members, views, strict=True):
            view.view(self._tensors[i].shape).copy_(self._tensors[i])
        scale_(flat, self._prescale)
        ends = torch.tensor(sizes, device="cpu").cumsum(0).tolist()
        combine(flat, [(end - size, end) for size, end in zip(sizes, ends, strict=True)], channel)
        scale_(flat, self._postscale)
        for i, view in zip(members, views, strict=True):
            self._outputs[i].copy_(view.view(self._outputs[i].shape))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def combine(flat: torch.Tensor, vectors: Sequence[tuple[int, int]], channel: Channel) -> None:
    """Replace a vector of a multiple of `channel.size` elements by the Adasum over the ranks.

    Args:
        flat: this rank's vector.
        vectors: (begin, end) of each part that is a separate vector.
        channel: to a power of two of ranks.
    """
    first, held, distance = 0, flat, 1
    while distance < channel.size:
        is_lower = not channel.rank & distance
        half = held.numel() // 2
        mine, given = (held[:half], held[half:]) if is_lower else (held[half:], held[:half])
        theirs = _exchange(given, channel.rank ^ distance, channel)
        first += 0 if is_lower else half
        lower, upper = (mine, theirs) if is_lower else (theirs, mine)
        dots = _dots(lower, upper, first, vectors)
        distance *= 2
        held = _combined(lower, upper, first, vectors, _over_block(dots, distance, channel))
    pieces = torch.empty_like(flat)
    if held.numel():
        channel.all_gather(pieces, held.contiguous()).wait()
    for rank, piece in enumerate(torch.split(pieces, max(held.numel(), 1))):
        begin = _place(rank, channel.size) * held.numel()
        flat[begin : begin + held.numel()] = piece


def _exchange(given: torch.Tensor, partner: int, channel: Channel) -> torch.Tensor:
    counts = [given.numel() if rank == partner else 0 for rank in range(channel.size)]
    received = torch.empty_like(given)
    if given.numel():
        channel.all_to_all(received, given.contiguous(), counts, counts).wait()
    return received


def _dots(a: torch.Tensor, b: torch.Tensor, first: int, vectors: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Partial a·a, b·b and a·b of each vector, over its elements in these pieces, which begin at `first`."""
    dots = torch.zeros(len(vectors), 3, dtype=torch.float64, device="cpu")
    for row, (begin, end) in _within(first, a.numel(), vectors):
        one, other = a[begin:end].double(), b[begin:end].double()
        dots[row] = torch.stack([one.dot(one), other.dot(other), one.dot(other)]).cpu()
    return dots


def _over_block(dots: torch.Tensor, block: int, channel: Channel) -> torch.Tensor:
    """The sums over an aligned block of ranks, which hold pieces of the same two vectors, in rank order."""
    of_ranks = torch.empty(channel.size, *dots.shape, dtype=dots.dtype, device="cpu")
    channel.all_gather(of_ranks.view(-1), dots.view(-1)).wait()
    begin = channel.rank // block * block
    return of_ranks[begin : begin + block].sum(0)


def _combined(
    a: torch.Tensor, b: torch.Tensor, first: int, vectors: Sequence[tuple[int, int]], dots: torch.Tensor
) -> torch.Tensor:
    result = torch.zeros_like(a)
    for row, (begin, end) in _within(first, a.numel(), vectors):
        aa, bb, ab = dots[row].tolist()
        # A coefficient may exceed float32 where one vector is tiny and the other huge.
        result[begin:end] = a[begin:end].double() * _coefficient(ab, aa) + b[begin:end].double() * _coefficient(ab, bb)
    return result


def _coefficient(dot: float, square: float) -> float:
    return 1.0 if square < TINY else 1.0 - dot / square * 0.5


def _within(first: int, count: int, vectors: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """(number, (begin, end)) of each vector with elements in the piece of `count` elements that begins at `first`."""
    cuts = [(max(begin - first, 0), min(end - first, count)) for begin, end in vectors]
    return [(row, cut) for row, cut in enumerate(cuts) if cut[0] < cut[1]]


def _place(rank: int, size: int) -> int:
    """The piece that a rank ends with: at each level the lower rank of a pair keeps the first half."""
    place, level = 0, 1
    while level < size:
        place = place * 2 + (1 if rank & level else 0)
        level *= 2
    return place
