"""How a list of keys travels."""

from __future__ import annotations

import itertools

from kvdist.core.sharding import cut
from kvdist.core.worker.requests import ALONE_BYTES_MIN, SLICES_PER_RUN_MAX, KeyInfo, RunKind, make_plan
from kvdist.dtypes import DType
from kvdist.protocol.messages import Placement


def info(
    key: str, size: int, home: int = 0, first: int = 0, dtype: DType = DType.FLOAT32, slice_bytes: int = 1 << 22
) -> KeyInfo:
    return KeyInfo(key, (size,), dtype, tuple(cut(size, dtype.itemsize, home, 2, first, slice_bytes)))


def test_small_slices_of_one_server_share_a_run_and_lie_at_multiples_of_eight_bytes() -> None:
    (run,) = make_plan(
        [info("a", 3, first=0), info("b", 1, first=1, dtype=DType.INT8), info("c", 2, first=2)], 1024
    ).runs
    assert run.ids.tolist() == [0, 1, 2]
    assert [piece.offset for piece in run.pieces] == [0, 16, 24]
    assert (run.nbytes, run.counts.tolist(), run.positions) == (32, [3, 1, 2], {0: 0, 1: 1, 2: 2})


def test_each_server_has_runs_of_its_own() -> None:
    plan = make_plan([info("a", 3, home=0), info("b", 3, home=1, first=1), info("c", 3, home=0, first=2)], 1024)
    assert [(run.server, run.ids.tolist()) for run in plan.runs] == [(0, [0, 2]), (1, [1])]
    assert plan.runs[0].key_of.tolist() == [0, 2]


def test_a_run_has_a_size_limit() -> None:
    keys = [info(f"k{i}", 4, first=i) for i in range(5)]
    assert [run.ids.tolist() for run in make_plan(keys, 32).runs] == [[0, 1], [2, 3], [4]]


def test_a_run_has_a_limit_of_slices() -> None:
    keys = [info(f"k{i}", 1, first=i) for i in range(SLICES_PER_RUN_MAX + 1)]
    assert [len(run.ids) for run in make_plan(keys, 1 << 22).runs] == [SLICES_PER_RUN_MAX, 1]


def test_a_large_slice_is_a_run_of_its_own() -> None:
    keys = [info("a", 2, first=0), info("b", ALONE_BYTES_MIN // 4, first=1), info("c", 2, first=2)]
    assert sorted(run.ids.tolist() for run in make_plan(keys, 1 << 22).runs) == [[0, 2], [1]]


def test_the_pieces_of_a_cut_key_cover_it_once() -> None:
    plan = make_plan([info("a", 45, home=Placement.CUT, slice_bytes=64)], 128)
    pieces = sorted((piece.start, piece.stop) for run in plan.runs for piece in run.pieces)
    assert pieces[0][0] == 0 and pieces[-1][1] == 45
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert {run.server for run in plan.runs} == {0, 1}


def test_a_key_without_elements_has_a_run_without_bytes() -> None:
    (run,) = make_plan([info("none", 0)], 128).runs
    assert (run.ids.tolist(), run.counts.tolist(), run.nbytes) == ([0], [0], 0)


def test_kinds_say_what_travels_which_way() -> None:
    assert [kind for kind in RunKind if kind.pushes] == [RunKind.PUSH, RunKind.PUSHPULL]
    assert [kind for kind in RunKind if kind.pulls] == [
        RunKind.PULL,
        RunKind.PUSHPULL,
        RunKind.PULL_STATE,
    ]
