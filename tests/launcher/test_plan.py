"""Plans: which process runs where, with which argv and environment, compared with the files in ``golden``; previews.

Where a plan is meant to change, ``WRITE_GOLDEN=1`` in the environment writes the files anew; read the difference.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.config.environment import cluster_from_env, world_from_env
from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, Role, worker
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host, parse_hostfile
from kvdist_launch.plan import (
    LAUNCHER,
    PYTHON,
    HostFacts,
    JobSpec,
    Process,
    ProcessPlace,
    moved,
    place,
    plan,
    preview,
    quoted,
    share_of_devices,
    thread_note,
    threads_per_worker,
    worker_lines,
    workers_of_slots,
)
from kvdist_launch.security import Security
from tests.cases import each

GOLDEN = Path(__file__).with_name("golden")
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
AWKWARD = 'it\'s a "value" with\nlines, = and : and $HOME;`id` $(touch pwned)\\ é \U0001f600'
HERE = [Host("localhost")]

THREE_HOSTS = """\
d1:2222 slots=2 gpus=0,1
me@d2 gpus=0,1,2 python=/opt/py/bin/python iface=eth1   # two workers, three devices
[fd00::17] role=server
"""
HOSTILE_HOSTFILE = "my_alias-2 python='/my \"programs\"/$(id)/python'\nh[09-10].lan role=worker\n"


def new_job(num_workers: int = 2, num_servers: int = 2, **settings: object) -> JobSpec:
    defaults: dict[str, object] = {
        "command": ("python", "train.py"),
        "role_command": (PYTHON, "-m", "kvdist"),
        "port": 23456,
        "name": "0123456789abcdef",
    }
    return JobSpec(num_workers, num_servers, **{**defaults, **settings})  # type: ignore[arg-type]


def here(environ: dict[str, str] | None = None, cores: int = 8) -> HostFacts:
    return HostFacts(cores, "/venv/bin/python", "127.0.0.1", environ or {})


def plan_here(job: JobSpec, environ: dict[str, str] | None = None) -> list[Process]:
    return plan(job, HERE, [here(environ)], here(environ))


def plan_on(text: str, job: JobSpec, environ: dict[str, str], **theirs: str) -> list[Process]:
    """The plan for the hosts of a hostfile's text, whose own variables are `theirs`."""
    hosts = parse_hostfile(text, "hosts")
    facts = [HostFacts(8, host.python or "/venv/bin/python", f"10.0.0.{i}", theirs) for i, host in enumerate(hosts)]
    return plan(job, hosts, facts, HostFacts(4, "/venv/bin/python", "10.0.0.99", environ))


def by_name(processes: list[Process]) -> dict[str, Process]:
    return {str(process.node): process for process in processes}


PLANS = {
    "two_workers_two_servers": lambda: plan_here(new_job(), {"PATH": "/usr/bin", "HOME": "/home/someone"}),
    "awkward_names_and_values": lambda: plan_here(
        new_job(
            1,
            1,
            command=('/my programs/träin\'s "best".sh', "--text", AWKWARD, "", "-n", "5"),
            env={"TEXT": AWKWARD, "EMPTY": ""},
            env_server={"ONLY": "server=1:2"},
            env_worker={"ONLY": "worker\n2"},
        ),
        {"PATH": "/a dir:/b=c", "QUOTED": "'\"'"},
    ),
    "settings_of_the_user_are_kept": lambda: plan_here(
        new_job(
            2,
            1,
            env={"KVDIST_PLACEMENT": "hash", "PYTHONUNBUFFERED": "0"},
            env_server={"KVDIST_BIGARRAY_BOUND": "77"},
            env_worker={"OMP_NUM_THREADS": "3"},
        ),
        {"KVDIST_PLACEMENT": "hash", "KVDIST_SLICE_BYTES": "1024", "OMP_NUM_THREADS": "5"},
    ),
    "three_hosts": lambda: plan_on(
        THREE_HOSTS,
        new_job(4, 2, cwd="/data/my job", env={"X": "1"}, env_worker={"Y": "2"}),
        {"PYTHONPATH": "/lib", "NCCL_DEBUG": "INFO", "HOME": "/home/me", "MXNET_TOKEN": "geheim", "RANK": "3"},
    ),
    "no_servers_on_three_hosts": lambda: plan_on(
        "d1 slots=2\nd2 slots=2\n[fd00::17] slots=1\n",
        new_job(5, 0, is_filled=True, cwd="/data/job", security=Security("none")),
        {"GLOO_SOCKET_IFNAME": "eth1", "KVDIST_LOCAL_SIZE": "9"},
    ),
    "awkward_hosts": lambda: plan_on(
        HOSTILE_HOSTFILE,
        new_job(
            3,
            1,
            command=("python", "/a dir/it's $(touch pwned).py", "-x"),
            cwd="/tmp/é 'quoted' $(touch pwned)\n",
            scheduler_host=0,
            env={"TEXT": AWKWARD},
        ),
        {"PYTHONPATH": "/li b:/$(id)", "LD_LIBRARY_PATH": "/cu'da", "LC_ALL": "C", "KVDIST_NODE_HOST": "10.0.0.99"},
    ),
}


