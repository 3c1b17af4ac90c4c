"""The command lines: who gets what, what is shown, how a job ends, other ways in, and functions on workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvdist
from tests.acceptance.together import ROOT
from tests.cases import each

LAUNCH, RUN, KVDIST = "kvdist_launch", "kvdist_launch.run_cli", "kvdist"
TRAIN = """
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(2, np.float32))
    value = np.full(2, store.rank + 1, np.float32)
    store.pushpull("w", value)
    print(f"worker {store.rank} of {store.num_workers}: {value.tolist()}")
    store.close()
"""
SHOW = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def run(module, *words, cwd=None, code=0, **variables):
    """Run a command to its end; its two outputs."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env = {**own, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", **variables}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def refused(module, *words, **variables):
    """What a command says that cannot be done: a sentence on one line, and nothing was started."""
    out, err = run(module, *words, code=2, **variables)
    assert out == "" and "error: " in err
    return err.splitlines()[-1]


def plan(*words, **variables):
    """What ``--dry-run -v`` shows: for each process its place, its variables by their kind, and its words."""
    out, _ = run(LAUNCH, *words[:-1], "--dry-run", "-v", *shlex.split(words[-1]), **variables)
    found = {}
    for block in out.strip().split("\n\n"):
        head, *lines = block.splitlines()
        if not lines or not lines[0].startswith("  "):
            continue  # what is said at the end
        name, _, place = head.partition(" on ")
        process = found[name] = {"on": place, "default": {}, "front": {}, "set": {}, "run": ""}
        for line in lines:
            kind, text = line.split(None, 1)
            if kind == "run":
                process["run"] = text
            else:
                key, _, value = text.partition("=")
                process[kind][key] = value
    return found


def by_worker(out):
    """Lines of workers, by rank, without their prefixes."""
    found = {}
    for rank, text in re.findall(r"^w(\d+) │ (.*)$", out, re.MULTILINE):
        found.setdefault(int(rank), []).append(text)
    return found


# This machine.


def test_a_job_runs_the_words_behind_the_options_on_workers_alone(script):
    out, err = run(LAUNCH, "-n", "2", "-s", "2", sys.executable, script(TRAIN))
    assert by_worker(out) == {0: ["worker 0 of 2: [3.0, 3.0]"], 1: ["worker 1 of 2: [3.0, 3.0]"]}
    assert re.search(r"^kvdist-launch: OMP_NUM_THREADS=\d+ for each worker \(cores: \d+, workers: 2\)$", err, re.M)
    assert re.search(r"^kvdist-launch: 2 workers and 2 servers finished in [\d.]+ s$", err, re.M)


def test_there_are_as_many_servers_as_workers_unless_it_is_said():
    assert list(plan("-n", "2", "true")) == ["scheduler", "server-0", "server-1", "worker-0", "worker-1"]
    assert list(plan("-n", "1", "-s", "2", "true")) == ["scheduler", "server-0", "server-1", "worker-0"]
    assert list(plan("-n", "2", "-s", "0", "true")) == ["worker-0", "worker-1"]


def test_no_word_passes_through_a_shell_and_what_follows_the_command_belongs_to_it():
    words = ["a  b", "$HOME", "*", ";id", "-n", "5", "--dry-run"]
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", sys.executable, "-c", SHOW, *words)
    assert json.loads(by_worker(out)[0][0])[0] == words
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", f"{sys.executable} -c 'import sys; print(sys.argv[1:])' 'a b' -n")
    assert by_worker(out)[0] == ["['a b', '-n']"]


