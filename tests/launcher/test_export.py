"""Jobs that something else starts: a person with shells, Open MPI, Slurm. Real ones, where they are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvdist
import kvdist_launch
from kvdist_launch.cli import main
from kvdist_launch.options import FORMATS
from tests.cases import each
from tests.ports import held_port

PACKAGES = [str(Path(package.__file__).parents[1]) for package in (kvdist, kvdist_launch)]
AWKWARD = 'it\'s $(id)\nand "more"'
TRAIN = """
import os
import numpy as np
from kvdist import kv
store = kv.create("dist")
store.init("w", np.zeros(1, np.float32))
value = np.full(1, store.rank + 1, np.float32)
store.pushpull("w", value)
place = "{KVDIST_LOCAL_RANK} of {KVDIST_LOCAL_SIZE} here, {KVDIST_CROSS_RANK} of {KVDIST_CROSS_SIZE} across"
print(f"rank {store.rank} of {store.num_workers}, {place.format(**os.environ)}: {value.tolist()}")
assert os.environ["TEXT"] == "it's $(id)\\nand \\"more\\"", os.environ["TEXT"]
store.close()
"""
FAIL = "import os; exit(3 if os.environ['KVDIST_RANK'] == '1' else 0)"
TIMEOUT_S = 100


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "my train.py"
    path.write_text(TRAIN)
    return str(path)


def launcher(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvdist_launch", *words]


def run(argv: list[str], env: dict[str, str], **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, **settings)  # type: ignore


@each(
    "words, message",
    [
        (["--launcher", "slurm", "-H", "d1"], "--launcher slurm leaves the choice of hosts to others; leave out -H"),
        (["--emit", "sbatch", "-H", "d1"], "--emit sbatch leaves the choice of hosts to others; leave out -H d1"),
        (["--launcher", "mpi", "--image", "me/x"], "--image is for --emit kubernetes; leave it out"),
        (
            ["--launcher", "none", "-H", "no-such-host.invalid"],
            "-H: no-such-host.invalid is not a name or address that",
        ),
        (["--emit", "kubernetes"], "--emit kubernetes needs --image IMAGE"),
        (["--emit", "sbatch", "--image", "me/x"], "--image is for --emit kubernetes; leave it out"),
        (["--emit", "sbatch", "--grace", "3"], "--grace is for processes that kvdist-launch itself starts and"),
        (["--launcher", "mpi", "-H", "me@127.0.0.2"], "mpirun takes no user, port or other option of ssh with a host"),
        (["--emit", "kubernetes", "--image", "x", "-x", "A=\udcff"], "bytes that are not UTF-8"),
    ],
)
def test_what_does_not_fit_together_is_refused(capfd, words, message):
    assert main(["-n", "1", *words, "true"]) == 2
    assert message in capfd.readouterr().err


@each("name", ["slurm", "mpi"])
def test_what_is_not_installed_or_no_allocation_is_told(capfd, monkeypatch, name, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "true").symlink_to("/bin/true")
    assert main(["-n", "1", "--launcher", name, "true"]) == 2
    program = {"slurm": "srun", "mpi": "mpirun"}[name]
    assert f"--launcher {name} needs {program}, which is not in" in capfd.readouterr().err
    (tmp_path / "srun").symlink_to("/bin/true")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["-n", "1", "--launcher", "slurm", "true"]) == 2
    assert "--launcher slurm needs an allocation of Slurm" in capfd.readouterr().err


@each("form", FORMATS)
def test_every_format_is_printed_and_nothing_is_started(capfd, form):
    image = ["--image", "me/train:1"] if form == "kubernetes" else []
    assert main(["-n", "2", "-s", "1", "--emit", form, *image, "python", "train.py"]) == 0
    shown = capfd.readouterr().out
    assert "DMLC_NUM_WORKER" in shown and "train.py" in shown


@each(
    "words, journals",
    [
        (["--dry-run", "-v"], 1),
        (["--emit", "sbatch"], 0),
        (["--emit", "kubernetes", "--image", "x"], 0),
        (["--launcher", "none"], 0),
    ],
)
def test_only_a_launcher_that_starts_schedulers_again_chooses_a_journal(capfd, words, journals):
    """A text is run more than once, also at the same time; and the journal of the first run is not the second's."""
    assert main(["-n", "1", "-s", "1", "--on-loss", "continue", "--restart", "2", *words, "true"]) == 0
    assert capfd.readouterr().out.count("KVDIST_JOURNAL") == journals


