"""Jobs whose hosts are joined by a network of some speed: slow, cut for a while, or cut for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.programs import ROUNDS, is_going_on

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

ONE_KEY = """
    import sys
    import numpy as np
    from kvdist import kv

    count = int(sys.argv[1])
    store = kv.create("dist")
    weight = np.arange(count, dtype=np.float32)
    store.init("w", weight)
    store.push("w", weight)
    value = store.pull("w")
    store.close()
    assert np.array_equal(value, store.num_workers * weight)
    print("right")
"""
"""One key, once in each direction and once more to begin with."""

UPDATED = ONE_KEY.replace(
    'store.init("w"', 'store.set_optimizer("sgd", learning_rate=0.5)\n    store.init("w"'
).replace("store.num_workers * weight", "(1 - 0.5 * store.num_workers) * weight")
"""The same where the server updates, and a lost worker would not end the job at once."""

ROWS = """
    import sys
    import numpy as np
    from kvdist import RowSparse, kv

    count = int(sys.argv[1])
    store = kv.create("dist")
    rows = np.arange(count)
    values = np.arange(count * 16, dtype=np.float32).reshape(count, 16)
    store.init("t", RowSparse(rows, 0 * values, (count, 16)))
    store.push("t", RowSparse(rows, values, (count, 16)))
    found = store.row_sparse_pull("t", row_ids=rows)
    store.close()
    assert np.array_equal(found.values, store.num_workers * values)
    print("right")
"""

MIB = 1 << 20
SHORT = {"KVDIST_PATIENCE_S": "2"}


def test_a_job_trains_over_a_link(job, script, cluster_over_link):
    cluster_over_link(2, 1, script(SUM))
    job.succeed()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].lines_with("sum 2000.0")


@pytest.mark.slow
def test_a_key_of_four_megabytes_crosses_a_link_of_8_mbit(job, script, hosts, cluster_over_link):
    limit(hosts, 8)
    # The patience of earlier versions: each of the three ways of the key takes longer.
    cluster_over_link(1, 1, script(ONE_KEY), "1000000", KVDIST_PATIENCE_S="3")
    succeed(job, 1)


@pytest.mark.parametrize(
    "program,count,on_loss",
    [(ONE_KEY, 100_000, "fail"), (UPDATED, 100_000, "continue"), (ROWS, 6_000, "fail")],
    ids=["dense", "dense, going on", "rows"],
)
def test_what_takes_longer_than_the_patience_crosses_a_link_of_1_mbit(
    job, script, hosts, cluster_over_link, program, count, on_loss
):
    limit(hosts, 1)
    cluster_over_link(1, 1, script(program), str(count), **SHORT, KVDIST_ON_LOSS=on_loss)
    succeed(job, 1)
    sent, received = hosts[0].traffic()
    assert min(sent, received) > 2 * 1e6 / 8, "each direction was busy for longer than the patience"


def test_what_takes_longer_than_the_patience_crosses_a_slow_link_encrypted(
    job, script, hosts, cluster_over_link, tmp_path
):
    limit(hosts, 1)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(64)))
    secret.chmod(0o600)
    cluster_over_link(1, 1, script(ONE_KEY), "100000", KVDIST_SECURITY="curve", KVDIST_SECRET_FILE=str(secret), **SHORT)
    succeed(job, 1)


@pytest.mark.slow
def test_pushes_ahead_of_a_slow_link_wait_for_room_and_memory_stays_bounded(
    job, script, hosts, cluster_over_link, tmp_path
):
    cluster_over_link(1, 1, script(AHEAD), str(tmp_path), KVDIST_UNDER_WAY_BYTES=str(8 * MIB))
    job.line("worker-0", "ready")
    before = {name: memory_of(job.pid_of(name)) for name in ("worker-0", "server-0")}
    limit(hosts, 1)
    (tmp_path / "begin").touch()
    pushed = int(job.line("worker-0", "pushed ").split()[1])
    assert 2 <= pushed <= 16, "8 MiB have room for eight pushes of 1 MiB; the next one waits"
    limit(hosts, 1000)
    job.line("worker-0", "all arrived")
    for name, then in before.items():
        grown = memory_of(job.pid_of(name)) - then
        assert grown < 64 * MIB, f"{name} has grown by {grown} bytes, where 256 MiB were pushed"
    (tmp_path / "end").touch()
    job.succeed()


def memory_of(pid):
    """The most bytes that a process ever had in memory."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


AHEAD = """
    import sys, threading, time
    from pathlib import Path
    import numpy as np
    from kvdist import kv

    def wait_for(name):
        while not (Path(sys.argv[1]) / name).exists():
            time.sleep(0.01)

    def push():
        global pushed
        for pushed in range(1, 257):
            store.push("w", ones)

    store, pushed = kv.create("dist"), 0
    ones = np.ones(1 << 18, np.float32)
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", 0 * ones)
    for _ in range(128):
        store.push("w", ones)  # what servers load for their updates is loaded then
    store.pull("w")
    print("ready", flush=True)
    wait_for("begin")
    thread, before = threading.Thread(target=push), -1
    thread.start()
    while before != pushed or pushed < 2:
        before = pushed
        time.sleep(1)
    print("pushed", pushed, flush=True)
    thread.join()
    assert (store.pull("w") == -384).all()
    print("all arrived", flush=True)
    wait_for("end")
    store.close()
"""


