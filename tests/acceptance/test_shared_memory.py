"""Values between processes of one host where a process may open no more files or have no more memory."""

from __future__ import annotations

import os
import resource
import sys
from itertools import count

import pytest

LARGE_KEYS = """
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    keys = range(8)
    for key in keys:
        store.init(key, np.zeros(2_000_000, np.float32))
    for _ in range(2):
        for key in keys:
            store.push(key, np.full(2_000_000, key, np.float32))
        results = [store.pull(key) for key in keys]
    print("right", all((result == store.num_workers * key).all() for key, result in zip(keys, results)), flush=True)
    store.close()
"""


def test_a_server_that_may_open_few_files_serves_many_large_values(job, script):
    """It needs one for each connection and one for the memory of each worker, however large that is."""
    workers = 4
    path = script(LARGE_KEYS)
    for name in ("scheduler", *(f"worker-{rank}" for rank in range(workers))):
        job.node(name, workers, 1, path)
    limited = ["prlimit", "--nofile=40:40", sys.executable, "-m", "kvdist"]
    job.start("server-0", limited, **job.environment("server", workers, 1), KVDIST_RANK="0")
    job.succeed()
    for rank in range(workers):
        assert job.processes[f"worker-{rank}"].lines_with("right True"), job.transcript()
    assert not job.processes["server-0"].lines_with("through the socket"), job.transcript()


SMALL_THEN_LARGE = """
    import os
    import resource
    import sys
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("small", np.zeros(10, np.float32))
    store.init("large", np.zeros(2_000_000, np.float32))
    for _ in range(2):
        store.pull("small")
    go_on = os.open(f"{sys.argv[1]}-{store.rank}", os.O_RDWR)  # before the limit: opening takes a descriptor
    print("ready", flush=True)
    os.read(go_on, 1)  # until the test has set a limit for this process or the server
    out = np.zeros(2_000_000, np.float32)
    for value in (1, 2, 3):
        store.push("large", np.full(2_000_000, value, np.float32))
        store.pull("large", out=out)
        assert (out == 2 * value).all()
    print("right", flush=True)
    store.close()
"""


def let_open_no_more_files(pid):
    used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
    first_free = next(number for number in count() if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, first_free))


@pytest.mark.parametrize("name", ["server-0", "worker-0"])
def test_a_process_that_may_open_no_more_files_says_so_and_goes_on_through_the_socket(job, script, name, tmp_path):
    pipes = [tmp_path / f"go_on-{rank}" for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    job.cluster(2, 1, script(SMALL_THEN_LARGE), str(tmp_path / "go_on"))
    for rank in range(2):
        job.line(f"worker-{rank}", "ready")
    let_open_no_more_files(job.pid_of(name))
    for pipe in pipes:
        pipe.write_bytes(b"1")
    job.succeed()
    said = job.line(name, "through the socket")
    assert "this process has open all of the" in said and "ulimit -n" in said, job.transcript()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].lines_with("right"), job.transcript()


PULLS_WITH_LITTLE_MEMORY = """
    import os
    import resource
    import numpy as np
    from kvdist import kv

    COUNT = 8_000_000
    store = kv.create("dist")
    store.init("small", np.zeros(10, np.float32))
    store.init("large", np.zeros(COUNT, np.float32))
    for _ in range(2):
        store.push("large", np.ones(COUNT, np.float32))
        store.pull("small")
    out = np.zeros(COUNT, np.float32)
    store.barrier()
    if store.rank == 1:  # has mapped nothing of the server's yet, and has room for the values but not for that
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = mapped + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    store.pull("large", out=out)
    print("right", (out == 2).all(), flush=True)
    store.close()
"""


def test_a_worker_that_may_map_no_more_memory_says_so_and_goes_on_through_the_socket(job, script):
    job.cluster(2, 1, script(PULLS_WITH_LITTLE_MEMORY))
    job.succeed()
    (said,) = job.processes["worker-1"].lines_with("through the socket")
    assert "this process may map no more memory" in said and "ulimit -v" in said, job.transcript()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].lines_with("right True"), job.transcript()


PRINTS_ITS_LIMIT = """
    import resource
    from kvdist import kv

    store = kv.create("dist")
    print("may open", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    store.close()
"""


def test_processes_raise_their_soft_limit_of_open_files(job, script):
    path = script(PRINTS_ITS_LIMIT)
    for name in ("scheduler", "server-0"):
        job.node(name, 1, 1, path)
    job.start("worker-0", ["prlimit", "--nofile=64:4000", sys.executable, path], **job.environment("worker", 1, 1))
    job.succeed()
    assert job.processes["worker-0"].lines_with("may open 4000"), job.transcript()


def launch_with_limit(job, limit, workers, path):
    words = ["-m", "kvdist_launch", "-n", str(workers), "-s", "1", "--", sys.executable, path]
    job.start("launcher", ["prlimit", f"--nofile={limit}", sys.executable, *words])
    job.succeed()


def test_the_launcher_raises_the_soft_limit_for_whatever_it_starts(job, script):
    launch_with_limit(job, "64:4000", 1, script("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"))
    assert job.processes["launcher"].lines_with("(4000, 4000)"), job.transcript()


def test_the_launcher_says_what_a_job_needs_where_the_hard_limit_is_too_low(job, script):
    launch_with_limit(job, "70:70", 2, script(PRINTS_ITS_LIMIT))
    said = job.processes["launcher"].text.splitlines()[0]
    assert "may have 70 files open" in said and "2 workers and 1 servers it may need 75" in said, job.transcript()
    assert "ulimit -Hn" in said, job.transcript()
