"""Jobs whose hosts are joined by a network of some speed."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.machines

SUM = """
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(1000, np.float32))
    store.push("w", np.ones(1000, np.float32))
    print("sum", store.pull("w").sum())
    store.close()
"""


def test_a_job_trains_over_a_link(job, script, cluster_over_link):
    cluster_over_link(2, 1, script(SUM))
    job.succeed()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].lines_with("sum 2000.0")
