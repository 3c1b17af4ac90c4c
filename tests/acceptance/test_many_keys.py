"""Stores of very many keys."""

from __future__ import annotations

import pytest

MANY = """
    import sys
    import numpy as np
    from kvdist import kv

    count = int(sys.argv[1])
    for names in (
        [f"{'block.' * 150}{number}.weight" for number in range(count)],
        [number * 10**12 - 3 for number in range(count)],
    ):
        store = kv.create("dist")
        shapes = [(number % 5, 2) if number % 7 else () for number in range(count)]
        first = [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)]
        store.init(names, first if store.rank == 0 else [np.full_like(one, -1) for one in first])
        got = [np.empty(shape, np.float32) for shape in shapes]
        store.pull(names, out=got)
        assert all((one == number).all() for number, one in enumerate(got)), "rank 0's first values are everybody's"
        for factor in (1, 2):
            store.push(names, [one * factor for one in first])
            store.pull(names, out=got)
            # numbers that float32 has exactly
            assert all((one == 2 * factor * number).all() for number, one in enumerate(got)), factor
        store.init(names[:3], first[:3])  # is known: nothing happens
        print("values are right", len(names))
"""


@pytest.mark.slow_cases("20000")
@pytest.mark.parametrize("count", ["2000", "20000"])  # the names of the larger number need more than one message
def test_one_init_may_have_any_number_of_keys(job, script, count):
    launcher = job.launch(2, 2, script(MANY), count)
    job.succeed()
    assert len(launcher.lines_with(f"values are right {count}")) == 4, job.transcript()
