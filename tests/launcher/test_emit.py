"""Jobs as text for other systems, compared with files in ``golden/emit``, and read back by what reads such texts.

Where a text is meant to change, ``WRITE_GOLDEN=1`` in the environment writes the files anew; read the difference.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.config.losses import LossPolicy
from kvdist.errors import ConfigError
from kvdist_launch.emit import (
    OF_ONE_PROCESS,
    PLACES,
    SET_PLACES,
    exports,
    heredoc,
    kubernetes,
    manual,
    mpi,
    roles_of,
    run_again,
    sbatch,
)
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host, parse_hostfile
from kvdist_launch.plan import PYTHON, HostFacts, JobSpec, plan
from tests.cases import each

GOLDEN = Path(__file__).with_name("golden") / "emit"
AWKWARD = 'it\'s a "value" with\nlines, %i, = and : and $HOME;`id` $(touch pwned)\\ é \U0001f600 \x7f\u2028'
LAUNCHER = HostFacts(8, "/venv/bin/python", "10.0.0.99", {"PYTHONPATH": "/li b", "CUDA_VISIBLE_DEVICES": "0,1"})
HOSTS = parse_hostfile("localhost\nme@d1:2222 role=worker\n[fd00::17]\n", "hosts")
WORD = "KVDIST_0123456789abcdef"


def new_job(**settings: object) -> JobSpec:
    defaults: dict[str, object] = {
        "command": ("python", "my train.py", AWKWARD),
        "role_command": (PYTHON, "-m", "kvdist"),
        "port": 23456,
        "name": "0123456789abcdef",
        "env": {"TEXT": AWKWARD},
        "env_server": {"KVDIST_BIGARRAY_BOUND": "77"},
        "env_worker": {"PERCENT": "100%"},
    }
    return JobSpec(2, 1, **{**defaults, **settings})  # type: ignore[arg-type]


def new_plan(hosts: list[Host]) -> list:
    facts = [HostFacts(8, host.python or "/venv/bin/python", host.name) for host in hosts]
    return plan(new_job(cwd="/my job"), hosts, facts, LAUNCHER)


def parts(**settings: object) -> list:
    return roles_of(new_job(**settings), LAUNCHER, "/venv/bin/python")


TEXTS = {
    "manual.sh": lambda: manual(new_plan(HOSTS), HOSTS, "/here", ".kvdist-0123.secret"),
    "sbatch.sh": lambda: sbatch(parts(), WORD, is_secret=True),
    "mpi.sh": lambda: mpi(new_plan(HOSTS), HOSTS, "here", WORD, is_secret=True),
    "kubernetes.json": lambda: kubernetes(parts(), "kvdist-0123", "me/train:1", 9191, "c2VjcmV0"),
}


@each("name", TEXTS)
def test_a_text_is_what_its_file_says(name):
    text, path = TEXTS[name](), GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


GOES_ON = {"env": {"TEXT": AWKWARD, "KVDIST_ON_LOSS": "continue"}}
RESTART = LossPolicy("continue", restart=3)
RUNS_AGAIN = {
    "manual.sh": lambda: manual(
        plan(new_job(**GOES_ON), HOSTS, [HostFacts(8, "/venv/bin/python", "d")] * 3, LAUNCHER),
        HOSTS, "/", None, RESTART,
    ),
    "sbatch.sh": lambda: sbatch(parts(**GOES_ON), WORD, is_secret=True, losses=RESTART),
    "kubernetes.json": lambda: kubernetes(parts(**GOES_ON), "kvdist-0123", "me/train:1", 9191, None, RESTART),
}  # fmt: skip


@each(
    "name, once, for_each_worker",
    [
        ("manual.sh", "can be started again:\n# paste its block once more", '[ "$KVDIST_RESTARTS" -lt 3 ] || exit'),
        ("sbatch.sh", "srun --overlap --kill-on-bad-exit=0 --no-kill --label", ""),
        ("sbatch.sh", '[ "$KVDIST_RESTARTS" -lt 3 ] || exit "$code"', ""),
        ("kubernetes.json", '"backoffLimitPerIndex": 3,\n', ""),
        ("kubernetes.json", "batch.kubernetes.io/job-index-failure-count", ""),
    ],
)
def test_workers_are_started_again_where_the_others_go_on_without_them(name, once, for_each_worker):
    text = RUNS_AGAIN[name]()
    assert text.count(once) == 1 and once not in TEXTS[name]()
    assert not for_each_worker or text.count(for_each_worker) == 2
    assert name != "kubernetes.json" or text.count('"backoffLimit": 0') == 2, "of the scheduler and the servers"
    if name.endswith(".sh"):
        done = subprocess.run(
            ["bash" if name == "sbatch.sh" else "sh", "-n"], input=text, text=True, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_one_more_worker_asks_for_no_rank_and_has_a_block_of_its_own():
    job = new_job(env={"KVDIST_ON_LOSS": "continue", "KVDIST_MAX_WORKERS": "5"})
    facts = [HostFacts(8, "/venv/bin/python", "d")] * 3
    losses = LossPolicy("continue", max_workers=5)
    text = manual(plan(job, HOSTS, facts, LAUNCHER), HOSTS, "/", None, losses)
    *_, last, more = text.split("\n\n")
    assert more.startswith("# One more worker, at any time") and "up to 5 workers in all" in more
    assert "export KVDIST_RANK=1" in last and "export KVDIST_RANK" not in more and " KVDIST_RANK " in more
    assert not any(f"export {name}" in more for name in PLACES)


@each(
    "ends, starts, code",
    [
        ("kill -9 $$; kill -15 $$; exit 0", 3, 0),
        ("exit 75; exit 3; exit 0", 2, 3),
        ("kill -9 $$; exit 75; exit 75; exit 75", 3, 75),
        ("exit 0", 1, 0),
    ],
)
def test_a_shell_runs_a_program_again_after_a_signal_or_75_and_not_too_often(ends, starts, code, tmp_path):
    said = tmp_path / "said"
    program = f"echo $KVDIST_RESTARTS >> {said}; case $KVDIST_RESTARTS in "
    program += " ".join(f"{life}) {end} ;;" for life, end in enumerate(ends.split("; "))) + " esac"
    script = "\n".join(["sleep() { :; }", *run_again(["sh", "-c", program, "a name\nof two lines"], 2, " </dev/null")])
    assert subprocess.run(["sh", "-s"], input=script, text=True).returncode == code
    assert said.read_text().split() == [str(life) for life in range(starts)]


@each("name", ["manual.sh", "sbatch.sh", "mpi.sh"])
def test_a_script_is_valid_for_its_shell(name):
    shell = "bash" if name == "sbatch.sh" else "sh"
    done = subprocess.run([shell, "-n"], input=TEXTS[name](), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@each("name", ["sbatch.sh", "mpi.sh"])
def test_no_value_stands_in_an_argument_of_what_starts_the_processes(name):
    (line,) = [line for line in TEXTS[name]().splitlines() if "srun " in line or line.startswith("mpirun ")]
    assert "TEXT" not in line and "100%" not in line and "secret=" not in line


@each(
    "tasks, places",
    [
        ("2", {(0, 0): "0 2 0 1", (0, 1): "1 2 0 1"}),
        ("2(x2),1", {(0, 1): "1 2 0 2", (1, 0): "0 2 1 3", (1, 1): "1 2 1 2", (2, 0): "0 1 2 3"}),
        ("1,3(x2)", {(0, 0): "0 1 0 3", (1, 1): "1 3 0 2", (2, 2): "2 3 1 2"}),
    ],
)
def test_a_task_of_slurm_finds_its_place_among_the_others(tasks, places):
    for (node, local), place in places.items():
        env = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        script = SET_PLACES + "\necho " + " ".join(f"${name}" for name in PLACES)
        done = subprocess.run(["sh"], input=script, env={**os.environ, **env}, text=True, capture_output=True)
        assert (done.stdout.strip(), done.stderr) == (place, "")


def test_parts_have_what_all_processes_of_a_role_have_in_common():
    scheduler, servers, workers = parts()
    assert [(str(part.role), part.count) for part in (scheduler, servers, workers)] == [
        ("scheduler", 1), ("server", 1), ("worker", 2),
    ]  # fmt: skip
    for part in (scheduler, servers, workers):
        assert OF_ONE_PROCESS.isdisjoint(part.environment.settings)
        assert part.environment.settings["DMLC_NUM_WORKER"] == "2"
        assert "CUDA_VISIBLE_DEVICES" not in part.environment.settings
        assert part.environment.front == {"PYTHONPATH": "/li b", "PATH": "/venv/bin"}
    assert servers.argv == ("/venv/bin/python", "-m", "kvdist")
    assert servers.environment.settings["MXNET_KVSTORE_BIGARRAY_BOUND"] == "77"
    assert workers.argv[0] == "python"


def test_devices_that_the_user_asked_for_are_those_of_every_worker():
    assert parts(env_worker={"CUDA_VISIBLE_DEVICES": "0,1"})[2].environment.settings["CUDA_VISIBLE_DEVICES"] == "0,1"


# Shells.


texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=20)
PATHS = st.text(st.characters(blacklist_characters="\0:", blacklist_categories=("Cs",)), min_size=1, max_size=9)


def env_of_shell(lines: list[str], base: dict[str, str]) -> dict[str, str]:
    script = "\n".join([*lines, "exec env -0"])
    done = subprocess.run(["/bin/sh", "-s"], input=script.encode(), env=base, capture_output=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)


@settings(max_examples=25)  # each starts a shell
@given(texts, texts, PATHS, st.none() | PATHS)
def test_a_shell_that_reads_the_lines_has_the_environment_that_is_meant(value, default, front, path):
    environment = Environment({"D": default, "E": default}, {"LIBS": front}, {"V": value, "KVDIST_INTERFACE": "e"})
    base = {"E": "mine", "KVDIST_RANK": "4", "DMLC_INTERFACE": "old"} | ({} if path is None else {"LIBS": path})
    found = env_of_shell(exports(environment), base)
    expected = environment.over(base)
    assert {name: found.get(name) for name in [*expected, "KVDIST_RANK", "DMLC_INTERFACE"]} == {
        **expected,
        # A shell that finds its path in front adds it once more, which changes nothing.
        "LIBS": front if path is None else f"{front}:{path}",
        "KVDIST_RANK": None,
        "DMLC_INTERFACE": None,
    }


def test_a_text_cannot_end_the_script_that_it_stands_in():
    assert heredoc(["a", "xEND"], "END") == ["a", "xEND", "END"]
    with pytest.raises(ValueError, match="ends the text early"):
        heredoc(["a", "b\nEND\nc"], "END")


# Kubernetes.


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ConfigError, match="not UTF-8"):
        kubernetes(parts(env={"TEXT": "\udcff"}), "kvdist-0123", "me/train:1", 9191, None)


def manifests(secret: str | None = "c2VjcmV0") -> dict[str, dict]:
    found = json.loads(kubernetes(parts(), "kvdist-0123", "me/train:1", 9191, secret))
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    return {manifest["kind"]: manifest for manifest in found["items"]}


def jobs_by_role() -> dict[str, dict]:
    return {job["name"]: job["template"] for job in manifests()["JobSet"]["spec"]["replicatedJobs"]}


def test_kubernetes_accepts_the_manifests_that_it_knows_itself():
    reason = "THE MANIFESTS ARE NOT VALIDATED: pip install kubernetes-validate"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    found = manifests()
    for kind in ("Secret", "Service"):
        validate.validate(found[kind], "1.29", strict=True)
    for role, template in jobs_by_role().items():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": role}, **template}
        validate.validate(job, "1.29", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**found["Service"], "spec": {"clusterIPs": "None"}}, "1.29", strict=True)


def test_a_jobset_has_the_fields_that_its_definition_has():
    jobset = manifests()["JobSet"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    known = {"network", "successPolicy", "failurePolicy", "startupPolicy", "replicatedJobs"}
    assert set(jobset["spec"]) == known
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert jobset["spec"]["network"]["subdomain"] == manifests()["Service"]["metadata"]["name"]
    for job in jobset["spec"]["replicatedJobs"]:
        assert set(job) == {"name", "replicas", "template"}
        assert job["template"]["spec"]["completionMode"] == "Indexed"
    assert [job["template"]["spec"]["completions"] for job in jobset["spec"]["replicatedJobs"]] == [1, 1, 2]


def test_pods_have_their_ranks_the_secret_and_the_users_words_unchanged():
    for role, template in jobs_by_role().items():
        pod = template["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
        assert len(env) == len(container["env"])
        assert "job-completion-index" in env["KVDIST_RANK"]["fieldRef"]["fieldPath"]
        assert env["TEXT"].replace("$$", "$") == AWKWARD
        assert env["KVDIST_SECRET_FILE"] == "/run/kvdist/secret"
        (volume,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert volume == {"secretName": "kvdist-0123", "defaultMode": 0o400}
        if role == "worker":
            assert [word.replace("$$", "$") for word in container["command"]] == list(new_job().command)
        if role != "scheduler":
            assert env["DMLC_PS_ROOT_URI"] == "kvdist-0123-scheduler-0-0.kvdist-0123"


def test_without_encryption_there_is_no_secret():
    found = manifests(secret=None)
    assert set(found) == {"Service", "JobSet"}
    assert "secret" not in str(found["JobSet"]).lower()


# By hand.


def test_the_secret_is_copied_to_other_hosts_alone():
    lines = manual(new_plan(HOSTS), HOSTS, "/here", ".kvdist-0123.secret").splitlines()
    assert [line for line in lines if line.startswith("scp")] == [
        'scp -p -P 2222 -- "$HOME"/.kvdist-0123.secret me@d1:',
        "scp -p -- \"$HOME\"/.kvdist-0123.secret '[fd00::17]:'",
    ]
    assert "urandom" not in manual(new_plan(HOSTS[:1]), HOSTS[:1], "/here", None)