def test_every_process_is_told_who_it_is():
    found = plan("-n", "2", "-s", "1", "true")
    for name, process in found.items():
        own, role = process["set"], name.partition("-")[0]
        assert (own["DMLC_ROLE"], own["DMLC_NUM_WORKER"], own["DMLC_NUM_SERVER"]) == (role, "2", "1")
        assert own["KVDIST_RANK"] == (name.partition("-")[2] or "0")
        assert process["default"]["PYTHONUNBUFFERED"] == "1"
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & own.keys()
        assert process["run"] == "true" if role == "worker" else 'run_module("kvdist"' in process["run"]
    assert len({process["set"]["DMLC_PS_ROOT_PORT"] for process in found.values()}) == 1
    for rank in "01":
        own = found[f"worker-{rank}"]["set"]
        assert (own["KVDIST_LOCAL_RANK"], own["KVDIST_LOCAL_SIZE"]) == (rank, "2")
        assert (own["KVDIST_CROSS_RANK"], own["KVDIST_CROSS_SIZE"]) == ("0", "1")


def test_variables_go_to_the_processes_that_they_are_for_and_the_roles_own_win(tmp_path):
    file = tmp_path / "variables"
    file.write_text("# a comment\nA=file\nB='of a file'\nC=\"x y\"\nD=$HOME\n")
    options = ["--env-file", str(file), "-x", "A=exported", "--env", "E=all", "--env-server", "E=server"]
    found = plan("-n", "1", "-s", "1", *options, "-x", "OWN_TOKEN", "--env-worker", "F=1", "true", OWN_TOKEN="t")
    worker, server = found["worker-0"]["set"], found["server-0"]["set"]
    assert (worker["A"], worker["B"], worker["C"], worker["D"]) == ("exported", "'of a file'", "'x y'", "'$HOME'")
    assert (worker["E"], server["E"], worker["F"]) == ("all", "server", "1") and "F" not in server
    assert worker["OWN_TOKEN"] == "'(hidden)'"
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", *options[:4], sys.executable, "-c", SHOW)
    assert json.loads(by_worker(out)[0][0])[1]["D"] == "$HOME"
    for option in ("--env", "-x", "--env-worker"):
        assert "KVDIST_RANK" in refused(LAUNCH, "-n", "1", option, "KVDIST_RANK=1", "true")


