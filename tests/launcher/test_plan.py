"""Plans: every process of a job with its argv and environment, compared with the files in ``golden``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdist.config import ClusterConfig
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.plan import Job, Process, parse_assignments, plan, threads_per_worker

GOLDEN = Path(__file__).with_name("golden")
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
AWKWARD = 'it\'s a "value" with\nlines, = and : and $HOME;`id`\\ é'


def new_job(num_workers: int = 2, num_servers: int = 2, **settings: object) -> Job:
    defaults: dict[str, object] = {
        "command": ("python", "train.py"),
        "role_command": ("/venv/bin/python", "-m", "kvdist"),
        "port": 23456,
        "name": "0123456789abcdef",
        "cores": 8,
    }
    return Job(num_workers, num_servers, **{**defaults, **settings})  # type: ignore[arg-type]


def by_name(job: Job, environ: dict[str, str] | None = None) -> dict[str, Process]:
    return {str(process.node): process for process in plan(job, environ or {})}


PLANS = {
    "two_workers_two_servers": (new_job(), {"PATH": "/usr/bin", "HOME": "/home/someone"}),
    "awkward_names_and_values": (
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
    "settings_of_the_user_are_kept": (
        new_job(
            2,
            1,
            env={"KVDIST_PLACEMENT": "hash", "PYTHONUNBUFFERED": "0"},
            env_server={"KVDIST_BIGARRAY_BOUND": "77"},
            env_worker={"OMP_NUM_THREADS": "3"},
        ),
        {"KVDIST_PLACEMENT": "hash", "KVDIST_SLICE_BYTES": "1024", "OMP_NUM_THREADS": "5"},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_what_its_file_says(name):
    job, environ = PLANS[name]
    shown = [
        {"node": str(process.node), "argv": list(process.argv), "env": dict(process.env), "is_told_of_endings":
         process.is_told_of_endings}
        for process in plan(job, environ)
    ]  # fmt: skip
    assert shown == json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def test_processes_that_others_wait_for_are_started_first():
    names = [str(process.node) for process in plan(new_job(2, 3), {})]
    assert names == ["scheduler", "server-0", "server-1", "server-2", "worker-0", "worker-1"]


@pytest.mark.parametrize(("num_workers", "num_servers"), [(1, 1), (1, 3), (5, 2)])
def test_every_process_reads_its_own_seat_from_its_environment(num_workers, num_servers):
    for process in plan(new_job(num_workers, num_servers), {}):
        config = ClusterConfig.from_env(process.env)
        assert config is not None
        assert (config.role, config.rank) == (process.node.role, process.node.rank)
        assert (config.num_workers, config.num_servers) == (num_workers, num_servers)
        assert (config.root_host, config.root_port, config.job) == ("127.0.0.1", 23456, "0123456789abcdef")
        assert config.supervised == process.is_told_of_endings == (process.node.role is Role.SCHEDULER)


def test_variables_of_an_earlier_job_do_not_leak_into_this_one():
    stale = {
        "DMLC_ROLE": "server", "KVDIST_ROLE": "server", "KVDIST_ROOT_URI": "10.0.0.9", "KVDIST_ROOT_PORT": "9",
        "KVDIST_NUM_WORKER": "9", "KVDIST_NUM_SERVER": "9", "KVDIST_RANK": "8", "KVDIST_JOB": "old",
        "KVDIST_SUPERVISED": "1", "KVDIST_LOCAL_RANK": "8",
    }  # fmt: skip
    assert plan(new_job(), stale) == plan(new_job(), {})


def test_variables_of_torchrun_are_never_set():
    assert all(TORCHRUN.isdisjoint(process.env) for process in plan(new_job(), {}))


def test_only_workers_run_the_users_command_and_have_a_local_rank():
    processes = by_name(new_job(command=("train",)))
    assert processes["worker-1"].argv == ("train",)
    assert processes["worker-1"].env["KVDIST_LOCAL_RANK"] == "1"
    for name in ("scheduler", "server-0"):
        assert processes[name].argv == ("/venv/bin/python", "-m", "kvdist")
        assert "KVDIST_LOCAL_RANK" not in processes[name].env
        assert "OMP_NUM_THREADS" not in processes[name].env


def test_a_roles_variable_wins_over_the_common_one_and_that_over_the_environment():
    processes = by_name(new_job(env={"X": "all"}, env_server={"X": "server"}), {"X": "shell"})
    assert [processes[name].env["X"] for name in ("scheduler", "server-0", "worker-0")] == ["all", "server", "all"]


def test_an_option_wins_over_the_environment_under_either_of_a_variables_names():
    job = new_job(env={"MXNET_KVSTORE_BIGARRAY_BOUND": "7"}, env_worker={"KVDIST_BIGARRAY_BOUND": "8"})
    configs = [ClusterConfig.from_env(process.env) for process in plan(job, {"KVDIST_BIGARRAY_BOUND": "9"})]
    assert [config and config.bigarray_bound for config in configs] == [7, 7, 7, 8, 8]


def test_an_impossible_setting_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="KVDIST_PLACEMENT is 'here'"):
        plan(new_job(env_server={"KVDIST_PLACEMENT": "here"}), {})


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_workers_share_the_cores(cores, workers, threads):
    assert threads_per_worker(cores, workers) == threads


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("A=b", "A", "b"),
        ("A:b", "A", "b"),
        ("A=", "A", ""),
        ("A=b=c:d", "A", "b=c:d"),
        ("URL:http://h/?a=b", "URL", "http://h/?a=b"),
        ("_A1=line\nline", "_A1", "line\nline"),
    ],
)
def test_the_first_separator_after_the_name_decides(text, name, value):
    assert parse_assignments([text]) == {name: value}


@pytest.mark.parametrize("text", ["A", "", "=b", "1A=b", "A-B=c", "A B=c", "Ä=b"])
def test_a_text_that_sets_no_variable_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        parse_assignments([text])


@pytest.mark.parametrize("name", ["DMLC_ROLE", "KVDIST_RANK", "DMLC_PS_ROOT_PORT", "KVDIST_JOB"])
def test_variables_that_the_launcher_sets_cannot_be_given(name):
    with pytest.raises(ConfigError, match=f"{name} is set by kvdist-launch"):
        parse_assignments([f"{name}=1"])
