"""kvdist doctor between machines of their own, over real ssh daemons."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.machines.machines import GONE_S, PYTHONPATH, ip

pytestmark = pytest.mark.machines

TIMEOUT_S = 120


def ask(machines, *words, names_of_d1="d1"):
    machines.write_ssh_config()
    config = machines.home / ".ssh" / "config"
    config.write_text(config.read_text().replace("Host d1\n", f"Host {names_of_d1}\n"))
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    argv = machines.command([sys.executable, "-m", "kvdist", *words])
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert machines.left_after(GONE_S) == [], "an agent is left"
    return done


def cells(done, title):
    """Row → column → cell of the table that begins with a title; names have no blanks but the launcher's."""
    text = done.stdout.replace("this machine", "here")
    lines = text[text.index(title) + len(title) :].splitlines()
    columns = lines[0].split()
    rows = [line.split() for line in lines[2 : 2 + len(columns)]]
    return {row[0]: row[1:] for row in rows}


def test_every_way_between_machines_is_measured(machines):
    done = ask(machines, "doctor", "-H", "d1,d2")
    assert done.returncode == 0, done.stdout + done.stderr
    for title in ("ms, there and back", "MB/s"):
        found = cells(done, title)
        assert list(found) == ["here", "d1", "d2"]
        assert all(len(row) == 2 and all(float(cell) >= 0 for cell in row) for row in found.values()), done.stdout
    assert done.stdout.endswith("start a job:\n  kvdist-launch -H d1,d2 -n 2 python train.py\n")


def test_two_names_of_one_machine_are_recognised_and_it_is_measured_once(machines):
    done = ask(machines, "doctor", "-H", "d1,d2,again", names_of_d1="d1 again")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nagain: the same machine as d1: name it once" in done.stdout and "kvdist-launch" not in done.stdout
    assert list(cells(done, "MB/s")) == ["here", "d1", "d2"]


def test_a_slow_line_is_seen_in_its_direction(machines):
    namespace = machines.machines["d2"].namespace
    shape = ("root", "tbf", "rate", "80mbit", "burst", "32kbit", "latency", "400ms")
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", "eth0", *shape], check=True)
    try:
        found = cells(ask(machines, "doctor", "-H", "d1,d2"), "MB/s")
    finally:
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", "eth0", "root"], check=True)
    assert float(found["d2"][1]) < 15 < float(found["d1"][1]), found


def test_what_each_mode_would_make_of_the_hosts_follows_from_their_lines(machines):
    words = ("doctor", "-H", "d1,d2", "--parameters", "30e6", "--step", "0.5", "--speeds", "1,0.5")
    namespace = machines.machines["d2"].namespace
    shape = ("root", "tbf", "rate", "80mbit", "burst", "32kbit", "latency", "400ms")
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", "eth0", *shape], check=True)
    try:
        done = ask(machines, *words)
    finally:
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", "eth0", "root"], check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # 120 MB over 10 MB/s take 12 s, 24 batches of half a second: nothing that exchanges in each step can keep up
    assert "take quota(" in done.stdout and "local_steps=True): 1.50 times the rate of d1 alone" in done.stdout
    assert "dist" in done.stdout and "the network" in done.stdout


def test_the_speed_of_each_host_is_measured(machines):
    done = ask(machines, "doctor", "-H", "d1,d2", "--parameters", "1e4", "--step", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DDP on all" in done.stdout and "the rate of d" in done.stdout


def test_a_way_that_is_closed_is_shown_and_named_and_so_is_a_host_that_cannot_be_reached(machines):
    first, second = machines.machines["d1"], machines.machines["d2"]
    ip("-n", first.namespace, "route", "add", "unreachable", second.address)
    try:
        done = ask(machines, "doctor", "-H", "d1,d2,nowhere")
    finally:
        ip("-n", first.namespace, "route", "del", "unreachable", second.address)
    assert done.returncode == 1, done.stdout + done.stderr
    found = cells(done, "MB/s")
    assert found["d1"][1] == "no" and found["here"][0] != "no"
    assert "d1 → d2: " in done.stdout
    assert any(line.startswith("nowhere: ") for line in done.stdout.splitlines())
    assert "nowhere" not in found