def shown(process: Process) -> dict[str, object]:
    return {
        "node": str(process.node),
        "host": process.host,
        "argv": list(process.argv),
        "cwd": process.cwd,
        "defaults": dict(process.environment.defaults),
        "front": dict(process.environment.front),
        "settings": dict(process.environment.settings),
        "is_told_of_endings": process.is_told_of_endings,
        "is_root": process.is_root,
    }


@each("name", PLANS)
def test_a_plan_is_what_its_file_says(name):
    path, processes = GOLDEN / f"{name}.json", [shown(process) for process in PLANS[name]()]
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(json.dumps(processes, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    assert processes == json.loads(path.read_text("utf-8"))


def test_processes_that_others_wait_for_are_started_first():
    names = [str(process.node) for process in plan_here(new_job(2, 3))]
    assert names == ["scheduler", "server-0", "server-1", "server-2", "worker-0", "worker-1"]


@each("num_workers, num_servers", [(1, 1), (1, 3), (5, 2)])
def test_every_process_reads_its_own_seat_from_its_environment(num_workers, num_servers):
    for process in plan_here(new_job(num_workers, num_servers)):
        config = cluster_from_env(process.environment.over({}))
        assert config is not None
        assert (config.role, config.rank) == (process.node.role, process.node.rank)
        assert (config.num_workers, config.num_servers) == (num_workers, num_servers)
        assert (config.root_host, config.root_port, config.job) == ("127.0.0.1", 23456, "0123456789abcdef")
        assert config.supervised == process.is_told_of_endings == (process.node.role is Role.SCHEDULER)


def test_without_servers_every_process_reads_its_place_and_is_told_that_there_is_no_cluster():
    for rank, process in enumerate(plan_here(new_job(3, 0))):
        env = process.environment.over({})
        world = world_from_env(env)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 3, rank, 3)
        assert (world.cross_rank, world.cross_size, world.launcher) == (0, 1, "kvdist-launch")
        assert (world.meeting.host, world.meeting.port, world.meeting.job) == ("127.0.0.1", 23456, "0123456789abcdef")
        assert process.is_root == (rank == 0)
        with pytest.raises(ConfigError, match=r"this job has no servers .*: use kv\.create\('collective'\)"):
            cluster_from_env(env)


def test_without_servers_scripts_that_read_horovods_variables_find_them():
    numbers = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    stale = {f"HOROVOD_{number}": "7" for number in numbers}
    for rank, process in enumerate(plan_on("d1 slots=1\nd2 slots=2", new_job(3, 0, is_filled=True), stale)):
        env = process.environment.over({})
        world = world_from_env(env)
        told = [int(env[f"HOROVOD_{number}"]) for number in numbers]
        assert told == [getattr(world, number.lower()) for number in numbers] and told[:2] == [rank, 3]
    for process in plan_here(new_job(2, 1)):
        assert not stale.keys() & process.environment.settings.keys()


def test_without_servers_everybody_is_told_the_address_of_the_first_worker_host():
    for text, address in (("d1 role=server\nd2\nd3", "10.0.0.1"), ("localhost\nd2", "10.0.0.0")):
        processes = plan_on(text, new_job(2, 0), {})
        assert [process.is_root for process in processes] == [True, False]
        assert {process.environment.settings["DMLC_PS_ROOT_URI"] for process in processes} == {address}


def test_it_can_be_told_where_each_worker_runs():
    hosts = parse_hostfile("d1 slots=2\nd2 slots=2", "hosts")
    facts = [HostFacts(8, "python", host.name) for host in hosts]
    assert worker_lines(plan(new_job(3, 0, is_filled=True), hosts, facts, here()), hosts) == [
        "worker-0 on d1: local rank 0 of 2, cross rank 0 of 2",
        "worker-1 on d1: local rank 1 of 2, cross rank 0 of 1",
        "worker-2 on d2: local rank 0 of 1, cross rank 1 of 2",
    ]


def test_variables_of_an_earlier_job_do_not_leak_into_this_one():
    stale = {
        "DMLC_ROLE": "server", "KVDIST_ROLE": "server", "KVDIST_ROOT_URI": "10.0.0.9", "KVDIST_ROOT_PORT": "9",
        "KVDIST_NUM_WORKER": "9", "KVDIST_NUM_SERVER": "9", "KVDIST_RANK": "8", "KVDIST_JOB": "old",
        "KVDIST_SUPERVISED": "1", "KVDIST_LOCAL_RANK": "8", "KVDIST_LISTEN_FD": "3", "KVDIST_SECRET_FILE": "/s",
    }  # fmt: skip
    clean = [process.environment.over({}) for process in plan_here(new_job())]
    assert [process.environment.over(stale) for process in plan_here(new_job(), stale)] == clean
    assert plan_on("d1", new_job(), stale) == plan_on("d1", new_job(), {})


def test_variables_of_torchrun_are_never_set():
    environ = dict.fromkeys(TORCHRUN, "1")
    for process in plan_on("d1\nd2", new_job(), environ):
        assert TORCHRUN.isdisjoint(process.environment.over({}))


def test_only_workers_run_the_users_command_and_have_a_local_rank():
    processes = by_name(plan_here(new_job(command=("train",))))
    assert processes["worker-1"].argv == ("train",)
    assert processes["worker-1"].environment.settings["KVDIST_LOCAL_RANK"] == "1"
    for name in ("scheduler", "server-0"):
        assert processes[name].argv == ("/venv/bin/python", "-m", "kvdist")
        env = processes[name].environment.over({})
        assert "KVDIST_LOCAL_RANK" not in env
        assert "OMP_NUM_THREADS" not in env


def test_each_host_runs_its_own_interpreter_and_finds_it_as_python():
    processes = by_name(plan_on("d1 role=worker\nd2 python=/opt/py/bin/python role=server", new_job(1, 1), {}))
    assert processes["server-0"].argv == ("/opt/py/bin/python", "-m", "kvdist")
    assert processes["server-0"].environment.over({"PATH": "/usr/bin"})["PATH"] == "/opt/py/bin:/usr/bin"
    assert processes["worker-0"].environment.over({"PATH": "/usr/bin"})["PATH"] == "/venv/bin:/usr/bin"


def test_a_scheduler_sits_where_it_is_told_and_everybody_is_told_its_address():
    for scheduler_host, index, address in ((None, LAUNCHER, "10.0.0.99"), (1, 1, "10.0.0.1")):
        processes = plan_on("d1\nd2", new_job(scheduler_host=scheduler_host, cwd="/dst"), {})
        assert (processes[0].host, processes[0].cwd) == (index, None if index == LAUNCHER else "/dst")
        assert {process.environment.settings["DMLC_PS_ROOT_URI"] for process in processes} == {address}


def test_a_roles_variable_wins_over_the_common_one_and_that_over_the_environment():
    processes = by_name(plan_here(new_job(env={"X": "all"}, env_server={"X": "server"})))
    values = [processes[name].environment.over({"X": "shell"})["X"] for name in ("scheduler", "server-0", "worker-0")]
    assert values == ["all", "server", "all"]


def test_an_option_wins_over_the_environment_under_either_of_a_variables_names():
    job = new_job(env={"MXNET_KVSTORE_BIGARRAY_BOUND": "7"}, env_worker={"KVDIST_BIGARRAY_BOUND": "8"})
    environ = {"KVDIST_BIGARRAY_BOUND": "9"}
    for processes in (plan_here(job, environ), plan_on("d1", job, environ, KVDIST_BIGARRAY_BOUND="10")):
        configs = [cluster_from_env(process.environment.over(environ)) for process in processes]
        assert [config and config.bigarray_bound for config in configs] == [7, 7, 7, 8, 8]


def test_all_hosts_have_the_settings_of_the_launching_machine():
    processes = plan_on("d1\nd2", new_job(), {"KVDIST_PLACEMENT": "hash"}, KVDIST_TRANSPORT="tcp")
    configs = [cluster_from_env(process.environment.over({"KVDIST_TRANSPORT": "tcp"})) for process in processes]
    assert {(config.placement, config.transport) for config in configs if config} == {("hash", "auto")}


def test_an_impossible_setting_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="KVDIST_PLACEMENT is 'here'"):
        plan_here(new_job(env_server={"KVDIST_PLACEMENT": "here"}))


