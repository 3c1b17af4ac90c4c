"""Files of the current folder, named like modules of others, replace nothing in kvdist's own processes.

The user's own programs keep Python's order: what lies beside a script comes first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdist.config.processes import LEAVE_FOLDER, module_words
from kvdist_launch.emit import WAIT_FOR_NAME
from kvdist_launch.ssh import far_command

LIBRARIES = ("zmq", "numpy", "msgpack", "rich", "torch", "kvdist", "kvdist_launch")
TIMEOUT_S = 200

STORE = "from kvdist import kv\ns = kv.create('dist')\nprint('worker', s.rank, 'done')\ns.close()\n"
LAUNCH = "from kvdist_launch.cli import main\nraise SystemExit(main())\n"
RUN = "from kvdist_launch.run_cli import main\nraise SystemExit(main())\n"
KVDIST = "from kvdist.__main__ import main\nraise SystemExit(main())\n"
CALL = """
import kvdist_launch

def fn():
    from kvdist import kv
    store = kv.create('dist')
    import helper
    store.close()
    return helper.VALUE

print(kvdist_launch.run(fn, np=1, servers=1))
"""
BLOCKS = """
import subprocess, sys
text = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout
blocks = [subprocess.Popen(["bash", "-c", one]) for one in text.split("\\n\\n")[1:]]
raise SystemExit(max(one.wait() for one in blocks))
"""


@pytest.fixture
def shadowed(tmp_path: Path, env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a folder with a file of the name of each module; its scripts lie in one beside."""
    folder, scripts = tmp_path / "current", tmp_path / "scripts"
    folder.mkdir()
    scripts.mkdir()
    for name in {*sys.stdlib_module_names, *LIBRARIES}:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder')\n")
    (scripts / "helper.py").write_text("VALUE = 'helped'\n")
    programs = {"train": STORE, "launch": LAUNCH, "run": RUN, "kvdist": KVDIST, "call": CALL, "blocks": BLOCKS}
    for name, text in programs.items():
        (scripts / f"{name}_script.py").write_text(text)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [word.replace("SCRIPTS", str(scripts)) for word in words]
        return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)

    return run


PYTHON = sys.executable
JOB = ("-n", "1", "-s", "1")
TRAIN = (PYTHON, "SCRIPTS/train_script.py")
STARTS = {
    "the launcher": ([PYTHON, "SCRIPTS/launch_script.py", *JOB, *TRAIN], "worker 0 done"),
    "blocks by hand": (
        [PYTHON, "SCRIPTS/blocks_script.py", PYTHON, "SCRIPTS/launch_script.py", *JOB, "--launcher", "none", *TRAIN],
        "worker 0 done",
    ),
    "an agent": (["sh", "-c", f"{far_command(PYTHON, '')} </dev/null"], "kvdist-agent"),
    "a function": ([PYTHON, "SCRIPTS/call_script.py"], "['helped']"),
    "the doctor": ([PYTHON, "SCRIPTS/kvdist_script.py", "doctor", "-H", "localhost"], "this machine"),
    "the doctor's estimate": (
        [PYTHON, "SCRIPTS/kvdist_script.py", "doctor", "-H", "localhost", "--parameters", "1e6", "--step", "0.1"],
        "take this machine alone",
    ),
    "the wait for a name": ([PYTHON, "-c", WAIT_FOR_NAME, "localhost"], ""),
    "the look for backends": ([PYTHON, "SCRIPTS/run_script.py", "--check-build"], "[X] Gloo"),
}


@pytest.mark.parametrize("name", STARTS)
def test_nothing_of_the_current_folder_replaces_a_module_of_kvdists_processes(shadowed, name):
    argv, said = STARTS[name]
    done = shadowed(*argv)
    assert "of the current folder" not in done.stdout + done.stderr
    assert said in done.stdout, done.stderr


def test_the_folder_would_replace_modules_of_a_module_that_python_itself_runs(shadowed):
    done = shadowed(PYTHON, "-m", "kvdist", "--version")
    assert done.returncode == 1 and "of the current folder" in done.stderr


def test_a_server_module_in_the_current_folder_is_found(tmp_path, env):
    (tmp_path / "my_rules.py").write_text("print('my rules are here')\n")
    words = [*module_words("kvdist"), "--server-module", "my_rules"]
    done = subprocess.run([PYTHON, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "my rules are here" in done.stdout, done.stderr


def test_a_script_finds_what_lies_beside_it_first(tmp_path, env):
    (tmp_path / "token.py").write_text("VALUE = 'mine'\n")
    (tmp_path / "train_script.py").write_text("import token; print('token is', token.VALUE)\n")
    argv = [PYTHON, "-c", f"{LEAVE_FOLDER}\n{LAUNCH}", "-n", "1", "-s", "0", PYTHON, "train_script.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "token is mine" in done.stdout, done.stderr


def test_words_of_a_start_pass_through_any_shell():
    assert not set("".join(module_words("kvdist_launch.agent"))) & set("\n!$`\\'%")