@each("how", ["option", "variable"])
def test_manifests_without_encryption_say_so_to_the_processes(capfd, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("KVDIST_SECURITY", "none")
    words = ["--security", "none"] if how == "option" else []
    assert main(["-n", "1", *words, "--emit", "kubernetes", "--image", "me/train:1", "true"]) == 0
    shown = capfd.readouterr().out
    assert shown.count('"name": "KVDIST_SECURITY"') == 3
    assert "secret" not in shown.lower()


def test_a_dry_run_shows_the_script_that_would_run(capfd):
    assert main(["-n", "2", "-s", "1", "--launcher", "mpi", "--dry-run", "true"]) == 0
    assert "mpirun --map-by seq" in capfd.readouterr().out


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("security", ["none", "curve"])
def test_commands_that_are_pasted_into_shells_make_a_cluster(train, env, security, tmp_path):
    words = ("-n", "1", "-s", "1", "--launcher", "none", "--security", security, "--env", f"TEXT={AWKWARD}", "python")
    env["HOME"] = str(tmp_path)
    blocks = run(launcher(*words, train), env, check=True).stdout.split("\n\n")[1:]
    if security == "curve":
        run(["sh", "-c", blocks.pop(0)], env, check=True)
        assert [file.stat().st_mode & 0o777 for file in tmp_path.glob(".kvdist-*.secret")] == [0o600]
    assert [block.split(",")[0] for block in blocks] == ["# scheduler", "# server-0", "# worker-0"]
    # A stale variable of another job, which must not get through.
    env |= {"KVDIST_ROLE": "worker", "KVDIST_ROOT_PORT": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    port = int(re.search(r"DMLC_PS_ROOT_PORT=(\d+)", blocks[0])[1])
    with held_port(port):  # before somebody else is given it
        shells = [subprocess.Popen(["sh", "-s"], env=env, text=True, **pipes) for _ in blocks]
        for shell, block in zip(shells, blocks, strict=True):
            shell.stdin.write(block + "\n")
            shell.stdin.close()
            shell.stdin = None
        shown = [shell.communicate(timeout=TIMEOUT_S)[0] for shell in shells]
    assert [shell.returncode for shell in shells] == [0, 0, 0]
    assert shown == ["", "", "rank 0 of 1, 0 of 1 here, 0 of 1 across: [1.0]\n"]


def test_who_asks_for_encryption_on_one_machine_gets_it(train, env):
    env["TEXT"] = AWKWARD
    show = "print(open(os.environ['KVDIST_SECRET_FILE'], 'rb').read().hex())"
    script = f"import os; exec(open({train!r}).read()); {show}"
    done = run(launcher("-n", "1", "-s", "1", "--security", "curve", "python", "-c", script), env)
    assert done.returncode == 0, done.stderr
    (secret,) = [line for line in done.stdout.splitlines() if len(line.split()[-1]) == 64]
    assert secret


@pytest.mark.machines
def test_mpirun_starts_a_cluster_and_leaves_nothing_in_the_home_folder(train, mpi_env, tmp_path):
    words = ("-n", "2", "-s", "1", "--launcher", "mpi", "--env", f"TEXT={AWKWARD}", "python", train)
    done = run(launcher(*words), mpi_env)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines() if "rank" in line) == [
        "rank 0 of 2, 0 of 2 here, 0 of 1 across: [3.0]", "rank 1 of 2, 1 of 2 here, 0 of 1 across: [3.0]",
    ]  # fmt: skip
    assert list(tmp_path.glob(".kvdist*")) == []


@pytest.mark.machines
def test_the_exit_code_of_a_failing_worker_is_that_of_mpirun(mpi_env, tmp_path):
    done = run(launcher("-n", "2", "-s", "1", "--launcher", "mpi", "python", "-c", FAIL), mpi_env)
    assert done.returncode == 3
    assert list(tmp_path.glob(".kvdist*")) == []


@pytest.mark.machines
def test_slurm_runs_the_batch_script(train, slurm_env, tmp_path):
    words = ("-n", "2", "-s", "2", "--emit", "sbatch", "--env", f"TEXT={AWKWARD}", "python", train)
    script = tmp_path / "job.sh"
    script.write_text(run(launcher(*words), slurm_env, check=True).stdout)
    out = tmp_path / "job.out"
    argv = ["sbatch", "--wait", f"--chdir={tmp_path}", f"--output={out}", str(script)]
    done = run(argv, {**slurm_env, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, out.read_text()
    assert sorted(line for line in out.read_text().splitlines() if "rank" in line) == [
        "0: rank 0 of 2, 0 of 2 here, 0 of 1 across: [3.0]", "1: rank 1 of 2, 1 of 2 here, 0 of 1 across: [3.0]",
    ]  # fmt: skip
    assert list(tmp_path.glob("kvdist.*")) == []


@pytest.mark.machines
def test_slurm_runs_a_job_inside_an_allocation_and_passes_on_how_it_ended(train, slurm_env):
    words = ("-n", "2", "-s", "1", "--launcher", "slurm", "--env", f"TEXT={AWKWARD}")
    done = run(["salloc", "--ntasks=4", *launcher(*words, "python", train)], slurm_env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank") == 2
    done = run(["salloc", "--ntasks=4", *launcher(*words, "python", "-c", FAIL)], slurm_env)
    assert done.returncode == 3, done.stderr
