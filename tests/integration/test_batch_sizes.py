"""Workers of unequal speed that wait for each other are told which batch sizes take them equally long."""

from __future__ import annotations

import ast
import re


def test_workers_that_are_three_and_two_times_as_fast_take_as_many_times_the_examples(job):
    launcher = job.launch(3, 2, "batch_sizes.py", "dist")
    job.succeed()
    found = {
        int(one[1]): (ast.literal_eval(one[2]), int(one[3]), int(one[4]))
        for line in launcher.lines_with(" sizes ")
        if (one := re.search(r"rank (\d) sizes (\[.*\]) version (\d+) seen (\d+)$", line))
    }
    assert sorted(found) == [0, 1, 2], job.transcript()
    sizes = [found[rank][0] for rank in range(3)]
    assert [own[:5] for own in sizes] == [[12] * 4 + [18], [12] * 4 + [6], [12] * 5]
    assert sum(map(sum, sizes)) == 400 and {seen for _, _, seen in found.values()} == {400}
    whole = min(map(len, sizes)) - 2  # the last steps are of what is left
    assert whole > 6
    assert all(one[4:whole] == [size] * (whole - 4) for one, size in zip(sizes, (18, 6, 12), strict=True))


def test_where_nobody_waits_no_batch_size_is_advised(job):
    launcher = job.launch(2, 1, "batch_sizes.py", "dist_async")
    job.succeed()
    refused = launcher.lines_with("refused: advise_batch_size is for workers that wait for each other")
    assert len(refused) == 2, job.transcript()