def test_the_interface_of_a_host_is_that_of_its_processes_and_replaces_the_common_one():
    processes = by_name(plan_on("d1 iface=eth1\nd2", new_job(2, 2), {"DMLC_INTERFACE": "eth0"}))
    assert processes["server-0"].environment.over({})["KVDIST_INTERFACE"] == "eth1"
    assert "DMLC_INTERFACE" not in processes["server-0"].environment.over({})
    assert processes["server-1"].environment.over({})["DMLC_INTERFACE"] == "eth0"


@each(
    "devices, workers, shares",
    [
        ("0,1", 1, ["0,1"]),
        ("0,1", 2, ["0", "1"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0,1,2", 2, ["0", "1,2"]),
        ("4,7", 3, ["4", "7", "4"]),
        ("GPU-a", 2, ["GPU-a", "GPU-a"]),
    ],
)
def test_workers_of_a_host_share_its_devices(devices, workers, shares):
    assert [",".join(share_of_devices(devices.split(","), rank, workers)) for rank in range(workers)] == shares
    for processes in (
        plan_on(f"d1 gpus={devices}", new_job(workers, 1), {"CUDA_VISIBLE_DEVICES": "9"}),
        plan_on("d1", new_job(workers, 1), {"CUDA_VISIBLE_DEVICES": devices}),
        plan_on("d1", new_job(workers, 1), {}, CUDA_VISIBLE_DEVICES=devices),
        plan_on("d1", new_job(workers, 1, env_worker={"CUDA_VISIBLE_DEVICES": devices}), {}),
        plan_here(new_job(workers, 1), {"CUDA_VISIBLE_DEVICES": devices}),
    ):
        given = [process.environment.settings["CUDA_VISIBLE_DEVICES"] for process in processes[2:]]
        assert given == shares


@each("environ", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_devices_are_never_invented(environ):
    for process in plan_here(new_job(), environ):
        assert "CUDA_VISIBLE_DEVICES" not in process.environment.settings


@each("cores, workers, threads", [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_workers_share_the_cores(cores, workers, threads):
    assert threads_per_worker(cores, workers) == threads


def test_the_threads_of_workers_are_told_for_each_host_unless_somebody_chose_them():
    hosts = parse_hostfile("d1 slots=1\nd2\nd3\nd4", "hosts")
    facts = [HostFacts(8, "python", host.name) for host in hosts[:3]] + [
        HostFacts(8, "python", "d4", {"OMP_NUM_THREADS": "2"})
    ]
    processes = plan(new_job(6, 4), hosts, facts, here())
    assert thread_note(processes, hosts, facts) == (
        "OMP_NUM_THREADS=8 for each worker (cores: 8, workers: 1) on d1;"
        " OMP_NUM_THREADS=4 for each worker (cores: 8, workers: 2) on d2, d3"
    )
    assert thread_note(plan_here(new_job()), HERE, [here()]) == (
        "OMP_NUM_THREADS=4 for each worker (cores: 8, workers: 2)"
    )
    job = new_job(env={"OMP_NUM_THREADS": "1"})
    assert thread_note(plan_here(job), HERE, [here()]) is None


def test_threads_are_left_alone_where_nobody_knows_the_cores():
    processes = plan(new_job(), HERE, [here(cores=0)], here())
    assert all("OMP_NUM_THREADS" not in process.environment.over({}) for process in processes)


# Placement: MXNet's turns, restricted by roles and slots, and ranks in the order of the hosts.

SERVER, WORKER = Role.SERVER, Role.WORKER


def seats_by_host(hosts: list[Host], num_workers: int, num_servers: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {host.name: [] for host in hosts}
    for seat in place(hosts, num_workers, num_servers)[1:]:
        found[hosts[seat.host].name].append(str(seat.node))
    return found


def test_processes_take_turns_over_the_hosts_servers_first_and_ranks_follow_the_hosts():
    assert seats_by_host([Host("a"), Host("b"), Host("c")], 5, 2) == {
        "a": ["server-0", "worker-0", "worker-1"],
        "b": ["server-1", "worker-2"],
        "c": ["worker-3", "worker-4"],
    }


def test_hosts_that_do_not_take_a_role_are_passed_over():
    hosts = [Host("a", role=SERVER), Host("b", role=WORKER), Host("c")]
    assert seats_by_host(hosts, 3, 2) == {
        "a": ["server-0"],
        "b": ["worker-0", "worker-1"],
        "c": ["server-1", "worker-2"],
    }


def test_slots_limit_workers_and_not_servers():
    assert seats_by_host([Host("a", slots=1), Host("b")], 4, 3) == {
        "a": ["server-0", "server-1", "worker-0"],
        "b": ["server-2", "worker-1", "worker-2", "worker-3"],
    }


def test_the_scheduler_comes_first_and_sits_where_it_is_told():
    hosts = [Host("a"), Host("b")]
    assert place(hosts, 1, 1)[0] == ProcessPlace(SCHEDULER, LAUNCHER, 0)
    assert place(hosts, 1, 1, scheduler_host=1)[0] == ProcessPlace(SCHEDULER, 1, 0)


def test_without_servers_there_is_no_scheduler_either():
    assert place([Host("a"), Host("b")], 2, 0) == [
        ProcessPlace(worker(0), 0, 0, 1, 0, 2),
        ProcessPlace(worker(1), 1, 0, 1, 1, 2),
    ]


@each(
    "slots, count, rows",
    [
        # Each row: host, local rank, local size, cross rank, cross size.
        ([2, 2], 4, [(0, 0, 2, 0, 2), (0, 1, 2, 0, 2), (1, 0, 2, 1, 2), (1, 1, 2, 1, 2)]),
        ([2, 2], 3, [(0, 0, 2, 0, 2), (0, 1, 2, 0, 1), (1, 0, 1, 1, 2)]),
        ([2, 2], 2, [(0, 0, 2, 0, 1), (0, 1, 2, 0, 1)]),
        ([1, 2], 3, [(0, 0, 1, 0, 2), (1, 0, 2, 1, 2), (1, 1, 2, 0, 1)]),
        (
            [2, 3, 1],
            6,
            [(0, 0, 2, 0, 3), (0, 1, 2, 0, 2), (1, 0, 3, 1, 3), (1, 1, 3, 1, 2), (1, 2, 3, 0, 1), (2, 0, 1, 2, 3)],
        ),
    ],
)
def test_hosts_that_are_filled_give_each_worker_its_place(slots, count, rows):
    seats = place([Host(f"h{i}", slots=n) for i, n in enumerate(slots)], count, 0, is_filled=True)
    assert [dataclasses.astuple(seat)[1:] for seat in seats] == rows


def test_servers_take_turns_even_where_workers_fill_hosts():
    hosts = [Host("a", slots=2), Host("b", slots=2)]
    assert [seat.host for seat in place(hosts, 2, 2, is_filled=True)] == [LAUNCHER, 0, 1, 0, 0]


def test_local_ranks_count_within_role_and_host():
    seats = place([Host("a"), Host("b")], 3, 2)
    assert [(str(seat.node), seat.host, seat.local_rank) for seat in seats[1:]] == [
        ("server-0", 0, 0), ("server-1", 1, 0), ("worker-0", 0, 0), ("worker-1", 0, 1), ("worker-2", 1, 0),
    ]  # fmt: skip


@each(
    "hosts, message",
    [
        ([Host("a", slots=2), Host("b", slots=1)], r"-n asks for 4 workers, but the hosts have 3 slots \(a: 2, b: 1\)"),
        ([Host("a", role=SERVER)], "every host has role=server, so none can run workers"),
        ([Host("a", role=WORKER)], "every host has role=worker, so none can run servers"),
        ([Host(f"h{n}", slots=n // 9) for n in range(10)], r"h5: 0 and 4 more"),
    ],
)
def test_what_does_not_fit_is_told_with_its_sums(hosts, message):
    with pytest.raises(ConfigError, match=message):
        place(hosts, 4, 1)


def test_the_slots_give_the_number_of_workers_where_nobody_says_it():
    assert workers_of_slots([Host("a", slots=2), Host("b", role=SERVER), Host("c", slots=3)]) == 5
    with pytest.raises(ConfigError, match=r"write -n WORKERS, or slots= for every host \(b, c have none\)"):
        workers_of_slots([Host("a", slots=2), Host("b"), Host("c")])
    with pytest.raises(ConfigError, match="none can run workers"):
        workers_of_slots([Host("b", role=SERVER)])


some_hosts = st.lists(
    st.tuples(st.none() | st.integers(1, 3), st.sampled_from([None, SERVER, WORKER])), min_size=1, max_size=6
).map(lambda kinds: [Host(f"h{i}", slots=slots, role=role) for i, (slots, role) in enumerate(kinds)])


@given(some_hosts, st.integers(1, 9), st.integers(1, 9))
def test_every_process_has_one_fitting_seat_and_ranks_rise_with_the_hosts(hosts, num_workers, num_servers):
    try:
        seats = place(hosts, num_workers, num_servers)
    except ConfigError:
        return
    for role, count in ((SERVER, num_servers), (WORKER, num_workers)):
        mine = [seat for seat in seats if seat.node.role is role]
        assert [seat.node.rank for seat in mine] == list(range(count))
        assert [seat.host for seat in mine] == sorted(seat.host for seat in mine)
        for index, host in enumerate(hosts):
            local = [seat.local_rank for seat in mine if seat.host == index]
            assert local == list(range(len(local)))
            assert not local or host.takes(role)
            assert role is SERVER or host.slots is None or len(local) <= host.slots


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_without_restrictions_each_host_has_what_mxnets_round_robin_gives_it(num_hosts, num_workers, num_servers):
    seats = place([Host(f"h{i}") for i in range(num_hosts)], num_workers, num_servers)
    expected = [(SERVER if i < num_servers else WORKER, i % num_hosts) for i in range(num_servers + num_workers)]
    assert sorted((seat.node.role.value, seat.host) for seat in seats[1:]) == sorted(
        (role.value, host) for role, host in expected
    )


# Previews.


def test_a_preview_names_host_folder_layers_and_words_and_hides_secrets():
    environment = Environment({"OMP": "2"}, {"PATH": "/a b"}, {"Z": "1", "MY_TOKEN": "geheim", "A": "it's"})
    processes = [
        Process(SCHEDULER, LAUNCHER, ("python", "-m", "kvdist"), Environment()),
        Process(worker(0), 0, ("python", "a b.py"), environment, "/my job"),
    ]
    assert (
        preview(processes, [Host("d1")])
        == """\
scheduler on the launching machine
  run     python -m kvdist

worker-0 on d1 in '/my job'
  default OMP=2
  front   PATH='/a b'
  set     A='it'"'"'s'
  set     MY_TOKEN='(hidden)'
  set     Z=1
  run     python 'a b.py'
"""
    )


SHELL_AWKWARD = ["", "a", "a b", "it's", "$(id)", "é", "a\nb", "\x1b[31m'", "\\\n", "tab\t", "\udcff\n", "\x01f"]


@each("text", SHELL_AWKWARD)
def test_a_quoted_word_is_itself_to_bash_and_cannot_steer_a_terminal(text):
    assert quoted(text).isprintable()
    shown = subprocess.run(["bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True).stdout
    assert shown == text.encode(errors="surrogateescape")
    assert not text.isprintable() or shlex.split(quoted(text)) == [text]


def test_a_worker_whose_host_is_lost_moves_to_the_host_with_room_that_has_the_fewest_workers():
    hosts = parse_hostfile("a slots=3\nb slots=2\nc slots=2\nd role=server\n", "hosts")
    facts = [HostFacts(8, f"/{host.name}/python", host.name) for host in hosts]
    here = HostFacts(8, "/here/python", "here")
    job = new_job(num_workers=4, num_servers=1)
    workers = {one.node: one for one in plan(job, hosts, facts, here) if one.node.role is Role.WORKER}
    assert [one.host for one in workers.values()] == [0, 1, 1, 2]

    def move(rank: int, *lost: int) -> tuple[int, str, str]:
        others = [one for node, one in workers.items() if node != worker(rank)]
        found = workers[worker(rank)] = moved(job, hosts, facts, here, others, workers[worker(rank)], lost)
        assert found.node == worker(rank) and not found.is_root
        return found.host, found.environment.settings["KVDIST_LOCAL_RANK"], found.environment.front["PATH"]

    assert move(0, 0) == (2, "1", "/c")
    assert move(1, 1) == (0, "0", "/a")
    assert move(2, 1) == (0, "1", "/a")
    assert move(0, 2, 1) == (0, "2", "/a")
    assert move(3, 2, 0) == (1, "0", "/b")
    assert move(0, 0, 1, 2) == (0, "2", "/a"), "there is no room left, so it stays where it was"
