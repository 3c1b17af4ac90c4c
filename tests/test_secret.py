"""The file with the secret of a job: what is taken, and a sentence for each file that is not."""

from __future__ import annotations

import os

import pytest

from kvdist.config.secret import SECRET_BYTES_MAX, read_secret
from kvdist.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"\n" + bytes(range(31)))
    file.chmod(0o600)
    return file


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_secret(str(path))
    assert str(path) in str(caught.value) and "KVDIST_SECRET_FILE" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_every_byte_of_a_file_that_others_cannot_read_is_the_secret(path, mode):
    path.chmod(mode)
    assert read_secret(str(path)) == b"\n" + bytes(range(31))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o777])
def test_a_file_that_everybody_may_use_is_refused_with_what_to_do(path, mode):
    path.chmod(mode)
    assert f"(mode {mode:04o}): chmod 600 {path}" in refusal(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "which cannot be read: No such file or directory" in refusal(tmp_path / "nothing")


def test_a_folder_and_a_pipe_are_refused_without_waiting(tmp_path):
    assert "which is no file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "which is no file" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize(("nbytes", "says"), [(0, "has 0 bytes"), (31, "has 31 bytes"),
                                              (SECRET_BYTES_MAX + 1, "has more than 65536 bytes")])  # fmt: skip
def test_a_secret_that_is_too_short_or_too_long_is_refused(path, nbytes, says):
    path.write_bytes(bytes(nbytes))
    assert says in refusal(path)
    assert "head -c 32 /dev/urandom" in refusal(path)


def test_no_refusal_shows_a_byte_of_it(path):
    path.write_bytes(b"do not show")
    assert "do not show" not in refusal(path)