def test_workers_of_a_host_share_the_devices_that_are_named():
    found = plan("-n", "2", "-s", "1", "true", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert [found[f"worker-{rank}"]["set"]["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0,1", "2,3"]
    found = plan("-n", "3", "-s", "1", "true", CUDA_VISIBLE_DEVICES="4,5")
    assert [found[f"worker-{rank}"]["set"]["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["4", "5", "4"]
    assert "CUDA_VISIBLE_DEVICES" not in plan("-n", "1", "true", CUDA_VISIBLE_DEVICES="")["worker-0"]["set"]
    found = plan("-n", "1", "-s", "3", "--server-device", "cuda:0,cuda:1", "true")
    assert {found[f"server-{rank}"]["set"]["KVDIST_SERVER_DEVICE"] for rank in range(3)} == {"cuda:0,cuda:1"}


def test_users_own_values_win_over_the_launchers_defaults():
    found = plan("-n", "1", "true", OMP_NUM_THREADS="7")
    assert "OMP_NUM_THREADS" not in found["worker-0"]["set"]
    _, err = run(LAUNCH, "-n", "1", "-s", "0", "true", OMP_NUM_THREADS="7")
    assert "OMP_NUM_THREADS" not in err


@each(
    "words, code, said",
    [
        (["-n", "2", "no-such-program"], 127, "no-such-program"),
        (["-n", "2", "/"], 126, "directory"),
        (["-n", "2"], 2, "command"),
        (["-n", "0", "true"], 2, "-n is 0"),
        (["true"], 2, "-n"),
        (["-n", "1", "--launcher", "ssh", "true"], 2, "-H"),
        (["-n", "1", "--env", "KVDIST_SLICE_BYTES=x", "true"], 2, "KVDIST_SLICE_BYTES"),
        (["-n", "1", "--log-dir", "/dev/null/logs", "true"], 2, "/dev/null/logs"),
        (["-n", "1", "--server-device", "gpu", "true"], 2, "gpu"),
        (["-n", "1", "--no-such-option", "true"], 2, "--no-such-option"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(words, code, said):
    out, err = run(LAUNCH, *words, code=code)
    assert out == "" and said in err.splitlines()[-1]


# What is shown, and what is left.


def test_only_what_is_asked_for_is_shown_and_everything_is_logged(tmp_path):
    logs, summary = tmp_path / "logs", tmp_path / "summary.json"
    command = ["sh", "-c", "echo out $KVDIST_RANK; echo err $KVDIST_RANK >&2"]
    words = ["--log-dir", str(logs), "--json-summary", str(summary), "--filter", "w1", "--timestamps", *command]
    for _ in range(2):
        out, err = run(LAUNCH, "-n", "2", "-s", "0", *words)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} w1 │ out 1\n", out)
    assert "w1 │ err 1" in err and "w0" not in out + err
    assert {path.name for path in logs.iterdir()} == {
        "worker-0.log", "worker-1.log", "worker-0.log.1", "worker-1.log.1"
    }  # fmt: skip
    assert sorted((logs / "worker-0.log").read_text().splitlines()) == ["err 0", "out 0"]
    told = json.loads(summary.read_text())
    assert (told["version"], told["exit_code"], told["outcome"]) == (kvdist.__version__, 0, "finished")
    assert told["first_failure"] is None and told["sentence"].startswith("2 workers finished in ")
    assert [(one["node"], one["host"], one["exit_code"]) for one in told["processes"]] == [
        ("worker-0", "", 0), ("worker-1", "", 0)
    ]  # fmt: skip


def test_colours_are_for_terminals_alone():
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", "echo", "plain")
    assert out == "w0 │ plain\n"


def test_the_first_failure_is_told_last_with_its_last_lines_and_gives_the_exit_code(tmp_path):
    program = (
        "import os, sys, time\nfor i in range(20): print('line', i, flush=True)\n"
        "if os.environ['KVDIST_RANK'] == '1': raise ValueError('loss is nan')\n"
        "while True: print('on', file=sys.stderr, flush=True); time.sleep(0.01)"
    )
    summary = tmp_path / "summary.json"
    options = ["--json-summary", str(summary), "--grace", "1"]
    _, err = run(LAUNCH, "-n", "2", "-s", "1", *options, sys.executable, "-c", program, code=1)
    *_, last = err.splitlines()
    assert re.fullmatch(
        r"kvdist-launch: worker-1 \(pid \d+\) failed with exit code 1 after [\d.]+ s; job ended with exit code 1:"
        r" ValueError: loss is nan",
        last,
    )
    told = err[err.index("the last lines of worker-1:") :].splitlines()
    assert "    ValueError: loss is nan" in told and "    line 19" in told and "    line 0" not in told
    failure = json.loads(summary.read_text())["first_failure"]
    assert (failure["node"], failure["role"], failure["rank"], failure["exit_code"]) == ("worker-1", "worker", 1, 1)
    assert failure["last_lines"][-1] == "ValueError: loss is nan"


@each("ends, code", [("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_the_exit_code_is_that_of_the_first_process_that_failed(ends, code):
    program = f"[ $KVDIST_RANK = 1 ] && {ends}; sleep 60"
    run(LAUNCH, "-n", "2", "-s", "0", "--grace", "1", "sh", "-c", program, code=code)


def test_the_job_is_started_anew_as_often_as_it_is_said(tmp_path):
    program = 'echo "attempt ${KVDIST_RESTARTS-first}"; [ "$KVDIST_RESTARTS" = 2 ] || exit 4'
    options = ["--grace", "1", "--on-worker-exit"]
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", *options, "restart:3", "sh", "-c", program)
    assert by_worker(out) == {0: ["attempt first", "attempt 1", "attempt 2"]}
    out, _ = run(LAUNCH, "-n", "1", "-s", "0", *options, "restart:1", "sh", "-c", program, code=4)
    assert by_worker(out) == {0: ["attempt first", "attempt 1"]}


ENDLESS = """
    import signal, sys, time
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(2, np.float32))
    try:
        print("trains", flush=True)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        if sys.argv[1] == "stays":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(0.5)  # signals within a quarter of a second are one
            print("stays", flush=True)
            time.sleep(100)
        store.pushpull("w", np.ones(2, np.float32))
        print("servers live:", store.pull("w").tolist(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_workers_to_end_while_servers_live(job, script, number):
    launcher = job.launch(2, 1, sys.executable, script(ENDLESS), "ends", options=("--grace", "30"))
    job.line("launcher", "trains", count=2)
    job.kill("launcher", number)
    assert job.finish() == {"launcher": 128 + number}, job.transcript()
    assert len(launcher.lines_with("servers live: [2.0, 2.0]")) == 2
    assert "interrupted" in launcher.text.splitlines()[-1]


def test_a_second_signal_kills_everything(job, script):
    launcher = job.launch(2, 1, sys.executable, script(ENDLESS), "stays", options=("--grace", "90"))
    job.line("launcher", "trains", count=2)
    job.kill("launcher", signal.SIGINT)
    job.line("launcher", "│ stays", count=2)
    job.kill("launcher", signal.SIGINT)
    assert job.finish(30) == {"launcher": 130}, job.transcript()
    assert "interrupted" in launcher.text.splitlines()[-1]


def test_processes_do_not_outlive_a_killed_launcher(job, script):
    job.launch(2, 1, sys.executable, script(ENDLESS), "ends")
    job.line("launcher", "trains", count=2)
    job.kill("launcher")
    assert job.finish() == {"launcher": -9}  # that all of it is gone is looked at when the test ends


def test_a_worker_that_does_not_come_is_named_and_ends_the_job_after_the_start_timeout():
    program = '[ $KVDIST_RANK = 1 ] && sleep 60; exec "$0" -c "from kvdist import kv; kv.create(\'dist\')"'
    options = ["--start-timeout", "3", "--grace", "1", "--env", "KVDIST_EXPLAIN_AFTER_S=1"]
    words = [*options, "sh", "-c", program, sys.executable]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    command = [sys.executable, "-m", LAUNCH, "-n", "2", "-s", "1", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, 137)
    assert re.search(r"1/1 servers, 1/2 workers; waiting for worker-1", done.stdout + done.stderr), done


def test_options_of_network_and_patience_reach_every_process():
    options = ["--port-range", "20000-20100", "--patience", "60", "--start-timeout", "7", "--security", "none"]
    for process in plan("-n", "1", "-s", "1", *options, "true").values():
        own = process["set"]
        assert (own["KVDIST_PORT_RANGE"], own["KVDIST_SECURITY"]) == ("20000-20100", "none")
        assert (float(own["KVDIST_PATIENCE_S"]), float(own["KVDIST_FORM_TIMEOUT_S"])) == (60, 7)
    found = plan("-n", "1", "-s", "1", "--server-module", "my_rules", "--optimizer-module", "more", "true")
    for name in ("scheduler", "server-0"):
        assert "--server-module my_rules" in found[name]["run"] and "--optimizer-module more" in found[name]["run"]


# Several machines, as far as they can be shown from here.


def test_hosts_are_written_in_many_ways(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# comment\nd1 slots=2\nalice@d2:2222 role=worker  # behind\ngpu[08-10] role=server\n[fd00::17] role=server\n"
    )
    found = plan("-n", "4", "-s", "5", "-H", str(file), "true")
    place = {name: process["on"].split(" in ")[0] for name, process in found.items()}
    assert {place[name] for name in place if name.startswith("worker")} <= {"d1", "d2"}
    assert {"gpu08", "gpu09", "gpu10"} <= {place[name] for name in place if name.startswith("server")}
    assert list(place.values()).count("d1") >= 2
    found = plan("-s", "1", "-H", "a:2,b:1", "true")
    assert [found[f"worker-{rank}"]["on"].split(" in ")[0] for rank in range(3)] == ["a", "a", "b"]
    assert [found[f"worker-{rank}"]["set"]["KVDIST_LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [found[f"worker-{rank}"]["set"]["KVDIST_CROSS_SIZE"] for rank in range(3)] == ["2", "1", "2"]
    assert "3 slots" in refused(LAUNCH, "-n", "4", "-H", "a:2,b:1", "--dry-run", "true")
    out, _ = run(LAUNCH, "--example-hostfile")
    file.write_text(out)
    assert len(plan("-n", "2", "-s", "1", "-H", str(file), "true")) == 4


def test_processes_take_turns_over_the_hosts_servers_first_and_ranks_follow_the_file():
    found = plan("-n", "3", "-s", "2", "-H", "a:3,b:3,c:3", "true")
    place = {name: process["on"].split(" in ")[0] for name, process in found.items()}
    assert [place[name] for name in ("server-0", "server-1")] == ["a", "b"]
    assert [place[f"worker-{rank}"] for rank in range(3)] == ["a", "b", "c"]
    assert place["scheduler"] == "the launching machine"
    found = plan("-n", "1", "-s", "1", "-H", "a:1,b:1", "--scheduler-on", "b", "true")
    assert found["scheduler"]["on"].startswith("b")


def test_other_hosts_get_what_they_need_of_the_environment_and_nothing_that_looks_secret():
    own = {"OMP_PROC_BIND": "true", "NCCL_DEBUG": "INFO", "HOROVOD_X": "1", "MY_OWN": "1", "KVDIST_MY_TOKEN": "t"}
    for name in ("worker-0", "server-0"):
        process = plan("-n", "1", "-s", "1", "-H", "d1:1", "true", LD_LIBRARY_PATH="/lib/own", **own)[name]
        assert process["front"]["PYTHONPATH"] == f"{ROOT}:{ROOT / 'launcher'}"
        assert process["front"]["LD_LIBRARY_PATH"] == "/lib/own" and "PATH" in process["front"]
        assert {"OMP_PROC_BIND", "NCCL_DEBUG", "HOROVOD_X"} <= process["set"].keys()
        assert not {"MY_OWN", "KVDIST_MY_TOKEN"} & process["set"].keys()
        assert process["set"]["KVDIST_SECURITY"] == "curve"
    secret = plan("-n", "1", "-s", "1", "-H", "d1:1", "-x", "KVDIST_MY_TOKEN", "true", **own)["worker-0"]["set"]
    assert secret["KVDIST_MY_TOKEN"] == "'(hidden)'"
    found = plan("-n", "1", "-s", "1", "-H", "d1:1", "--sync-dst-dir", "/srv/job", "true")
    assert found["worker-0"]["on"] == "d1 in /srv/job"


def test_hosts_that_are_this_machine_need_no_ssh(script):
    out, _ = run(LAUNCH, "-n", "2", "-s", "1", "-H", "localhost:2", sys.executable, script(TRAIN))
    assert by_worker(out)[1] == ["worker 1 of 2: [3.0, 3.0]"]


# Without servers.


def test_jobs_without_servers_refuse_what_is_for_servers_and_what_would_have_to_be_encrypted():
    for words, said in (
        (["--server-device", "cpu"], "--server-device"),
        (["--env-server", "A=1"], "--env-server"),
        (["-H", "a:2"], "--security none"),
        (["--security", "curve"], "encrypt"),
        (["--launcher", "mpi"], "mpirun -np 2"),
        (["--launcher", "slurm"], "srun --ntasks=2"),
        (["--emit", "sbatch"], "srun"),
    ):
        assert said in refused(LAUNCH, "-n", "2", "-s", "0", *words, "true"), words
    found = plan("-n", "2", "-s", "0", "-H", "a:1,b:1", "--security", "none", "true")
    assert [found[f"worker-{rank}"]["on"].split(" in ")[0] for rank in range(2)] == ["a", "b"]


def test_kvdist_run_has_horovodruns_words(tmp_path):
    folder = tmp_path / "out"
    command = ["sh", "-c", 'echo "rank $KVDIST_RANK/$DMLC_NUM_WORKER $KVDIST_TIMELINE $A"; echo oops >&2']
    options = ["-H", "localhost:3", "--verbose", "--output-filename", str(folder), "--timeline-filename", "t.json"]
    idle = ["--cycle-time-ms", "3", "--gloo"]
    out, err = run(RUN, "-np", "3", *options, *idle, "-x", "A=b", *command)
    assert by_worker(out) == {rank: [f"rank {rank}/3 t.json b"] for rank in range(3)}
    for rank in range(3):
        assert f"worker-{rank} on localhost: local rank {rank} of 3, cross rank 0 of 1" in err
        assert (folder / f"rank.{rank}" / "stdout").read_text() == f"rank {rank}/3 t.json b\n"
        assert (folder / f"rank.{rank}" / "stderr").read_text() == "oops\n"
    (warning,) = re.findall("^kvdist-run: .*has no effect.*$", err, re.M)
    for name in ("--cycle-time-ms", "--gloo"):
        assert f"{name} has no effect: " in warning
    assert re.search(r"^kvdist-run: 3 workers finished in [\d.]+ s$", err, re.M)


def test_numbers_of_ranks_in_folders_are_as_long_as_the_largest(tmp_path):
    run(RUN, "-np", "11", "--output-filename", str(tmp_path), "true")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank.{rank:02}" for rank in range(11)]


def test_kvdist_run_refuses_what_cannot_be_and_passes_on_the_exit_code():
    for words, said in (
        (["-np", "4", "-H", "a:2,b:1", "true"], "3 slots"),
        (["-np", "1", "--min-np", "1", "true"], "--min-np"),
        (["-np", "1", "--host-discovery-script", "x", "true"], "--host-discovery-script"),
        (["-np", "1", "--config-file", "x", "true"], "--config-file"),
        (["true"], "-np"),
    ):
        _, err = run(RUN, *words, code=2)
        assert said in err.splitlines()[-1]
    run(RUN, "-np", "2", "sh", "-c", "exit $((KVDIST_RANK * 5))", code=5)
    out, _ = run(RUN, "-cb")
    assert "[X] PyTorch" in out and "[X] Gloo" in out and "[ ] MPI" in out
    _, err = run(RUN, "-np", "1", "-H", "d1:1", "true", code=2, KVDIST_SECURITY="curve")
    assert "curve" in err


# Other ways in.


def test_a_job_by_hand_is_blocks_of_shell_that_make_a_cluster(job, script):
    path = script(TRAIN)
    out, _ = run(LAUNCH, "-n", "2", "-s", "1", "--launcher", "none", sys.executable, path, cwd=Path(path).parent)
    blocks = re.findall(r"^# (\S+?), on .*?\n(\(\n.*?^\))", out, re.M | re.S)
    assert [name for name, _ in blocks] == ["scheduler", "server-0", "worker-0", "worker-1"]
    for name, text in blocks:
        job.start(name, ["bash", "-c", text], PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}")
    job.succeed()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].text == f"worker {rank} of 2: [3.0, 3.0]\n"


def test_the_batch_script_of_slurm_has_a_task_for_each_process_and_no_secret_in_it():
    out, _ = run(LAUNCH, "-n", "2", "-s", "3", "--emit", "sbatch", "--env", "A=b c", "python", "train.py", "--lr", ".1")
    assert out.startswith("#!/bin/bash\n") and "#SBATCH --ntasks=6\n" in out
    assert out.count("\nstep ") == 3 and "--distribution=cyclic" in out and "SLURM_PROCID" in out
    assert "port=$((20000 + SLURM_JOB_ID % 10000))" in out and "/dev/urandom" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0


def test_manifests_of_kubernetes_have_the_jobs_the_service_and_the_secret():
    words = ["-n", "4", "-s", "2", "--emit", "kubernetes", "--image", "r/me:1", "--env", "A=b", "python", "train.py"]
    out, _ = run(LAUNCH, *words, MY_OWN="1")
    kinds = {one["kind"]: one for one in json.loads(out)["items"]}
    assert set(kinds) == {"Secret", "Service", "JobSet"} and kinds["Service"]["spec"]["clusterIP"] == "None"
    jobs = {one["name"]: one["template"]["spec"] for one in kinds["JobSet"]["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in jobs.items()} == {"scheduler": 1, "server": 2, "worker": 4}
    (container,) = jobs["worker"]["template"]["spec"]["containers"]
    names = {one["name"]: one.get("value") for one in container["env"]}
    assert container["image"] == "r/me:1" and names["A"] == "b" and "MY_OWN" not in names and "MY_OWN" not in out
    (volume,) = [one["secret"] for one in jobs["worker"]["template"]["spec"]["volumes"] if "secret" in one]
    assert volume["defaultMode"] == 0o400
    assert "--image" in refused(LAUNCH, "-n", "1", "--emit", "kubernetes", "true")


def test_options_are_completed_by_shells():
    if importlib.util.find_spec("shtab") is None:
        pytest.skip("shtab is not installed")
    for shell in ("bash", "zsh"):
        out, _ = run(LAUNCH, "--print-completion", shell)
        assert "--json-summary" in out


def test_this_machine_can_be_looked_at_alone():
    out, err = run(KVDIST, "doctor", "-H", "localhost")
    assert kvdist.__version__ in out + err


# Functions on workers.

CALLS = """
    import os, sys
    import numpy as np
    import kvdist, kvdist_launch

    def train(steps, scale=1):
        from kvdist import kv

        store = kv.create("dist")
        store.init("w", np.zeros(3))
        for _ in range(steps):
            store.push("w", np.full(3, float(scale)))
        print("after", steps, "steps")
        return store.rank, store.pull("w").sum(), os.environ["OWN"]

    print(kvdist_launch.run(train, args=(5,), kwargs={"scale": 2}, np=2, servers=1, env={"OWN": "x"}))
    factor = 3
    of_horovod = {"num_proc": 2, "disable_cache": True, "use_mpi": True}
    print(kvdist_launch.run(lambda: (factor, os.environ["DMLC_NUM_SERVER"]), **of_horovod))

    def wrong():
        if os.environ["KVDIST_RANK"] == "1":
            raise ValueError("the learning rate went overboard")
        import time
        time.sleep(60)

    try:
        kvdist_launch.run(wrong, np=2)
    except kvdist_launch.WorkerFailure as error:
        print("failed:", error.rank, error.exit_code, error.kind, "overboard" in error.traceback)
    import threading
    lock = threading.Lock()
    try:
        kvdist_launch.run(lambda: lock, np=1)
    except Exception as error:
        print("refused:", "lock" in str(error))
    try:
        kvdist_launch.run(lambda: __import__("time").sleep(60), np=1, timeout_s=2)
    except kvdist.DeadlineExceeded:
        print("too late")
"""


def test_functions_run_on_workers_and_their_results_and_errors_come_back(job, script):
    if importlib.util.find_spec("cloudpickle") is None:
        pytest.skip("cloudpickle is not installed")
    process = job.start("notebook", [sys.executable, script(CALLS)], PYTHONPATH=f"{ROOT}:{ROOT / 'launcher'}")
    job.succeed()
    lines = [line for line in process.text.splitlines() if not line.startswith("kvdist")]
    shown = [line for line in lines if " │ " not in line]
    wanted = [(0, 12.0, "x"), (1, 12.0, "x")]
    assert eval(shown[0].replace("np.float64", "float")) == wanted, shown  # noqa: S307 (it is the test's own print)
    assert shown[1] == "[(3, '0'), (3, '0')]"
    assert "failed: 1 1 ValueError True" in shown and "refused: True" in shown and shown[-1] == "too late"
    assert sorted(line for line in lines if "after" in line) == ["w0 │ after 5 steps", "w1 │ after 5 steps"]
