"""Ranks on hosts of their own, which are network namespaces, and in a container that has little room."""

from __future__ import annotations

import re
import shutil
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
    """What the ranks say of whether they share memory; all have the same bits."""
    text = "".join(process.text for process in job.processes.values())
    found = re.findall(r"rank \d of \d: shares (\w+), digest (\w+)", text)
    assert len(found) == len(job.processes) and len({digest for _, digest in found}) == 1, job.transcript()
    return {shares for shares, _ in found}


def test_of_four_ranks_on_two_hosts_each_sum_crosses_the_network_once(job):
    with link() as hosts:
        before = hosts[0].traffic()
        for variables in ranks_of(4, hosts[0].address):
            host = hosts[int(variables["RANK"]) // 2]
            job.start(f"rank {variables['RANK']}", host.inside(sys.executable, str(SUMS), *COUNTS), **variables)
        job.succeed()
        sent, received = (after - then for after, then in zip(hosts[0].traffic(), before, strict=True))
    assert said(job) == {"True"}, "the two ranks of each host"
    assert all(BYTES < count < 1.3 * BYTES for count in (sent, received)), (sent, received, BYTES)


def test_a_small_dev_shm_as_containers_have_it_does_not_matter(job):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("NO FOLDER CAN BE MOUNTED HERE: that needs root")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    for variables in ranks_of(2, "127.0.0.1"):
        inside = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, str(SUMS), *COUNTS]
        job.start(f"rank {variables['RANK']}", inside, **variables)
    job.succeed()
    assert said(job) == {"True"}
