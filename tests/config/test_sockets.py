"""Files of one machine: sockets and their folder, the secret of a job."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from kvdist.config import sockets
from kvdist.config.sockets import (
    SCHEME,
    SECRET_BYTES_MAX,
    further_endpoint,
    is_bound,
    listen_at,
    local_endpoint,
    port_of_local,
    private_folder,
    read_secret,
    remove,
    require_private_folder,
)
from kvdist.errors import ConfigError
from tests.cases import each

LISTEN = """
import sys, time
from kvdist.config import sockets
sockets.private_folder = lambda: sys.argv[1]
listening = sockets.listen_at(sys.argv[2])
print("listens", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = str(tmp_path / "sockets")
    monkeypatch.setattr(sockets, "private_folder", lambda: path)
    return path


def path_of(endpoint):
    return endpoint.removeprefix(SCHEME)


def test_the_folder_is_one_per_user_and_private(folder):
    assert private_folder() == f"/tmp/kvdist-{os.geteuid()}"
    for _ in range(2):
        require_private_folder()
        assert os.stat(folder).st_mode & 0o777 == 0o700


def test_a_folder_that_others_could_reach_is_refused(folder, tmp_path):
    require_private_folder()
    os.chmod(folder, 0o750)
    with pytest.raises(ConfigError, match=r"can be entered by others \(mode 0750, expected 0700\): remove"):
        require_private_folder()
    os.rmdir(folder)
    os.symlink(tmp_path, folder)
    with pytest.raises(ConfigError, match="is not a folder"):
        require_private_folder()
    os.unlink(folder)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be renamed by others"):
        require_private_folder()
    tmp_path.chmod(0o700)
    os.rmdir(folder)
    if os.geteuid() == 0:
        os.mkdir(folder, 0o700)
        os.chown(folder, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to user 12345, and this process runs as user 0"):
            require_private_folder()


@each(
    "fault, cure",
    [
        ("mkdir -m 750 sockets", "rmdir sockets"),
        ("touch sockets", "rm sockets"),
        ("mkdir -m 700 sockets; chmod 777 .", "{said}"),
    ],
)
def test_what_is_advised_of_a_folder_that_others_could_reach_works(folder, fault, cure):
    around = os.path.dirname(folder)
    subprocess.run(["sh", "-c", fault], cwd=around, check=True)
    with pytest.raises(ConfigError, match=rf"{folder}, where the sockets of this machine lie, .*: ") as caught:
        require_private_folder()
    said = str(caught.value).partition(", or let")[0].rpartition(": ")[2]
    assert said == ("remove it" if cure.startswith("rm") else f"chmod +t {around}")
    subprocess.run(["sh", "-c", cure.format(said=said)], cwd=around, check=True)
    require_private_folder()
    subprocess.run(["sh", "-c", "rmdir sockets; chmod 700 ."], cwd=around, check=True)


def test_names_are_short_enough_and_tell_the_port(folder):
    require_private_folder()
    assert port_of_local(local_endpoint(9191)) == 9191
    for other in (further_endpoint(9191), "tcp://127.0.0.1:9191", "ipc:///tmp/job-9191"):
        assert port_of_local(other) is None
    assert len(f"/tmp/kvdist-{2**32 - 2}/{2**32 - 1}-65535-01234567") <= 107


def test_what_listens_is_not_disturbed_and_what_was_killed_is_replaced(folder):
    require_private_folder()
    first, second = (path_of(further_endpoint(1)) for _ in range(2))
    child = subprocess.Popen([sys.executable, "-c", LISTEN, folder, first], stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"listens\n"
        with pytest.raises(OSError) as caught:
            listen_at(first)
        assert caught.value.errno == errno.EADDRINUSE and is_bound(SCHEME + first)
        child.send_signal(signal.SIGKILL)
    assert os.path.exists(first) and not is_bound(SCHEME + first)
    with contextlib.closing(listen_at(second)):
        assert os.listdir(folder) == [os.path.basename(second)], "the next removes what is left of the killed one"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(second)
        remove(second, os.stat(second).st_ino)
    assert os.listdir(folder) == []


def test_a_file_that_somebody_else_has_bound_since_stays(folder):
    require_private_folder()
    path = path_of(local_endpoint(1))
    with contextlib.closing(listen_at(path)):
        remove(path, os.stat(path).st_ino + 1)
        assert os.path.exists(path)


# The secret.


@pytest.fixture
def secret_file(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"\n" + bytes(range(31)))
    file.chmod(0o600)
    return file


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_secret(str(path))
    assert str(path) in str(caught.value) and "KVDIST_SECRET_FILE" in str(caught.value)
    return str(caught.value)


@each("mode", [0o600, 0o400, 0o640, 0o440])
def test_every_byte_of_a_file_that_others_cannot_read_is_the_secret(secret_file, mode):
    secret_file.chmod(mode)
    assert read_secret(str(secret_file)) == b"\n" + bytes(range(31))


@each("mode", [0o604, 0o602, 0o601, 0o644, 0o777])
def test_a_file_that_everybody_may_use_is_refused_with_what_to_do(secret_file, mode):
    secret_file.chmod(mode)
    assert f"(mode {mode:04o}): chmod 600 {secret_file}" in refusal(secret_file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "which cannot be read: No such file or directory" in refusal(tmp_path / "nothing")


def test_a_folder_and_a_pipe_are_refused_without_waiting(tmp_path):
    assert "which is not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "which is not a regular file" in refusal(tmp_path / "pipe")


@each("nbytes, says", [(0, "has 0 bytes"), (31, "has 31 bytes"),
                                              (SECRET_BYTES_MAX + 1, "has more than 65536 bytes")])  # fmt: skip
def test_a_secret_that_is_too_short_or_too_long_is_refused(secret_file, nbytes, says):
    secret_file.write_bytes(bytes(nbytes))
    assert says in refusal(secret_file)
    assert "head -c 32 /dev/urandom" in refusal(secret_file)


def test_no_refusal_shows_a_byte_of_it(secret_file):
    secret_file.write_bytes(b"do not show")
    assert "do not show" not in refusal(secret_file)
