"""Jobs that another system starts: prints its script, or replaces this process by the script.

A shell takes this process's place and reads the script on standard input, so output, signals and exit code are those of
Slurm or Open MPI themselves.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvdist.config.addresses import local_address_towards
from kvdist.errors import ConfigError
from kvdist_launch.emit.kubernetes import kubernetes
from kvdist_launch.emit.roles import roles_of
from kvdist_launch.emit.shell import manual, mpi
from kvdist_launch.emit.slurm import sbatch
from kvdist_launch.hosts import Host
from kvdist_launch.options import target_of
from kvdist_launch.plan import HostFacts, JobSpec, Process

UNDERSTOOD = frozenset(
    [
        "--num-workers", "--num-servers", "--server-module", "--optimizer-module", "--server-device", "--hostfile",
        "-x", "--env", "--env-server", "--env-worker", "--env-file", "--security", "--emit", "--launcher", "--image",
        "--dry-run", "--verbose",
    ]
)  # fmt: skip
"""The options that have an effect on processes that another system starts."""

SSH_PORT = 22
CONTAINER_PORT = 9191
"""Free, as nothing else listens in the container."""


def address_towards(host: Host) -> str:
    """The address under which `host` reaches this machine, by the route; a scheduler cannot bind a name.

    Raises:
        ConfigError: there is no route, or the name is only an alias of ssh.
    """
    try:
        return local_address_towards(host.name, host.port or SSH_PORT)
    except ConfigError as error:
        raise ConfigError(
            f"-H: {host} is not a name or address that this machine can reach (an alias of ssh is neither); write the"
            " address of the host"
        ) from error


def script_of(
    options: argparse.Namespace,
    job: JobSpec,
    hosts: Sequence[Host],
    processes: Sequence[Process],
    launcher: HostFacts,
) -> str:
    """The script that starts the job.

    Raises:
        ConfigError: the options do not fit each other, or something is missing.
    """
    word = f"KVDIST_{job.name}"
    is_secret = job.security.encrypts
    if options.emit is None and options.launcher == "none":
        return manual(processes, hosts, os.getcwd(), f".kvdist-{job.name}.secret" if is_secret else None)
    if options.emit is None and options.launcher == "mpi":
        reached = [str(host) for host in hosts if host.user is not None or host.port is not None]
        if reached:
            raise ConfigError(
                f"mpirun takes no ssh user or port with a host, and {reached[0]} has one; leave it out, and write it"
                " into ~/.ssh/config"
            )
        return mpi(processes, hosts, socket.gethostname(), word, is_secret)
    if options.emit in (None, "sbatch"):
        return sbatch(roles_of(job, launcher, launcher.python), word, is_secret)
    # This machine's variables are wrong in a container; only what the user asks for goes there.
    roles = roles_of(job, replace(launcher, environ={}), "python")
    secret = base64.b64encode(os.urandom(32)).decode() if is_secret else None
    return kubernetes(roles, f"kvdist-{job.name[:8]}", options.image, CONTAINER_PORT, secret)


def require_understood(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Refuse options that would be ignored, and see that none is missing.

    Raises:
        ConfigError: an option does not fit.
    """
    ignored = [name for name in given if " " not in name and name not in UNDERSTOOD]
    if ignored:
        raise ConfigError(
            f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} for processes that kvdist-launch itself"
            f" starts and watches, and with {target_of(options)} it does not; leave {' and '.join(ignored)} out"
        )
    if options.emit is not None or options.launcher == "slurm":
        _require_no_hosts(options)
    elif options.image is not None:
        raise ConfigError(_IMAGE_IS_FOR)


_IMAGE_IS_FOR = "--image is for --emit kubernetes; leave it out"


def run_script(launcher: str, text: str, environ: Mapping[str, str]) -> None:
    """Replace this process by a shell that runs the script.

    Raises:
        ConfigError: what the script needs is not here.
    """
    program = {"slurm": "srun", "mpi": "mpirun"}[launcher]
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError(f"--launcher {launcher} needs {program}, which is not in any directory of PATH; install it")
    if launcher == "slurm" and "SLURM_JOB_ID" not in environ:
        raise ConfigError(
            "--launcher slurm needs an allocation of Slurm, and this process has none; get one with salloc, or write a"
            " batch script with --emit sbatch"
        )
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogateescape"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.execvpe("bash", ["bash", "-s"], dict(environ))


def _require_no_hosts(options: argparse.Namespace) -> None:
    target = target_of(options)
    if options.hostfile is not None:
        raise ConfigError(f"{target} leaves the choice of hosts to others; leave out -H {options.hostfile}")
    if options.emit == "kubernetes" and options.image is None:
        raise ConfigError(f"{target} needs --image IMAGE, a container image with kvdist and your program")
    if options.image is not None and options.emit != "kubernetes":
        raise ConfigError(_IMAGE_IS_FOR)
