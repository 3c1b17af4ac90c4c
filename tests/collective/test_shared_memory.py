"""Sums through memory that the ranks of a host share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import kvdist.collective as hvd
from kvdist.collective import shared_memory
from kvdist.config.settings import CollectiveSettings
from tests.collective.ranks import returned, run_ranks

SMALL = shared_memory.SMALL_BYTES // 4
SLOT = shared_memory.SLOT_BYTES // 4


class Places:
    """On which host each rank is, and what it has summed through shared memory."""

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts
        self.sums: list[int] = []
        self.fails_on: int | None = None
        """The rank that gets no memory."""
        self._here = threading.local()

    def connected(self, connect: Callable[..., Any], store: Any, rank: int, size: int, host: str, *rest: Any) -> Any:
        self._here.rank = rank
        return connect(store, rank, size, self.hosts[rank] if host else "", *rest)

    def create(self, create: Callable[..., int], *args: Any) -> int:
        if self._here.rank == self.fails_on:
            raise OSError(24, "Too many open files")
        return create(*args)

    def summed(self, sum_: Callable[..., None], memory: Any, tensors: Iterable[torch.Tensor]) -> None:
        given = list(tensors)
        self.sums += [tensor.numel() for tensor in given]
        sum_(memory, given)


@pytest.fixture
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    """By default every rank is on the same host."""
    own = Places(getattr(request, "param", "aaaa"))
    connect, sum_, create = shared_memory.connected, shared_memory.SharedMemory.sum, os.memfd_create
    with (
        mock.patch.object(shared_memory, "connected", lambda *args: own.connected(connect, *args)),
        mock.patch.object(shared_memory.SharedMemory, "sum", lambda *args: own.summed(sum_, *args)),
        mock.patch.object(os, "memfd_create", lambda *args: own.create(create, *args)),
    ):
        yield own


def sums_of(rank: int, dtype: torch.dtype, sizes: list[int]) -> list[torch.Tensor]:
    """Of whole numbers, which any order sums to the same bits."""
    return [hvd.allreduce((torch.arange(size) % 7 + rank).to(dtype), op=hvd.Sum, name=f"of {size}") for size in sizes]


def check_sums(size: int, dtype: torch.dtype, counts: list[int]) -> None:
    for found in returned(run_ranks(size, sums_of, dtype, counts)):
        for count, tensor in zip(counts, found, strict=True):
            expected = sum((torch.arange(count) % 7 + rank).to(dtype) for rank in range(size))
            assert torch.equal(tensor, expected), f"{count} elements"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_tensors_that_take_no_slot_one_and_several(size: int, places: Places) -> None:
    counts = [1, 5, SMALL, SMALL + 1, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 5, 2]

    check_sums(size, torch.float32, counts)

    assert places.sums.count(3 * SLOT + 5) == size, "they went through shared memory"


@pytest.mark.parametrize("places", ["aaaa", "abab"], indirect=True)
def test_tensors_of_one_operation_share_chunks(places: Places) -> None:
    third = SLOT // 3 + 7  # travels alone, and every fourth lies in two slots
    counts = [third, third, SLOT, 5, third, third, third, 2 * SLOT - third, SMALL + 1, third, third]
    dtypes = [torch.float32] * 9 + [torch.int32, torch.float64]

    def given(rank: int) -> list[torch.Tensor]:
        pairs = zip(counts, dtypes, strict=True)
        return [((torch.arange(count) + 3 * i) % 11 + rank).to(dtype) for i, (count, dtype) in enumerate(pairs)]

    def summed(rank: int) -> list[torch.Tensor]:
        return hvd.grouped_allreduce(given(rank), op=hvd.Sum)

    expected = [sum(of_ranks) for of_ranks in zip(*map(given, range(4)), strict=True)]
    for found in returned(run_ranks(4, summed)):
        assert all(map(torch.equal, found, expected))
    assert third in places.sums


def test_a_chunk_is_full_before_the_next_begins_and_has_one_type() -> None:
    sizes = [3, SLOT - 3, SLOT + 1, 2 * SLOT, 1]
    tensors = [torch.full((size,), float(i)) for i, size in enumerate(sizes)] + [torch.zeros(4, dtype=torch.int8)]

    chunks = list(shared_memory.chunks_of(tensors))

    assert [chunk.count for chunk in chunks] == [SLOT, SLOT, SLOT, SLOT, 2, 4]
    stretches = [stretch for chunk in chunks for stretch, _ in chunk.between(0, chunk.count)]
    assert torch.equal(torch.cat(stretches[:-1]), torch.cat(tensors[:-1]))
    assert chunks[-1].dtype is torch.int8


@pytest.mark.parametrize("dtype", sorted(shared_memory.DTYPES, key=str), ids=str)
def test_every_type_is_summed_in_its_own_arithmetic(dtype: torch.dtype, places: Places) -> None:
    check_sums(3, dtype, [10, 100_000])

    assert len(places.sums) >= 6


def test_all_ranks_get_the_same_bits_which_are_those_of_the_order_of_the_ranks() -> None:
    def summed(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        given = [torch.randn(count, generator=generator) for count in (100, 300_000)]
        return [hvd.allreduce(one, op=hvd.Sum, name=str(len(one))) for one in given]

    found = returned(run_ranks(3, summed))

    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for i, count in enumerate((100, 300_000)):
        first, second, third = (torch.randn(count, generator=one) for one in generators)
        for of_rank in found:
            assert torch.equal(of_rank[i], (first + second) + third)


def test_a_mean_is_a_sum_that_is_divided(places: Places) -> None:
    def mean(rank: int) -> torch.Tensor:
        return hvd.allreduce(torch.full((SMALL + 1,), float(rank)), name="a")

    assert all(torch.equal(one, torch.full((SMALL + 1,), 0.5)) for one in returned(run_ranks(2, mean)))
    assert SMALL + 1 in places.sums


def test_many_operations_that_begin_before_the_first_is_done() -> None:
    def many(rank: int) -> list[torch.Tensor]:
        handles = [hvd.allreduce_async(torch.full((1000 * (i + 1),), float(rank + i)), op=hvd.Sum) for i in range(60)]
        return [hvd.synchronize(handle) for handle in handles]

    for found in returned(run_ranks(3, many)):
        for i, tensor in enumerate(found):
            assert torch.equal(tensor, torch.full((1000 * (i + 1),), float(3 + 3 * i)))


@pytest.mark.parametrize("places", ["aabb", "abab", "aabc", "aaab"], indirect=True)
def test_ranks_of_several_hosts_sum_on_each_and_then_between_them(places: Places) -> None:
    check_sums(4, torch.float32, [3, SMALL + 1, 2 * SLOT + 3])

    assert places.sums.count(2 * SLOT + 3) == 4


@pytest.mark.parametrize("places", ["abc", ["", ""]], indirect=True)
def test_ranks_with_nobody_beside_them_do_without(places: Places) -> None:
    check_sums(len(places.hosts), torch.float32, [10, SLOT])

    assert not places.sums


def test_all_do_without_where_one_rank_gets_no_memory(places: Places) -> None:
    places.fails_on = 1

    check_sums(3, torch.float32, [10, SLOT])

    assert not places.sums


def test_all_do_without_where_one_rank_asks_for_that(places: Places) -> None:
    with mock.patch.object(shared_memory, "host_of_this_process", side_effect=["a", ""]):
        check_sums(2, torch.float32, [10])
    assert not places.sums


def test_the_setting_asks_for_it(places: Places) -> None:
    settings = CollectiveSettings(transport="tcp")

    for found in returned(run_ranks(2, sums_of, torch.float32, [10], settings=settings)):
        assert torch.equal(found[0], 2 * (torch.arange(10) % 7) + 1)
    assert not places.sums


def test_all_do_without_where_python_has_no_files_in_memory(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")

    check_sums(2, torch.float32, [10])

    assert not places.sums


def test_what_overflows_is_summed_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    def summed(rank: int) -> torch.Tensor:
        inf = float("inf")
        return hvd.allreduce(torch.tensor([3e38, inf, -inf if rank else inf, 1.0]), op=hvd.Sum, name="a")

    for found in returned(run_ranks(2, summed)):
        assert found[:2].tolist() == [float("inf")] * 2 and found[2].isnan() and found[3] == 2
    assert not recwarn.list


def test_a_sum_is_there_before_others_call_the_next_one() -> None:
    """Also where the next one is the one that has followed before, which a rank begins as soon as it is called."""
    news = [threading.Event() for _ in range(6)]

    def rounds(rank: int) -> list[bool]:
        came = []
        for there in news:
            first = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="a")
            if not rank:
                second = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="b")
                hvd.synchronize(first)
                there.set()
            else:
                hvd.synchronize(first)
                came.append(there.wait(20))
                second = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="b")
            hvd.synchronize(second)
        return came

    assert returned(run_ranks(2, rounds))[1] == [True] * len(news)


def test_extremes_are_gloos(places: Places) -> None:
    def largest(rank: int) -> torch.Tensor:
        return hvd.allreduce(torch.tensor([float(rank), 1.0 - rank]), op=hvd.Max, name="a")

    assert all(torch.equal(one, torch.ones(2)) for one in returned(run_ranks(2, largest)))
    assert 2 not in places.sums


def test_a_rank_that_has_joined_takes_part_with_zeros(places: Places) -> None:
    def until_done(rank: int) -> list[float]:
        sums = [float(hvd.allreduce(torch.ones(SMALL + 1), op=hvd.Sum, name="a")[0]) for _ in range(1 + rank)]
        hvd.join()
        return sums

    assert returned(run_ranks(2, until_done)) == [[2.0], [2.0, 1.0]]
    assert SMALL + 1 in places.sums


def test_a_rank_that_leaves_early_harms_no_sum_that_it_has_made() -> None:
    def last(rank: int) -> torch.Tensor:
        if rank:
            threading.Event().wait(0.2)  # rank 0 waits for this one, and has closed when this one has its sum
        return hvd.allreduce(torch.ones(10), op=hvd.Sum, name="a")

    assert all(torch.equal(one, torch.full((10,), 3.0)) for one in returned(run_ranks(3, last)))


def pair() -> list[shared_memory.SharedMemory]:
    """The memory of two ranks of this process, without groups around it."""
    import socket

    ends = socket.socketpair()
    memory = [torch.zeros(2 * shared_memory.SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
    return [
        shared_memory.SharedMemory([3, 7], 0, [None, ends[0]], memory, None),
        shared_memory.SharedMemory([3, 7], 1, [ends[1], None], memory, None),
    ]


@pytest.mark.parametrize("count", [10, SMALL + 1])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_sum_whose_peer_is_gone_raises_and_names_it(count: int, end: str) -> None:
    mine, other = pair()
    failures: list[str] = []

    def wait() -> None:
        try:
            mine.sum([torch.ones(count)])
        except RuntimeError as error:
            failures.append(str(error))

    waits = threading.Thread(target=wait)
    waits.start()
    other.close() if end == "close" else mine.abort()
    waits.join(20)
    mine.close()
    other.close()

    assert failures == ["the connection to rank 7 of the group, on this host, was closed"]


def test_a_forked_child_does_not_keep_the_sockets_of_its_parent() -> None:
    mine, other = pair()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)  # lives until the parent has looked
        os._exit(0)
    mine.close()
    try:
        with pytest.raises(RuntimeError, match="rank 3 of the group"):
            other.sum([torch.ones(10)])
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        other.close()