@pytest.mark.slow
def test_many_workers_share_a_slow_link(job, script, hosts, cluster_over_link):
    limit(hosts, 4)
    cluster_over_link(4, 2, script(ONE_KEY), "200000", KVDIST_PATIENCE_S="5")
    succeed(job, 4)


@pytest.mark.slow
def test_nine_workers_push_keys_of_four_megabytes_over_one_link(job, script, hosts, cluster_over_link):
    limit(hosts, 100)
    cluster_over_link(9, 1, script(ONE_KEY), "1000000", KVDIST_PATIENCE_S="10", KVDIST_LOCAL_REDUCE="off")
    succeed(job, 9)
    sent, received = hosts[0].traffic()
    assert min(sent, received) > 9 * 4e6, "every worker pushed and pulled the key by itself"


@pytest.mark.slow
def test_an_optimizers_state_that_takes_longer_than_the_patience_is_fetched_and_brought_back(
    job, script, hosts, cluster_over_link, tmp_path
):
    limit(hosts, 20)
    folder = str(tmp_path / "saved")
    cluster_over_link(1, 2, script(CHECKPOINT), folder, KVDIST_CHECKPOINT_ROOT=str(tmp_path), **SHORT)
    succeed(job, 1)
    sent, _ = hosts[0].traffic()
    assert sent > 2 * 20e6 / 8, "it took longer than the patience"


CHECKPOINT = """
    import sys
    import numpy as np
    from kvdist import kv, optimizer

    store = kv.create("dist")
    keys = ["a", "b", "c"]
    weights = [np.full(500_000, i, np.float32) for i in range(3)]
    store.init(keys, weights)
    store.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
    store.push(keys, weights)
    store.save_checkpoint(sys.argv[1], 1).result()
    saved = store.pull(keys)
    states = store.optimizer_states(keys)
    assert all((abs(state.arrays[0]) > 0).all() for state in states[1:])
    store.push(keys, weights)
    assert store.load_checkpoint(sys.argv[1]).step == 1
    assert all((now == then).all() for now, then in zip(store.pull(keys), saved))
    store.close()
    print("right")
"""


@pytest.mark.slow
def test_many_keys_are_agreed_on_over_a_slow_link(job, script, hosts, cluster_over_link):
    limit(hosts, 1)
    cluster_over_link(1, 1, script(MANY_KEYS), **SHORT)
    succeed(job, 1)


MANY_KEYS = """
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    keys = [f"a-parameter-with-a-name-of-some-length-{i}" for i in range(8000)]
    store.init(keys, [np.full(1, i, np.float32) for i in range(8000)])
    assert [float(value[0]) for value in store.pull(keys)] == list(range(8000))
    store.close()
    print("right")
"""


@pytest.mark.slow
def test_a_cable_may_be_out_for_five_seconds(job, script, hosts, cluster_over_link, tmp_path):
    cluster_over_link(2, 1, script(ROUNDS), str(tmp_path), KVDIST_PATIENCE_S="10")
    is_going_on(job)
    hosts[0].set_link(up=False)
    with pytest.raises(AssertionError, match="not within"):
        job.wait(lambda: any(process.code is not None for process in job.processes.values()), "an end", 5.0)
    hosts[0].set_link(up=True)
    is_going_on(job)
    (tmp_path / "end").touch()
    succeed(job, 2)


def test_a_cable_that_stays_out_ends_the_job_with_who_was_lost(job, script, hosts, cluster_over_link, tmp_path):
    cluster_over_link(2, 1, script(ROUNDS), str(tmp_path), **SHORT)
    is_going_on(job)
    hosts[0].set_link(up=False)
    codes = job.finish()
    assert all(codes.values()), job.transcript()
    for name in ("worker-0", "worker-1"):
        text = job.processes[name].text
        assert "PeerLostError: " in text and "was lost" in text, job.transcript()
        assert "scheduler (" in text or "server-0 (" in text, job.transcript()
    for name in ("scheduler", "server-0"):
        assert "worker-" in job.processes[name].text and "was lost" in job.processes[name].text, job.transcript()


@pytest.mark.slow
@pytest.mark.parametrize("sender", ["the worker", "the server"])
def test_a_network_that_loses_large_packets_ends_the_job_with_what_to_look_at(
    job, script, hosts, cluster_over_link, tmp_path, sender
):
    near, far = hosts
    cluster_over_link(1, 1, script(GROWING), str(tmp_path / "grow"), **SHORT)
    job.line("worker-0", "small ones pass")
    (far if sender == "the worker" else near).lose_large_packets()
    (tmp_path / "grow").touch()
    codes = job.finish()
    assert all(codes.values()), job.transcript()
    assert "a large one passed" not in job.processes["worker-0"].text
    for name in ("scheduler", "server-0", "worker-0"):
        assert "cannot reach" in job.processes[name].text, job.transcript()
        assert "look whether the network loses large packets" in job.processes[name].text, job.transcript()


GROWING = """
    import os, sys
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("small", np.zeros(10, np.float32))
    store.init("large", np.zeros(100_000, np.float32))
    store.pushpull("small", np.ones(10, np.float32))
    print("small ones pass", flush=True)
    while not os.path.exists(sys.argv[1]):
        store.pushpull("small", np.ones(10, np.float32))
    store.pushpull("large", np.ones(100_000, np.float32))
    print("a large one passed")
"""


def limit(hosts, mbit):
    for host in hosts:
        host.limit(mbit)


def succeed(job, workers):
    job.succeed()
    for rank in range(workers):
        assert job.processes[f"worker-{rank}"].lines_with("right"), job.transcript()
