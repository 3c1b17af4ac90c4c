"""Who a process is, for each launcher's variables: a table, and the order in which launchers are asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.config.environment import (
    LAUNCHERS,
    PORTS,
    Meeting,
    World,
    checkpoint_root_from_env,
    hosts_of,
    placed,
    tasks_of,
    world_from_env,
    world_of,
)
from kvdist.errors import ConfigError
from tests.cases import each

PARENT = 4242
KVDIST = {
    "DMLC_ROLE": "worker", "DMLC_NUM_SERVER": "0", "DMLC_NUM_WORKER": "5", "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "7000", "KVDIST_RANK": "4", "KVDIST_LOCAL_RANK": "1", "KVDIST_LOCAL_SIZE": "3",
    "KVDIST_CROSS_RANK": "1", "KVDIST_CROSS_SIZE": "2", "KVDIST_JOB": "abc",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "993787905",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[08-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
HERE = Meeting(job=f"horovod.{PARENT}")


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in names}


def found(env: dict[str, str]) -> World:
    # Through the names that people set, as the environment is read.
    twins = {"DMLC_ROLE": "KVDIST_ROLE", "DMLC_NUM_SERVER": "KVDIST_NUM_SERVER", "DMLC_NUM_WORKER": "KVDIST_NUM_WORKER",
             "DMLC_PS_ROOT_URI": "KVDIST_ROOT_URI", "DMLC_PS_ROOT_PORT": "KVDIST_ROOT_PORT"}  # fmt: skip
    return world_of({twins.get(name, name): text for name, text in env.items()}, PARENT)


WORLDS = {
    "nobody": ({}, World()),
    "an empty variable is none": ({"RANK": "", "KVDIST_NUM_SERVER": ""}, World()),
    "a master alone says nothing": (MASTER, World()),
    "kvdist-launch": (KVDIST, World(4, 5, 1, 3, 1, 2, "kvdist-launch", Meeting("10.0.0.1", 7000, job="abc"))),
    "kvdist-launch, rank 0": (
        {**KVDIST, "KVDIST_RANK": "0", "KVDIST_LISTEN_FD": "7", "KVDIST_LOCAL_RANK": "0", "KVDIST_CROSS_RANK": "0"},
        World(0, 5, 0, 3, 0, 2, "kvdist-launch", Meeting("10.0.0.1", 7000, 7, job="abc")),
    ),
    "kvdist-launch, one worker": (
        {"KVDIST_RANK": "0", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "0"},
        World(launcher="kvdist-launch"),
    ),
    "horovod's variables by hand": (HOROVOD, World(1, 2, 1, 2, 0, 1, "horovodrun", HERE)),
    "horovod's variables on two machines": (
        {**HOROVOD, **MASTER, "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_RANK": "1",
         "HOROVOD_CROSS_SIZE": "2"},
        World(1, 2, 0, 1, 1, 2, "horovodrun", Meeting("node1", 29500, job="torch.0")),
    ),
    "torchrun": (
        TORCHRUN,
        World(3, 4, 1, 2, 1, 2, "torchrun", Meeting("node1", 29500, is_served=True, job="none.2")),
    ),
    "torchrun, more processes on one machine than on the other": (
        {**TORCHRUN, "WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1"},
        World(2, 3, 1, 2, 1, 2, "torchrun", Meeting("node1", 29500, is_served=True, job="none.2"), is_assumed=True),
    ),
    "torchrun's variables by hand": (
        BY_HAND,
        World(1, 2, 1, 2, 0, 1, "torchrun", Meeting("localhost", 29500, job="torch.0"), is_assumed=True),
    ),
    "torchrun's variables by hand, one process a machine": (
        {**BY_HAND, "MASTER_ADDR": "10.0.0.7"},
        World(1, 2, 0, 1, 1, 2, "torchrun", Meeting("10.0.0.7", 29500, job="torch.0"), is_assumed=True),
    ),
    "Open MPI": (OPEN_MPI, World(1, 4, 1, 4, 0, 1, "Open MPI's mpirun", Meeting(job="ompi.993787905"))),
    "Open MPI on two machines": (
        {**OPEN_MPI, **MASTER, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        World(3, 4, 1, 2, 1, 2, "Open MPI's mpirun", Meeting("node1", 29500, job="torch.0"), is_assumed=True),
    ),
    "MPICH": (PMI, World(1, 2, 1, 2, 0, 1, "mpiexec (PMI)", Meeting(job=f"pmi.{PARENT}"))),
    "PMI with the name of the job": (
        {**PMI, "PMI_JOBID": "4.0"},
        World(1, 2, 1, 2, 0, 1, "mpiexec (PMI)", Meeting(job="pmi.4.0")),
    ),
    "Slurm": (
        SLURM,
        World(3, 5, 1, 2, 1, 2, "Slurm's srun", Meeting("gpu08", PORTS[6002], job="slurm.1000.2")),
    ),
    "Slurm, a node with fewer tasks": (
        {**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
        World(4, 5, 0, 1, 2, 3, "Slurm's srun", Meeting("gpu08", PORTS[6002], job="slurm.1000.2")),
    ),
    "Slurm on one node": (
        {**SLURM, "SLURM_NTASKS": "4", "SLURM_LOCALID": "3", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "vm",
         "SLURM_STEP_TASKS_PER_NODE": "4"},
        World(3, 4, 3, 4, 0, 1, "Slurm's srun", Meeting(job="slurm.1000.2")),
    ),
    "Slurm, told where to meet": (
        {**SLURM, **MASTER},
        World(3, 5, 1, 2, 1, 2, "Slurm's srun", Meeting("node1", 29500, job="torch.0")),
    ),
    "srun that speaks PMI": (
        {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5", "PMI_JOBID": "1000.2"},
        World(3, 5, 1, 2, 1, 2, "Slurm's srun", Meeting("gpu08", PORTS[6002], job="slurm.1000.2")),
    ),
    "MPICH inside a step of Slurm": (
        {**SLURM, **PMI, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        World(1, 2, 1, 2, 0, 1, "mpiexec (PMI)", Meeting(job=f"pmi.{PARENT}")),
    ),
    "a batch script of one task": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, World(launcher="Slurm's srun")),
}  # fmt: skip


@each("name", WORLDS)
def test_a_process_is_who_its_launcher_says(name):
    env, world = WORLDS[name]
    assert found(env) == world


REFUSED = {
    "half of kvdist's": (without(KVDIST, "KVDIST_RANK"), "DMLC_NUM_WORKER is set and KVDIST_RANK not"),
    "only that there are no servers": ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER is set and KVDIST_RANK and "),
    "only a root": ({"DMLC_PS_ROOT_URI": "::1"}, "DMLC_PS_ROOT_URI is set and KVDIST_RANK and DMLC_NUM_WORKER not"),
    "no root": (without(KVDIST, "DMLC_PS_ROOT_URI"), "half a job without servers: DMLC_PS_ROOT_URI missing"),
    "no port of the root": (without(KVDIST, "DMLC_PS_ROOT_PORT"), "DMLC_PS_ROOT_PORT missing"),
    "an impossible port": ({**KVDIST, "DMLC_PS_ROOT_PORT": "0"}, "DMLC_PS_ROOT_PORT is 0; a port is a number from 1"),
    "a job with servers": ({**KVDIST, "DMLC_NUM_SERVER": "2"}, r"this job has servers \(DMLC_NUM_SERVER=2\)"),
    "a rank past the end": (
        {**KVDIST, "KVDIST_RANK": "5"},
        "KVDIST_RANK is 5 and DMLC_NUM_WORKER is 5; ranks count from 0",
    ),
    "half a local pair": (without(KVDIST, "KVDIST_LOCAL_SIZE"), "KVDIST_LOCAL_RANK is set and KVDIST_LOCAL_SIZE is"),
    "half a cross pair": (without(KVDIST, "KVDIST_CROSS_RANK"), "KVDIST_CROSS_SIZE is set and KVDIST_CROSS_RANK is"),
    "no number": ({**KVDIST, "KVDIST_RANK": "first"}, "KVDIST_RANK is 'first'; it must be a whole number"),
    "half of horovod's": (without(HOROVOD, "HOROVOD_SIZE"), "HOROVOD_RANK is set and HOROVOD_SIZE not: horovodrun"),
    "horovodrun itself": ({**HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"}, "start it with kvdist-run"),
    "horovod's on two machines": ({**HOROVOD, "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_LOCAL_RANK": "0"}, "on several mach"),
    "half of torchrun's": (without(TORCHRUN, "RANK"), "WORLD_SIZE is set and RANK not: torchrun sets both"),
    "no master": (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT are not: set all four"),
    "half a master": (without(TORCHRUN, "MASTER_PORT"), "MASTER_ADDR is set and MASTER_PORT is not"),
    "the other half of a master": ({**OPEN_MPI, "MASTER_PORT": "1"}, "MASTER_PORT is set and MASTER_ADDR is not"),
    "no processes": ({**TORCHRUN, "WORLD_SIZE": "0"}, "RANK is 3 and WORLD_SIZE is 0; ranks count from 0"),
    "no processes here": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE is 0"),
    "half of Open MPI's": (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK not: Open MPI's mpirun"),
    "Open MPI on two machines": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "the 4 processes of this job are on several machines, and nothing says .* mpirun -x MASTER_ADDR=node1",
    ),
    "half of PMI's": (without(PMI, "PMI_SIZE"), "PMI_RANK is set and PMI_SIZE not"),
    "MPICH on two machines": ({**PMI, "PMI_SIZE": "4"}, "mpiexec -genv MASTER_ADDR node1"),
    "an allocation of Slurm": ({"SLURM_NTASKS": "3"}, "SLURM_NTASKS is set and SLURM_PROCID not: Slurm's srun sets"),
    "a batch script of Slurm": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"},
        "Slurm has allotted 3 tasks, but this process is not one of them, .*: start it with srun",
    ),
    "part of a place in Slurm": (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is not set, and Slurm's srun sets all"),
    "a place that Slurm does not have": ({**SLURM, "SLURM_NODEID": "3"}, "contradict SLURM_STEP_TASKS_PER_NODE"),
    "no list of hosts": ({**SLURM, "SLURM_STEP_NODELIST": "gpu[1-"}, "not a valid Slurm host list"),
}


@each("name", REFUSED)
def test_half_of_a_description_and_an_impossible_one_are_refused_by_name(name):
    env, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        found(env)


def test_the_batch_script_of_slurm_is_no_task_whatever_its_place_says():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with pytest.raises(ConfigError, match="start it with srun"):
        found({**batch, "SLURM_TASKS_PER_NODE": "3", "SLURM_NODELIST": "vm"})


def test_launchers_are_asked_in_this_order():
    everything = [KVDIST, HOROVOD, TORCHRUN, OPEN_MPI, PMI, SLURM]
    names = ["kvdist-launch", "horovodrun", "torchrun", "Open MPI's mpirun", "mpiexec (PMI)", "Slurm's srun"]
    assert [launcher.name for launcher in LAUNCHERS] == names
    for first, name in enumerate(names):
        env = {key: text for variables in reversed(everything[first:]) for key, text in variables.items()}
        assert found(env).launcher == name
        assert found(env).rank == int(everything[first][LAUNCHERS[first].rank])


def test_half_of_what_an_earlier_launcher_says_is_an_error_though_a_later_one_says_all():
    with pytest.raises(ConfigError, match="HOROVOD_RANK is set"):
        found({**TORCHRUN, "HOROVOD_RANK": "1"})


def test_both_names_of_a_variable_are_read_from_the_environment():
    world = world_from_env({**KVDIST, "KVDIST_ROOT_PORT": "7001"})
    assert (world.rank, world.size, world.meeting.port) == (4, 5, 7001)


# Where the ranks are, once they have met.


@each(
    "hosts, places",
    [
        ("aabb", [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        ("abab", [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
        ("aabbc", [(0, 2, 0, 3), (1, 2, 0, 2), (0, 2, 1, 3), (1, 2, 1, 2), (0, 1, 2, 3)]),
        ("abb", [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
        ("a", [(0, 1, 0, 1)]),
    ],
)
def test_places_follow_from_the_hosts_of_all_ranks(hosts, places):
    for rank, place in enumerate(places):
        world = placed(World(rank, len(hosts), is_assumed=True), hosts)
        assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == place
        assert not world.is_assumed


@given(st.text("abc", min_size=1, max_size=12))
def test_each_place_among_hosts_is_taken_once(hosts):
    worlds = [placed(World(rank, len(hosts)), hosts) for rank in range(len(hosts))]
    assert len({(hosts[world.rank], world.local_rank) for world in worlds}) == len(hosts)
    assert len({(world.local_rank, world.cross_rank) for world in worlds}) == len(hosts)
    assert sum(world.local_rank == 0 for world in worlds) == worlds[0].cross_size == len(set(hosts))


# Slurm's lists.


@each(
    "text, hosts",
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("login,gpu[1,3-4]-ib,z", ["login", "gpu1-ib", "gpu3-ib", "gpu4-ib", "z"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_hosts_of_slurm_are_written_out(text, hosts):
    assert hosts_of(text) == hosts


@each("text", ["a[", "a]", "a[]", "a[1-]", "a[x]", "a,,b", "a[3-1]", "n[0-999999999]", "a[[1]]"])
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ConfigError):
        hosts_of(text)


def test_numbers_of_tasks_of_slurm_are_written_out():
    assert tasks_of("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of("12") == [12]
    for text in ("", "2(x)", "2x3", "a", "1(x999999999)"):
        with pytest.raises(ConfigError, match="Slurm list of task counts"):
            tasks_of(text)


def test_a_process_whose_folder_was_removed_needs_another_one_only_where_it_is_the_default(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert checkpoint_root_from_env({"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}) == tmp_path
    with pytest.raises(ConfigError, match="the current folder was removed: change to another one"):
        checkpoint_root_from_env({})
