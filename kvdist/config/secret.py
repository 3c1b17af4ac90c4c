"""The secret of a job, out of the file that its processes are told of."""

from __future__ import annotations

import os
import stat

from kvdist.errors import ConfigError

SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 64 << 10
OTHERS = 0o007
"""What nobody but the owner and the group may: Kubernetes lets a group read what it mounts."""


def read_secret(path: str) -> bytes:
    """Every byte of the file: a line end counts, so copies must be exact.

    Raises:
        ConfigError: it is not there, or is no file, or is not secret, or is too short or too long.
    """
    name = f"KVDIST_SECRET_FILE is {path!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{name}, which cannot be read: {error.strerror}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{name}, which is no file")
        if mode & OTHERS:
            mode = stat.S_IMODE(mode)
            raise ConfigError(f"{name}, and every user of this machine may use it (mode {mode:04o}): chmod 600 {path}")
        secret = os.read(descriptor, SECRET_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        length = f"{len(secret)} bytes" if len(secret) <= SECRET_BYTES_MAX else f"more than {SECRET_BYTES_MAX} bytes"
        raise ConfigError(
            f"{name}, which has {length}; a secret has at least {SECRET_BYTES_MIN}, made at random, as by"
            f" head -c {SECRET_BYTES_MIN} /dev/urandom"
        )
    return secret
