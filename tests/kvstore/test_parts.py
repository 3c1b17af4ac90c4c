"""Long lists in parts: where they are cut."""

from __future__ import annotations

from kvdist.core.sharding import cut
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.kvstore.push_pull import parts_of
from tests.cases import each


def keys(*sizes):
    return [KeyInfo(i, (size,), DType.FLOAT32, tuple(cut(size, 4, 0, 1, i, 1 << 30))) for i, size in enumerate(sizes)]


@each(
    "sizes, parts",
    [
        ((), [(0, 0)]),
        ((1,), [(0, 1)]),
        ((1, 2, 3), [(0, 3)]),
        ((4, 1), [(0, 1), (1, 2)]),
        ((1, 3, 1, 3), [(0, 2), (2, 4)]),
        ((100, 0, 100), [(0, 1), (1, 3)]),
        ((1, 1, 1, 1, 1), [(0, 4), (4, 5)]),
    ],
)
def test_a_list_is_cut_where_a_part_has_enough_bytes(sizes, parts):
    assert [(part.start, part.stop) for part in parts_of(keys(*sizes), 16)] == parts
