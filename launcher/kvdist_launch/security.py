"""Whether a job encrypts its traffic, and the secret that its processes share.

`security_of` decides for the whole job, by the option and the variables: a request that cannot be met is an error,
never a weaker default. The secret is never in an argument, a variable or a log. Agents read it on their standard
input; processes read it through ``KVDIST_SECRET_FILE``, which names a file in memory that lives only as long as the
launcher or agent that started them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdist.config.settings import SETTINGS
from kvdist.config.sockets import read_secret
from kvdist.errors import ConfigError

SECRET_BYTES = 32
VARIABLE = "KVDIST_SECRET_FILE"
SECURITY = "KVDIST_SECURITY"
TRANSPORT = "KVDIST_TRANSPORT"
CURVE, NONE = "curve", "none"
NOT_ENCRYPTED = (
    "WARNING: WHAT THE PROCESSES SEND TO EACH OTHER IS NOT ENCRYPTED, and leaves this machine: use it in a network that"
    " you trust"
)
PLAIN_HERE = "every user of this machine can reach the sockets of this job, which are plain TCP (KVDIST_SECURITY=none)"


@dataclass(frozen=True)
class Security:
    """Whether a job encrypts its traffic.

    Attributes:
        word: ``KVDIST_SECURITY`` for all processes: `CURVE`, `NONE`, or '' for sockets of one machine that only its
            user can reach.
        secret: the content of the user's file; None without such a file.
    """

    word: str = ""
    secret: bytes | None = field(default=None, repr=False)

    @property
    def encrypts(self) -> bool:
        """Whether the job needs a secret."""
        return self.word == CURVE

    def secret_of_run(self) -> bytes | None:
        """The secret for a run of the job: that of the user, or a new random secret; None if nothing is encrypted."""
        return (self.secret or os.urandom(SECRET_BYTES)) if self.encrypts else None


def security_of(
    option: str | None,
    env: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    leaves_machine: bool,
    has_servers: bool,
    makes_secret: str = "",
    allows_plaintext: bool = False,
) -> Security:
    """Decide whether a job encrypts its traffic.

    Args:
        option: the value of ``--security``.
        env: the variables that the user sets for the job.
        environ: environment of the launcher.
        leaves_machine: whether the job has processes on several machines.
        has_servers: whether it has servers.
        makes_secret: the target, such as ``--emit kubernetes``, if it draws a secret itself and cannot use another.
        allows_plaintext: whether workers on several machines need no ``--security none`` to send without encryption.

    Raises:
        ConfigError: the requests contradict each other or cannot be met, or the secret cannot be used.
    """
    variables = {**environ, **env}
    word, path = SETTINGS[SECURITY].read(variables) or "", variables.get(VARIABLE) or ""
    if option is not None:
        if env.get(SECURITY) and word != option:
            raise ConfigError(f"--security {option} contradicts --env {SECURITY}={word}; leave one of them out")
        word = option
    if path and word == NONE:
        raise ConfigError(
            f"{VARIABLE} is {path!r}, but encryption is turned off (--security none or {SECURITY}=none): unset one of"
            " them"
        )
    if not has_servers and (path or word == CURVE):
        raise ConfigError(
            f"{VARIABLE if path else f'{SECURITY}={CURVE}'} asks for encryption, and what the workers of a job without"
            " servers send to each other is not encrypted, as torch.distributed cannot do that: unset it, or have"
            " servers (kvdist-launch -s 1, servers=1 of kvdist_launch.run)"
        )
    if path and makes_secret:
        raise ConfigError(f"{makes_secret} draws its own secret, and cannot use {VARIABLE} ({path!r}): unset it")
    if path:
        return Security(CURVE, read_secret(path))
    if not word and has_servers and (leaves_machine or variables.get(TRANSPORT, "").lower() == "tcp"):
        return Security(CURVE)
    if word or not leaves_machine:
        return Security(word)
    if not allows_plaintext:
        raise ConfigError(
            "-s 0 over several machines: what the workers send to each other is not encrypted, as torch.distributed"
            " cannot do that. If the network between them is trusted, say so with --security none; a job with servers"
            " encrypts everything"
        )
    return Security(NONE)


class SecretFile:
    """A file in memory with the secret, which processes of the same user open by its path.

    It has no name in any folder. It vanishes when this process closes it or ends, even by SIGKILL.

    Args:
        secret: content of the file.
    """

    def __init__(self, secret: bytes) -> None:
        if sys.platform != "linux":
            import tempfile  # here, as few need it and every job would wait for it

            self._file = tempfile.NamedTemporaryFile(prefix="kvdist-secret-")  # noqa: SIM115  # closed by `remove`
            self.path = self._file.name
        else:
            self._file = open(os.memfd_create("kvdist-secret"), "wb")  # noqa: SIM115  # closed by `remove`
            os.fchmod(self._file.fileno(), 0o600)
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._file.write(secret)
        self._file.flush()

    def remove(self) -> None:
        """Close the file at the end of the job."""
        self._file.close()
