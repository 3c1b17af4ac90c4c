"""The command line: whose word is whose, and messages for what cannot be done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvdist_launch.cli import main
from kvdist_launch.hosts import EXAMPLE_HOSTFILE
from kvdist_launch.options import OPTIONS
from kvdist_launch.root_socket import ports_of
from tests.cases import each
from tests.ports import held_port


@each(
    "words, code, message",
    [
        (["-n", "2", "no-such-program-at-all"], 127, "the command 'no-such-program-at-all' does not exist"),
        (["-n", "2", "/"], 126, "/ is a directory, not a command"),
        (["-n", "2"], 2, "the command is missing"),
        (["-n", "0", "true"], 2, "-n is 0; a job needs at least 1 worker"),
        (["-n", "1", "-s", "-1", "true"], 2, "-s is -1; write the number of servers, or 0 for a job without servers"),
        (["-n", "0", "-s", "0", "true"], 2, "-n is 0; a job needs at least 1 worker"),
        (["-n", "2", "-s", "0", "-H", "a:1,b:1", "true"], 2, "the workers send to each other is not encrypted"),
        (["-n", "2", "-s", "0", "-H", "a:2", "--dry-run", "true"], 2, "say so with --security none"),
        (["-n", "2", "-s", "0", "-H", "a:2", "--security", "curve", "true"], 2, "KVDIST_SECURITY=curve asks for encr"),
        (["-n", "2", "-s", "0", "--security", "curve", "true"], 2, "KVDIST_SECURITY=curve asks for encr"),
        (["-n", "1", "--env", "KVDIST_SECURITY=none", "--security", "curve", "true"], 2, "--security curve contradict"),
        (["-n", "1", "--env", "KVDIST_SECURITY=tls", "true"], 2, "KVDIST_SECURITY is 'tls'; it must be one of: none"),
        (["-n", "1", "--env-worker", "KVDIST_SECURITY=none", "true"], 2, "all processes of a job need the same"),
        (["-n", "1", "--env-server", "KVDIST_SECRET_FILE=x", "true"], 2, "all processes of a job need the same"),
        (["-n", "1", "-x", "KVDIST_SECRET_FILE=/no/such", "true"], 2, "'/no/such', which cannot be read: No such file"),
        (["-n", "1", "-x", "KVDIST_SECRET_FILE=/dev/null", "true"], 2, "'/dev/null', which is not a regular file"),
        (
            ["-n", "1", "-x", "KVDIST_SECRET_FILE=/x", "--security", "none", "true"],
            2,
            "encryption is turned off (--security",
        ),
        (["-n", "2", "-s", "0", "-x", "KVDIST_SECRET_FILE=/x", "true"], 2, "KVDIST_SECRET_FILE asks for encryption"),
        (["-n", "1", "-x", "KVDIST_SECRET_FILE=/x", "--emit", "sbatch", "true"], 2, "draws its own secret"),
        (["-n", "1", "-x", "KVDIST_SECRET_FILE=/x", "--launcher", "none", "true"], 2, "draws its own secret"),
        (["-n", "1", "-s", "0", "--server-device", "cpu", "true"], 2, "--server-device is for jobs with servers"),
        (["-n", "1", "-s", "0", "--env-server", "A=1", "true"], 2, "--env-server is for jobs with servers, and -s 0"),
        (["-n", "1", "-s", "0", "-H", "a", "--scheduler-on", "a", "true"], 2, "--scheduler-on is for jobs with serv"),
        (["-n", "2", "-s", "0", "--on-loss", "continue", "true"], 2, "--on-loss is for jobs with servers"),
        (["-n", "2", "-s", "0", "--restart", "3", "true"], 2, "--restart is for jobs with servers"),
        (
            ["-n", "2", "--restart", "3", "true"],
            2,
            "add --on-loss continue or wait, or write --on-worker-exit restart:3",
        ),
        (
            ["-n", "2", "--on-loss", "continue", "--restart", "3", "--on-worker-exit", "restart:2", "true"],
            2,
            "--on-worker-exit restart:2 starts the whole job again after a loss, but with --restart 3 the job goes on",
        ),
        (
            ["-n", "2", "--on-loss", "continue", "--on-worker-exit", "restart:2", "true"],
            2,
            "but with --on-loss continue the job goes on; leave one of them out",
        ),
        (
            ["-n", "2", "--max-workers", "3", "true"],
            2,
            "others can join only where losses do not end the job; add --on",
        ),
        (["-n", "4", "--on-loss", "continue", "--max-workers", "3", "true"], 2, "3 is less than the 4 workers at the"),
        (
            [
                *["-n", "2", "-s", "1", "--on-loss", "continue", "--restart", "1", "--snapshots", "d"],
                "--policy",
                "async",
                "true",
            ],
            2,
            "--snapshots d cannot bring back a store without rounds, which dist_async and the policy async make",
        ),
        (
            ["-n", "2", "--on-loss", "wait", "-x", "KVDIST_SCHEDULER_AWAY_S=5", "true"],
            2,
            "--on-loss wait only waits for lost workers, but KVDIST_SCHEDULER_AWAY_S is 5.0: leave",
        ),
        (["-n", "2", "--replicas", "1", "true"], 2, "--replicas is 1, but without --on-loss the first loss ends"),
        (["-n", "2", "--min-workers", "2", "true"], 2, "--min-workers 2: with fewer a job waits for workers that come"),
        (
            ["-n", "2", "--on-loss", "continue", "--min-workers", "3", "true"],
            2,
            "--min-workers 3: expected 1 to 2, the",
        ),
        (
            ["-n", "2", "--on-loss", "continue", "--min-workers", "0", "true"],
            2,
            "--min-workers 0: expected 1 to 2, the",
        ),
        (["-n", "2", "--on-loss", "continue", "--launcher", "mpi", "true"], 2, "mpirun ends it with the first process"),
        (["-n", "4", "-s", "0", "--launcher", "mpi", "true"], 2, "mpirun -np 4 COMMAND starts it"),
        (["-n", "4", "-s", "0", "--launcher", "slurm", "true"], 2, "srun --ntasks=4 COMMAND starts it"),
        (["-n", "4", "-s", "0", "--emit", "sbatch", "true"], 2, "with the line srun COMMAND"),
        (["-n", "4", "-s", "0", "--emit", "kubernetes", "--image", "x", "true"], 2, "a TrainJob with a torch policy"),
        (["true"], 2, "the number of workers is missing: write -n WORKERS"),
        (["-H", "a:1,b", "true"], 2, "write -n WORKERS, or slots= for every host (b has none)"),
        (["-n", "1", "-H", "no/hosts", "true"], 2, "-H 'no/hosts': there is no such file"),
        (["-n", "1", "-H", "a;id", "true"], 2, "not a valid host name"),
        (["-n", "1", "--launcher", "ssh", "true"], 2, "--launcher ssh needs the names of the machines: write -H HOSTS"),
        (["-n", "1", "-H", "d1", "--launcher", "local", "true"], 2, "on this machine only, and -H names d1"),
        (["-n", "2", "-H", "localhost:1", "true"], 2, "-n asks for 2 workers, but the hosts have 1 slot ("),
        (["-n", "2", "-H", "no-such-host-of-ours:1", "true"], 2, "-n asks for 2 workers, but the hosts have 1 slot ("),
        (["-n", "1", "--log-dir", "/dev/null/logs", "true"], 2, "log files cannot be written to /dev/null/logs"),
        (["-n", "1", "-H", "~no-such-user/x", "true"], 2, "begins with '~no-such-user', but this machine has no home"),
        (["-n", "1", "-x", "NO_SUCH_VARIABLE_HERE", "true"], 2, "this variable is not set"),
        (["-n", "1", "-x", "KVDIST_RANK=1", "true"], 2, "KVDIST_RANK is set by the launcher"),
        (["-n", "1", "--env-file", "/nonexistent", "true"], 2, "--env-file /nonexistent cannot be read"),
        (["-n", "1", "--env", "A", "true"], 2, "'A' does not set a variable"),
        (["-n", "1", "--env", "KVDIST_SLICE_BYTES=x", "true"], 2, "KVDIST_SLICE_BYTES is 'x'"),
        (["-n", "1", "--server-module", "a-b", "true"], 2, "--server-module is 'a-b'; it must be names of modules"),
        (["-n", "1", "--optimizer-module", "a/b.py", "true"], 2, "--optimizer-module is 'a/b.py'; it must be names"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(capfd, words, code, message):
    assert main(words, role_command=["/nonexistent"]) == code
    err = capfd.readouterr().err
    assert err.startswith("kvdist-launch: error: ")
    assert message in err
    assert err.count("\n") == 1


@each(
    "words, message",
    [
        (["-n", "1", "--grace", "-1", "true"], "'-1' is not a number of seconds; write a number of at least 0"),
        (["-n", "two", "true"], "'two' is not a whole number"),
        *(
            (["-n", "1", option, "~no-such-user/x", "true"], "begins with '~no-such-user', but this machine has no")
            for option in ("--log-dir", "--json-summary", "--dump", "--env-file", "--snapshots")
        ),
        (["-n", "1", "--policy", "fast", "true"], "--policy: there is no policy 'fast': write sync, local_sgd:STEPS"),
        (["-n", "1", "--policy", "qouta:8", "true"], "there is no policy 'qouta:8': did you mean quota:SAMPLES["),
        (["-n", "1", "--policy", "backup:1", "true"], "--policy: the policy 'backup' was removed: write quota:SAMPLES"),
        (["-n", "1", "--policy", "quota:0", "true"], "the policy 'quota:0' is not possible: a quota of 0 examples"),
    ],
)
def test_a_value_of_an_option_that_cannot_be_read_is_a_usage_error(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@each(
    "words, near",
    [
        ("--restarts 1", "--restarts; did you mean --restart N?"),
        ("--abort", "--abort; did you mean --on-worker-exit abort|restart:N?"),
        ("--worker 2", "--worker; did you mean -n WORKERS?"),
        ("-np 2", "-np; did you mean -n WORKERS?"),
        ("--num 2", "--num; did you mean --num-workers WORKERS or --num-servers SERVERS?"),
        ("--hostfiel=d", "--hostfiel; did you mean --hostfile HOSTS?"),
        ("--zzz", "--zzz; --help lists all"),
    ],
)
def test_an_option_that_there_is_not_is_refused_in_a_sentence_with_the_nearest_one(capsys, words, near):
    with pytest.raises(SystemExit) as caught:
        main(["-n1", *words.split(), "true"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"kvdist-launch: error: unknown option {near}\n"


def test_schedulers_and_servers_are_told_of_optimizer_modules_and_workers_are_not(capfd):
    words = ["-n", "1", "--optimizer-module", "my_rules,team.rules", "--optimizer-module", "more", "echo", "worker"]
    main(words, role_command=["echo", "role"])
    lines = capfd.readouterr().out.splitlines()
    told = "role --optimizer-module my_rules --optimizer-module team.rules --optimizer-module more"
    assert sorted(line.partition(" │ ")[2] for line in lines) in ([told, told, "worker"], [told, told])


def test_schedulers_and_servers_are_told_of_server_modules_too(capfd):
    words = ["-n", "1", "--optimizer-module", "rules", "--server-module", "a,b.c", "true"]
    main(words, role_command=["echo", "role"])
    lines = capfd.readouterr().out.splitlines()
    assert {line.partition(" │ ")[2] for line in lines} == {
        "role --server-module a --server-module b.c --optimizer-module rules"
    }


@each(
    "words",
    [
        ["--server-device", "cuda:0,cuda:1"],
        ["--env", "KVDIST_SERVER_DEVICE=cuda:0,cuda:1"],
        ["--env-server", "KVDIST_SERVER_DEVICE=cuda:0,cuda:1"],
        ["--server-device", "cpu", "--env-server", "KVDIST_SERVER_DEVICE=cuda:0, CUDA:1"],
    ],
)
def test_servers_are_told_of_their_devices(capfd, words):
    assert main(["-n", "1", "-s", "2", *words, "--dry-run", "-v", "true"]) == 0
    shown = capfd.readouterr().out.split("\n\n")
    servers = [process for process in shown if process.startswith("server-")]
    assert len(servers) == 2
    assert all("  set     KVDIST_SERVER_DEVICE=cuda:0,cuda:1\n" in process for process in servers)


@each("given, told", [("sync", "sync"), ("quota:64", "quota:64"), ("diloco:100", "diloco:100,0.7,0.9")])
def test_workers_are_told_of_their_policy(capfd, given, told):
    assert main(["-n", "2", "--policy", given, "--dry-run", "-v", "true"]) == 0
    workers = [process for process in capfd.readouterr().out.split("\n\n") if process.startswith("worker-")]
    assert len(workers) == 2
    assert all(f"KVDIST_POLICY={told}\n" in process for process in workers)


def test_a_device_that_is_none_ends_the_job_before_anything_starts(capfd):
    assert main(["-n", "1", "--env", "KVDIST_SERVER_DEVICE=gpu", "true"]) == 2
    assert "KVDIST_SERVER_DEVICE is 'gpu'; it must be cpu, cuda:0" in capfd.readouterr().err


def test_a_role_program_that_cannot_be_started_leaves_nothing_behind(capfd):
    assert main(["-n", "1", "sleep", "60"], role_command=["/nonexistent"]) == 127
    assert "scheduler could not be started: /nonexistent: No such file or directory" in capfd.readouterr().err


def test_a_script_that_the_system_cannot_execute_is_named_and_leaves_nothing_behind(capfd, tmp_path):
    script = tmp_path / "train"
    script.write_text("no interpreter is named here\n")
    script.chmod(0o755)
    assert main(["-n", "1", str(script)], role_command=["sleep", "60"]) == 126
    assert f"worker-0 could not be started: {script}: Exec format error" in capfd.readouterr().err


def test_the_help_names_every_supported_option_and_shows_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    names = [name for names, _ in OPTIONS for name in names]
    assert [name for name in names if name not in shown] == []
    assert "examples:" in shown


def test_a_dry_run_shows_what_would_run_where_and_starts_nothing(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("kvdist_launch.cli.usable_cores", lambda: 6)
    words = ["-n", "5", "-s", "1", "-H", "localhost,me@d[1-2]:2", "--dry-run", "--env", "CUDA_VISIBLE_DEVICES=4,5,6"]
    assert main([*words, "no-such-program", "a b"], role_command=["/nonexistent"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.replace("threads each", "threads").replace("this machine", "here").split() for line in lines[:5]] == [
        ["machine", "scheduler", "servers", "workers", "threads", "GPUs"],
        ["─" * len(lines[1].strip())],
        ["here", "yes", "server-0", "worker-0", "6", "4,5,6"],
        ["d1", "worker-1..2", "4", "|", "5,6"],
        ["d2", "worker-3..4", "4", "|", "5,6"],
    ]
    assert "workers run: no-such-program 'a b'" in lines and f"in folder:   {os.getcwd()}" in lines
    assert max(map(len, lines)) <= 80 or len(os.getcwd()) > 60


def test_a_dry_run_shows_every_command_where_it_is_asked_for(capfd, monkeypatch):
    monkeypatch.setenv("MXNET_TOKEN", "geheim")
    words = ["-n", "3", "-s", "1", "-H", "localhost,me@d[1-2]:2", "--dry-run", "-v", "-x", "MY_KEY=geheim"]
    assert main([*words, "no-such-program", "a b"], role_command=["/nonexistent"]) == 0
    shown = capfd.readouterr().out
    heads = [line for line in shown.splitlines() if " on " in line and not line.startswith(" ")]
    assert [head.partition(" in ")[0] for head in heads] == [
        "scheduler on the launching machine", "server-0 on localhost", "worker-0 on localhost", "worker-1 on d1",
        "worker-2 on d2",
    ]  # fmt: skip
    assert shown.count("  run     no-such-program 'a b'\n") == 3
    assert shown.count("DMLC_PS_ROOT_PORT=(a free port, chosen at the start)\n") == 5
    assert "geheim" not in shown and "MY_KEY='(hidden)'" in shown
    assert "not forwarded, as their names look secret (-x NAME forwards one): MXNET_TOKEN\n" in shown
    assert main([*words, "-x", "MXNET_TOKEN", "true"], role_command=["/nonexistent"]) == 0
    assert "not forwarded" not in capfd.readouterr().out


def test_a_dry_run_refuses_a_script_that_is_missing_on_this_machine_as_a_launch_does(capfd):
    for hosts in ((), ("-H", "localhost,d1")):
        assert main(["-n", "2", "-s", "1", *hosts, "--dry-run", "python", "no_such_script.py"]) == 127
        assert "there is no script no_such_script.py in " in capfd.readouterr().err


def test_a_mistyped_variable_is_told_once(capfd, monkeypatch):
    monkeypatch.setenv("KVDIST_ONLOSS", "continue")
    assert main(["-n", "1", "-s", "1", "--env", "KVDIST_PATIENCE=3", "--dry-run", "true"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "is no setting" in line]
    assert lines == [
        "kvdist-launch: KVDIST_ONLOSS is no setting; did you mean KVDIST_ON_LOSS?",
        "kvdist-launch: KVDIST_PATIENCE is no setting; did you mean KVDIST_PATIENCE_S?",
    ]


def test_a_mistyped_program_has_a_hint(capfd):
    assert main(["-n", "1", "pyhton", "train.py"]) == 127
    assert "it is not in any directory of PATH; did you mean python" in capfd.readouterr().err


def test_hosts_that_are_this_machine_need_no_ssh(launch, tmp_path):
    hosts = tmp_path / "my hosts"
    hosts.write_text("localhost slots=2 gpus=4,5\n")
    script = "import os; print(os.environ['KVDIST_LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    code, out, err = launch("-H", str(hosts), "-s", "1", "--launcher", "ssh", "python", "-c", script).finish()
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("w")) == [
        "w0 │ 0 4", "w1 │ 1 5",
    ]  # fmt: skip


def test_variables_of_files_exports_and_options_reach_the_worker_later_ones_winning(launch, tmp_path):
    path = tmp_path / "my.env"
    path.write_text("A=file\nB=file\nC=file\nD='$(id)'\n")
    script = "import os; print(*(os.environ[name] for name in 'ABCDE'))"
    words = ("--env-file", str(path), "-x", "B=export", "-x", "C=export", "--env", "C=env", "-x", "E")
    job = launch("-n", "1", "-s", "1", *words, "python", "-c", script, env={"E": "here"})
    assert "w0 │ file export env $(id) here" in job.finish()[1]


def test_the_example_hostfile_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--example-hostfile"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == EXAMPLE_HOSTFILE


@each("shell", ["bash", "zsh"])
def test_a_shell_can_be_taught_the_options(capsys, shell):
    pytest.importorskip("shtab", reason="SHELL COMPLETION IS NOT TESTED: pip install shtab")
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    assert "--sync-dst-dir" in script and "kubernetes" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_version_is_printed_without_a_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kvdist-launch ")


def test_a_system_without_affinities_counts_all_cores(monkeypatch, capfd):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["-n", "1", "-s", "1", "--dry-run", "-v", "true"]) == 0
    assert f"OMP_NUM_THREADS={os.cpu_count()}" in capfd.readouterr().out


def test_the_threads_given_to_each_worker_are_said_unless_the_user_chose_them(launch, monkeypatch):
    words = ("-n", "1", "-s", "1", "true")
    assert "kvdist-launch: OMP_NUM_THREADS=" not in launch("--env", "OMP_NUM_THREADS=1", *words).finish()[2]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "kvdist-launch: OMP_NUM_THREADS=" in launch("--env", "A=1", *words).finish()[2]


def test_the_launcher_loads_no_heavy_library():
    script = (
        "import sys, kvdist_launch.cli\n"
        "heavy = {'numpy', 'torch', 'zmq', 'msgpack', 'numba', 'rich', 'asyncio', 'importlib.metadata', 'shtab',"
        " 'json', 'kvdist_launch.multi_host'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_only_the_processes_that_match_are_shown_and_all_are_logged(launch, tmp_path):
    words = ("--filter", "worker-1,s[0-3]", "--log-dir", str(tmp_path / "logs"), "python", "-c", "print('hello')")
    _, out, _ = launch("-n", "2", "-s", "1", *words).finish()
    assert {line.partition(" │ ")[0] for line in out.splitlines()} == {"s0", "w1"}
    files = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(files) == ["scheduler.log", "server-0.log", "worker-0.log", "worker-1.log"]
    assert files["worker-0.log"] == files["worker-1.log"] == "hello\n"


def test_a_filter_that_matches_nobody_is_told(launch):
    _, out, err = launch("-n", "1", "-s", "1", "--filter", "w3", "true").finish()
    assert "kvdist-launch: --filter w3 matches no process of this job" in err
    assert out == ""


def test_every_line_begins_with_the_time_where_it_is_asked_for(launch):
    _, out, err = launch("-n", "1", "-s", "1", "--timestamps", "python", "-c", "print('hello')").finish()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} "
    assert all(re.match(time, line) for line in (out + err).splitlines())
    assert re.search(f"^{time}w0 │ hello$", out, re.MULTILINE)


def test_a_failure_is_concluded_with_its_last_lines_and_how_the_others_ended(launch, tmp_path):
    script = (
        "import os, sys, time\n"
        "if os.environ['KVDIST_RANK'] == '0':\n"
        "    while True: print('on', file=sys.stderr, flush=True); time.sleep(0.05)\n"
        "os.open(os.environ['READY_FIFO'], os.O_RDONLY)\n"  # the server is there
        "for number in range(12): print('step', number, flush=True)\n"
        "raise ValueError('mine')"
    )
    summary = tmp_path / "summary.json"
    os.mkfifo(tmp_path / "ready")
    words = ("--grace", "4", "--env", f"READY_FIFO={tmp_path / 'ready'}", "--json-summary", str(summary))
    words = (*words, "python", "-c", script)
    code, _, err = launch("-n", "2", "-s", "1", *words).finish()
    *_, others, sentence = lines = err.splitlines()
    begin = lines.index("kvdist-launch: the last lines of worker-1:")
    last = lines[begin + 1 : -2]
    assert len(last) == 10 and last[-1] == "    ValueError: mine" and any("    step " in line for line in last)
    assert others == "kvdist-launch: 1 worker was ended by the launcher"
    assert "failed with exit code 1 after" in sentence
    found = json.loads(summary.read_text())
    assert (code, found["exit_code"], found["outcome"]) == (1, 1, "failed")
    assert found["first_failure"]["node"] == "worker-1"
    assert found["first_failure"]["last_lines"] == [line.removeprefix("    ") for line in last]
    assert {one["node"]: one.get("signal", one.get("exit_code")) for one in found["processes"]} == {
        "scheduler": 75, "server-0": 75, "worker-0": 15, "worker-1": 1,
    }  # fmt: skip
    assert f"kvdist-launch: {found['sentence']}" == sentence


@pytest.mark.parametrize(("words", "code", "outcome"), [(["true"], 0, "finished"), (["absent"], 127, "not started")])
def test_a_summary_is_written_of_every_job_that_was_asked_for(launch, tmp_path, words, code, outcome):
    path = tmp_path / "summary.json"
    assert launch("-n", "1", "-s", "1", "--json-summary", str(path), *words).finish()[0] == code
    found = json.loads(path.read_text())
    assert (found["exit_code"], found["outcome"], found["first_failure"]) == (code, outcome, None)
    assert found["sentence"]


def test_a_summary_that_cannot_be_written_changes_nothing_else(launch):
    code, _, err = launch("-n", "1", "-s", "1", "--json-summary", "/nonexistent/summary.json", "true").finish()
    assert code == 0
    assert err.splitlines()[-1] == (
        "kvdist-launch: --json-summary /nonexistent/summary.json cannot be written: No such file or directory"
    )


def test_a_job_that_was_started_again_has_one_log_and_one_summary(launch, tmp_path):
    script = "import os; n = os.environ.get('KVDIST_RESTARTS', '0'); print('start', n); exit(0 if n == '2' else 5)"
    words = ("--on-worker-exit", "restart:2", "--log-dir", str(tmp_path), "--json-summary", str(tmp_path / "summary"))
    code, _, err = launch("-n", "1", "-s", "1", "--grace", "0.2", *words, "python", "-c", script).finish()
    assert code == 0, err
    assert (tmp_path / "worker-0.log").read_text() == "start 0\nstart 1\nstart 2\n"
    assert not (tmp_path / "worker-0.log.1").exists()
    found = json.loads((tmp_path / "summary").read_text())
    assert (found["outcome"], found["first_failure"]) == ("finished", None)
    assert [one["exit_code"] for one in found["processes"] if one["node"] == "worker-0"] == [5, 5, 0]


def test_the_scheduler_s_host_is_found_in_whatever_case_it_is_written(monkeypatch):
    jobs = []
    monkeypatch.setattr("kvdist_launch.multi_host.run_on_hosts", lambda _, job, *__: jobs.append(job) or 0)
    assert main(["-n", "1", "-s", "1", "-H", "d1,GPUBox", "--scheduler-on", "gpubox", "true"]) == 0
    assert jobs[0].scheduler_host == 1


@pytest.mark.parametrize("way", ["option", "variable", "env"])
def test_the_scheduler_of_one_machine_keeps_to_the_range_of_ports(launch, way):
    script = "import os; print('port', os.environ['DMLC_PS_ROOT_PORT'])"
    with held_port() as port:
        text = f"{port}-{port}"
        words = {"option": ("--port-range", text), "variable": (), "env": ("--env", f"KVDIST_PORT_RANGE={text}")}[way]
        env = {"KVDIST_PORT_RANGE": text} if way == "variable" else None
        code, out, err = launch("-n", "1", "-s", "1", *words, "python", "-c", script, env=env).finish()
    assert code == 0, err
    assert f"w0 │ port {port}\n" in out


@each("variable, interface", [("KVDIST_INTERFACE", "eth7"), ("DMLC_INTERFACE", "10.1.0.0/16")])
def test_the_scheduler_of_several_machines_follows_the_variables_that_servers_follow(monkeypatch, variable, interface):
    wishes = []

    def noted(_, __, variables, *___):
        wishes.append((variables["KVDIST_INTERFACE"], ports_of(variables)))
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr("kvdist_launch.multi_host.HostPool", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("kvdist_launch.multi_host._HostJob", noted)
    monkeypatch.setenv(variable, interface)
    monkeypatch.setenv("KVDIST_PORT_RANGE", "20000-20002")
    assert main(["-n", "1", "-s", "1", "-H", "d1", "true"]) == 0
    assert main(["-n", "1", "-s", "1", "-H", "d1", "--interface", "eth0", "--port-range", "7-7", "true"]) == 0
    assert wishes == [(interface, (20000, 20001, 20002)), ("eth0", (7,))]
