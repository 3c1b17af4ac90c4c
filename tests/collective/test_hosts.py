"""Ranks on hosts of their own, which are network namespaces, and in a container that has little room."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import link
from tests.ports import free_port

SUMS = Path(__file__).with_name("programs") / "sums.py"
COUNTS = ("5", "10000", "1500000")
BYTES = 4 * sum(map(int, COUNTS))


def ranks_of(size, master):
    """The variables of each rank, which are torchrun's."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": master, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [{**shared, "KVDIST_SECURITY": "none", "RANK": str(rank)} for rank in range(size)]


def said(job):
    """What the ranks say of their places, and of whether they share memory; all have the same bits."""
    text = "".join(process.text for process in job.processes.values())
    found = sorted(re.findall(r"rank (\d of .*; shares \w+), digest (\w+)", text))
    assert len(found) == len(job.processes) and len({digest for _, digest in found}) == 1, job.transcript()
    return [place for place, _ in found]


def test_of_three_ranks_on_two_hosts_each_sum_crosses_the_network_once_and_equal_names_are_told_apart(job):
    with link() as hosts:
        before = hosts[0].traffic()
        for variables in ranks_of(3, hosts[0].address):
            host = hosts[int(variables["RANK"]) // 2]
            job.start(f"rank {variables['RANK']}", host.inside(sys.executable, str(SUMS), *COUNTS), **variables)
        job.succeed()
        sent, received = (after - then for after, then in zip(hosts[0].traffic(), before, strict=True))
    assert said(job) == [
        "0 of 3: 0 of 2 here, 0 of 2 across; shares True",
        "1 of 3: 1 of 2 here, 0 of 1 across; shares True",
        "2 of 3: 0 of 1 here, 1 of 2 across; shares True",
    ]
    assert all(BYTES < count < 1.3 * BYTES for count in (sent, received)), (sent, received, BYTES)


def test_a_small_dev_shm_as_containers_have_it_does_not_matter(job):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("NO FOLDER CAN BE MOUNTED HERE: that needs root")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    for variables in ranks_of(2, "127.0.0.1"):
        inside = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, str(SUMS), *COUNTS]
        job.start(f"rank {variables['RANK']}", inside, **variables)
    job.succeed()
    assert all(place.endswith("shares True") for place in said(job)), job.transcript()


PLACES = """
import socket
import torch
import kvdist.horovod as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3), op=hvd.Sum)[0].item()
print(f"{socket.gethostname()}: rank {hvd.rank()}, {hvd.local_rank()} of {hvd.local_size()} here,"
      f" {hvd.cross_rank()} of {hvd.cross_size()} across: {total}", flush=True)
hvd.shutdown()
"""


def test_beside_servers_machines_with_equal_names_are_told_apart_too(job):
    with link() as hosts:
        address = hosts[0].address
        shared = {"DMLC_PS_ROOT_URI": address, "KVDIST_SECURITY": "none"}
        for role in ("scheduler", "server"):
            variables = {**job.environment(role, 3, 1), **shared, "DMLC_NODE_HOST": address}
            job.start(role, hosts[0].inside(sys.executable, "-m", "kvdist"), **variables)
        for rank in range(3):
            host = hosts[rank // 2]
            variables = {**job.environment("worker", 3, 1), **shared, "KVDIST_RANK": str(rank)}
            variables["DMLC_NODE_HOST"] = host.address
            job.start(f"rank {rank}", host.inside(sys.executable, "-c", PLACES), **variables)
        job.succeed()
    text = "".join(process.text for process in job.processes.values())
    places = sorted(re.findall(rf"{socket.gethostname()}: (rank .*)", text))
    assert places == [
        "rank 0, 0 of 2 here, 0 of 2 across: 3.0",
        "rank 1, 1 of 2 here, 0 of 1 across: 3.0",
        "rank 2, 0 of 1 here, 1 of 2 across: 3.0",
    ]
