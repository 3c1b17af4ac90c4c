"""Where /tmp cannot be written, as in a container with a read-only root: what the sentence advises is tried."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.launcher.conftest import PACKAGES
from tests.ports import free_port

TIMEOUT_S = 200
PYTHON = shlex.quote(sys.executable)
NAMESPACE = ["unshare", "-m", "sh", "-c"]
READ_ONLY = "mount -t tmpfs -o ro none /tmp && cd / && "

DONE = "import os; os.write(1, b'done %d\\n' %"  # whole: two processes may have one pipe
STORE = shlex.quote(f"from kvdist import kv; s = kv.create('dist'); {DONE} s.rank); s.close()")
RANK = shlex.quote(f"import kvdist.horovod as hvd; hvd.init(); hvd.barrier(); {DONE} hvd.rank())")
CALL = shlex.quote("import kvdist_launch as k; print(k.run(lambda: print('done', 0), np=1, servers=1))")
BY_HAND = f"""
export KVDIST_RANK=0 DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT={{port}} DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1
DMLC_ROLE=scheduler {PYTHON} -m kvdist & DMLC_ROLE=server {PYTHON} -m kvdist &
DMLC_ROLE=worker {PYTHON} -c {STORE}; wait
"""
OF_OPEN_MPI = f"""
export OMPI_COMM_WORLD_SIZE=2 KVDIST_START_TIMEOUT_S=60
OMPI_COMM_WORLD_RANK=1 {PYTHON} -c {RANK} & OMPI_COMM_WORLD_RANK=0 {PYTHON} -c {RANK}; wait
"""

ENCRYPTED, PLAIN = {"KVDIST_SECURITY": "curve"}, {"KVDIST_SECURITY": "none"}
JOBS = {
    "a launched job": (f"{PYTHON} -m kvdist_launch -n 1 -s 1 {PYTHON} -c {STORE}", [ENCRYPTED, PLAIN], 1),
    "a function": (f"{PYTHON} -c {CALL}", [ENCRYPTED, PLAIN], 1),
    "a job by hand": (BY_HAND, [{**ENCRYPTED, "KVDIST_SECRET_FILE": "{secret}"}, PLAIN], 1),
    "ranks": (f"{PYTHON} -m kvdist_launch.run_cli -np 2 {PYTHON} -c {RANK}", [PLAIN], 2),
    "ranks of Open MPI": (OF_OPEN_MPI, [{**PLAIN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}], 2),
}


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


@pytest.mark.slow_cases("ranks of Open MPI")
@pytest.mark.parametrize("job", JOBS)
def test_what_is_advised_works(job, secret):
    command, remedies, count = JOBS[job]
    tried = subprocess.run([*NAMESPACE, f"{READ_ONLY}! touch /tmp/x"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"A READ-ONLY /tmp IS NOT TESTED: it needs root and a mount namespace: {tried.stderr.strip()}")

    def run(variables: dict[str, str]) -> tuple[str, str]:
        # The secret is read by a descriptor, as its folder is hidden.
        words = {"port": free_port(), "secret": "/proc/$$/fd/9"}
        opened = f"exec 9< {shlex.quote(str(secret))}; {READ_ONLY}"
        given = "".join(f"export {name}={value.format(**words)}; " for name, value in variables.items())
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}
        argv = [*NAMESPACE, f"{opened}{given}{command.format(**words)}"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        return done.stdout, done.stderr

    _, told = run({})
    assert "for the sockets of this machine cannot be made (Read-only file system)" in told
    for remedy in remedies:
        sentence = told[told.index("cannot be made (Read-only") :].partition("\n")[0]
        named = [name if "{" in value else f"{name}={value}" for name, value in remedy.items()]
        assert all(one in sentence for one in named), sentence
        out, err = run(remedy)
        assert out.count("done ") == count, (remedy, out, err)
