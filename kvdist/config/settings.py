"""The cluster as its environment describes it, and every default and limit in one place.

This module alone reads the environment, so what a process was told can be found by reading one file. MXNet's
variables (``DMLC_*``) are honoured as they are; each has a ``KVDIST_*`` twin that wins over it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdist.config.addresses import address_of_interface, is_loopback, tcp_endpoint
from kvdist.config.collective_settings import CollectiveSettings, settings_of
from kvdist.config.environment import World, world_of
from kvdist.config.limits import Limits as Limits
from kvdist.config.limits import changed_limits, checked_limits
from kvdist.config.local_sockets import local_endpoint
from kvdist.config.variables import CLUSTER_VARIABLES as CLUSTER_VARIABLES
from kvdist.config.variables import FOREIGN_LAUNCHERS as FOREIGN_LAUNCHERS
from kvdist.config.variables import (
    SLICE_THRESHOLD,
    both,
    check_security,
    device_names,
    integer,
    one_of,
    port_range,
    refuse_foreign_launcher,
    refuse_replaced,
    security_settings,
    with_twins,
)
from kvdist.config.variables import TWINS as TWINS
from kvdist.config.variables import WITHOUT_EFFECT as WITHOUT_EFFECT
from kvdist.errors import ConfigError
from kvdist.nodes import Role

IO_THREADS_MAX = 64


@dataclass(frozen=True)
class ClusterConfig:
    """Who this process is, where the scheduler is, and how large the cluster is.

    Raises (on construction):
        ConfigError: a value is out of range; the message names the variable that sets it.
    """

    role: Role
    root_host: str
    root_port: int
    num_workers: int
    num_servers: int
    rank: int | None = None
    """The rank this process asks for (``KVDIST_RANK``); None lets the scheduler choose the next free one."""
    node_host: str | None = None
    """The address a server binds and announces; None means the one this host uses towards the scheduler."""
    job: str = "default"
    """Messages of another job are refused, so two jobs cannot mix by a mistaken port."""
    security: str | None = None
    """``none`` allows plain TCP, also beyond this host; ``curve``, or a `secret_file`, encrypts all traffic."""
    secret_file: str | None = None
    """Where the secret of the job lies, the same bytes for all its processes."""
    bigarray_bound: int = 1_000_000
    """Keys with at least this many elements are cut over all servers."""
    placement: str = "bytes"
    """``bytes`` balances bytes over the servers; ``hash`` places as the mirrored system does."""
    transport: str = "auto"
    """``auto`` leaves large values in shared memory between processes of one host; ``tcp`` sends every byte by TCP."""
    local_reduce: str = "auto"
    """What the workers of a host sum before it crosses the network, in shared memory: ``auto`` large slices that go to
    servers of other hosts, ``on`` whatever is pushed, ``off`` nothing."""
    supervised: bool = False
    """A launcher reports ended children on the scheduler's standard input."""
    port_range: tuple[int, int] | None = None
    """The first and the last port at which this process may listen, where it chooses; None lets the system choose."""
    listen_fd: int | None = None
    """The inherited descriptor at which the scheduler listens already; not passed on."""
    io_threads: int = 1
    """How many threads move bytes, and encrypt them; a connection stays with one."""
    server_devices: tuple[str, ...] = ("cpu",)
    """Where servers compute, ``cpu`` or ``cuda:N`` of their own host: server r takes entry r modulo the count."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"DMLC_NUM_WORKER is {self.num_workers}; a cluster needs at least 1 worker")
        if self.num_servers == 0:
            raise ConfigError(
                "this job has no servers (DMLC_NUM_SERVER is 0): kv.create('collective') is the store of it, and for"
                " the others it is started with servers, by kvdist-launch -s 2 or kvdist_launch.run(..., servers=2)"
            )
        if self.num_servers < 1:
            raise ConfigError(f"DMLC_NUM_SERVER is {self.num_servers}; a cluster needs at least 1 server")
        if not 1 <= self.root_port <= 65535:
            raise ConfigError(f"DMLC_PS_ROOT_PORT is {self.root_port}; a port is a number from 1 to 65535")
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"KVDIST_RANK is {self.rank}; ranks count from 0")
        count = {Role.WORKER: self.num_workers, Role.SERVER: self.num_servers, Role.SCHEDULER: 1}[self.role]
        if self.rank is not None and self.rank >= count:
            raise ConfigError(f"KVDIST_RANK is {self.rank}, but the cluster has only {count} {self.role}(s)")
        check_security(self.security, self.secret_file)
        if self.security == "curve" and self.secret_file is None:
            raise ConfigError(
                "KVDIST_SECURITY is 'curve', but there is no secret to make keys of: set KVDIST_SECRET_FILE to a file"
                " with at least 32 random bytes, the same for all processes of the job"
            )
        if not 1 <= self.io_threads <= IO_THREADS_MAX:
            raise ConfigError(f"KVDIST_IO_THREADS is {self.io_threads}; it must be from 1 to {IO_THREADS_MAX}")
        one_of("KVDIST_PLACEMENT", self.placement, ("bytes", "hash"))
        one_of("KVDIST_TRANSPORT", self.transport, ("auto", "tcp"))
        one_of("KVDIST_LOCAL_REDUCE", self.local_reduce, ("auto", "on", "off"))
        if self.is_local and self.transport == "tcp":
            raise ConfigError(
                "KVDIST_TRANSPORT is 'tcp', and every user of this machine can reach unencrypted TCP sockets: set"
                " KVDIST_SECRET_FILE (kvdist-launch draws a secret by itself), or KVDIST_SECURITY=none if you trust all"
                " users"
            )
        if self.local_reduce == "on" and self.transport == "tcp":
            raise ConfigError(
                "KVDIST_LOCAL_REDUCE is 'on', but the workers of a host sum in shared memory, and KVDIST_TRANSPORT is"
                " 'tcp'; change one of them"
            )
        if self.bigarray_bound < 1:
            raise ConfigError(f"MXNET_KVSTORE_BIGARRAY_BOUND is {self.bigarray_bound}; it counts elements, at least 1")

    @property
    def scheduler_endpoint(self) -> str:
        """Where the scheduler binds and everybody else dials."""
        return local_endpoint(self.root_port) if self.is_local else tcp_endpoint(self.root_host, self.root_port)

    @property
    def is_local(self) -> bool:
        """Whether the sockets of this cluster are files of this machine that only its user can reach."""
        return self.secret_file is None and self.security is None and is_loopback(self.root_host)

    @property
    def encrypts(self) -> bool:
        """Whether every connection of this process is encrypted, and every peer asked for its key."""
        return self.secret_file is not None

    @property
    def job_tag(self) -> int:
        """The job's name in 32 bits, as every message carries it."""
        return zlib.crc32(self.job.encode())

    def server_device(self, rank: int | None) -> str:
        """Where the server of this rank sums and updates.

        Raises:
            ConfigError: servers take several devices in turn, and the rank is not known.
        """
        if rank is None and len(set(self.server_devices)) > 1:
            raise ConfigError(
                f"KVDIST_SERVER_DEVICE is {','.join(self.server_devices)!r}, which servers take in turn, and this one"
                " does not know its rank: set KVDIST_RANK for each server, or name one device"
            )
        return self.server_devices[(rank or 0) % len(self.server_devices)]

    def require_private(self, host: str) -> None:
        """Refuse to listen where others can reach us, unless that was asked for.

        Raises:
            ConfigError: `host` is not a loopback address, there is no secret, and ``KVDIST_SECURITY`` is not ``none``.
        """
        if self.encrypts or self.security == "none" or is_loopback(host):
            return
        raise ConfigError(
            f"{host} can be reached from other machines, and this job does not encrypt: anybody who reaches the port"
            " could read or change the model. Set KVDIST_SECRET_FILE, on every machine, to a file with the same 32 or"
            " more random bytes. Set KVDIST_SECURITY=none if the network is trusted, or use a loopback address"
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ClusterConfig | None:
        """The cluster that the environment describes; None when it describes none at all.

        Args:
            environ: variables to read instead of the process's own.

        Raises:
            ConfigError: some but not all of the needed variables are set, a value does not parse, or another
                launcher (torchrun, mpirun, srun) started several tasks without a cluster for them.
        """
        env = with_twins(os.environ if environ is None else environ)
        present = [name for name in CLUSTER_VARIABLES if env.get(name)]
        if not [name for name in present if name != "KVDIST_ROLE"] and env.get("KVDIST_ROLE") in (None, "", "worker"):
            refuse_foreign_launcher(env)
            return None
        missing = [name for name in CLUSTER_VARIABLES if name not in present and name != "KVDIST_ROLE"]
        if "KVDIST_ROLE" not in present:
            missing.insert(0, "KVDIST_ROLE")
        if missing:
            raise ConfigError(
                f"the environment describes half a cluster: {both(present)} set, {both(missing)} missing."
                " Start with kvdist-launch, which sets them all, or set the missing ones"
            )
        security, secret_file = security_settings(env)
        return cls(
            role=_role(env["KVDIST_ROLE"]),
            root_host=env["KVDIST_ROOT_URI"],
            root_port=integer(env, "KVDIST_ROOT_PORT"),
            num_workers=integer(env, "KVDIST_NUM_WORKER"),
            num_servers=integer(env, "KVDIST_NUM_SERVER"),
            rank=integer(env, "KVDIST_RANK") if env.get("KVDIST_RANK") else None,
            node_host=_node_host(env),
            job=env.get("KVDIST_JOB") or "default",
            security=security,
            secret_file=secret_file,
            port_range=port_range(env.get("KVDIST_PORT_RANGE") or ""),
            listen_fd=integer(env, "KVDIST_LISTEN_FD") if env.get("KVDIST_LISTEN_FD") else None,
            io_threads=integer(env, "KVDIST_IO_THREADS", cls.io_threads),
            bigarray_bound=integer(env, "KVDIST_BIGARRAY_BOUND", cls.bigarray_bound),
            placement=env.get("KVDIST_PLACEMENT") or "bytes",
            transport=(env.get("KVDIST_TRANSPORT") or "auto").lower(),
            local_reduce=(env.get("KVDIST_LOCAL_REDUCE") or "auto").lower(),
            supervised=env.get("KVDIST_SUPERVISED") == "1",
            server_devices=_server_devices(env),
            limits=_limits(env),
        )

    @classmethod
    def alone(cls, environ: Mapping[str, str] | None = None) -> ClusterConfig:
        """A cluster of one worker and one server inside this process, with the limits that the environment sets."""
        env = with_twins(os.environ if environ is None else environ)
        check_security(*security_settings(env))  # nothing to encrypt here, but a mistake is one here too
        bound = integer(env, "KVDIST_BIGARRAY_BOUND", cls.bigarray_bound)
        return cls(
            Role.WORKER,
            "this process",
            1,
            1,
            1,
            bigarray_bound=bound,
            server_devices=_server_devices(env),
            limits=_limits(env),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that describe this cluster to a child process (the inverse of `from_env`)."""
        env = {
            "DMLC_ROLE": str(self.role),
            "DMLC_PS_ROOT_URI": self.root_host,
            "DMLC_PS_ROOT_PORT": str(self.root_port),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "KVDIST_JOB": self.job,
            "KVDIST_PLACEMENT": self.placement,
            "KVDIST_TRANSPORT": self.transport,
            "KVDIST_LOCAL_REDUCE": self.local_reduce,
            "MXNET_KVSTORE_BIGARRAY_BOUND": str(self.bigarray_bound),
        }
        if self.rank is not None:
            env["KVDIST_RANK"] = str(self.rank)
        if self.node_host is not None:
            env["DMLC_NODE_HOST"] = self.node_host
        if self.security is not None:
            env["KVDIST_SECURITY"] = self.security
        if self.secret_file is not None:
            env["KVDIST_SECRET_FILE"] = self.secret_file
        if self.port_range is not None:
            env["KVDIST_PORT_RANGE"] = "{}-{}".format(*self.port_range)
        if self.io_threads != type(self).io_threads:
            env["KVDIST_IO_THREADS"] = str(self.io_threads)
        if self.supervised:
            env["KVDIST_SUPERVISED"] = "1"
        if self.server_devices != type(self).server_devices:
            env["KVDIST_SERVER_DEVICE"] = ",".join(self.server_devices)
        env |= {f"KVDIST_{name.upper()}": repr(getattr(self.limits, name)) for name in changed_limits(self.limits)}
        return env


def world_from_env(environ: Mapping[str, str] | None = None) -> World:
    """Who this process is among those that train without servers; see `kvdist.config.environment`.

    Raises:
        ConfigError: whatever started it has said only half of it, or the job has servers.
    """
    return world_of(with_twins(os.environ if environ is None else environ), os.getppid())


def collective_settings_from_env(environ: Mapping[str, str] | None = None) -> CollectiveSettings:
    """What the environment sets of a job without servers; see `kvdist.config.collective_settings`.

    Raises:
        ConfigError: a variable has a value that means nothing.
    """
    return settings_of(with_twins(os.environ if environ is None else environ))


def has_servers_from_env(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is part of a job with servers, through which those meet that train without (see `World`)."""
    return with_twins(os.environ if environ is None else environ).get("KVDIST_NUM_SERVER", "0") != "0"


def patience_from_env(environ: Mapping[str, str] | None = None) -> float:
    """How many seconds a process or its host may be silent before it counts as lost (``KVDIST_PATIENCE_S``).

    Raises:
        ConfigError: it is out of range, or another limit is wrong.
    """
    return _limits(os.environ if environ is None else environ).patience_s


def update_on_kvstore_from_env(environ: Mapping[str, str] | None = None) -> bool:
    """Whether stores update weights for whoever does not say (``MXNET_UPDATE_ON_KVSTORE``): True but for ``0``.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    env = with_twins(os.environ if environ is None else environ)
    setting = env.get("KVDIST_UPDATE_ON_KVSTORE") or "1"
    one_of("MXNET_UPDATE_ON_KVSTORE", setting, ("0", "1"))
    return setting == "1"


def without_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable of the mirrored system that is set and changes nothing."""
    env = os.environ if environ is None else environ
    told = {name: advice for name, advice in WITHOUT_EFFECT.items() if env.get(name)}
    if _is_p3(env):
        del told["DMLC_PS_VAN_TYPE"]
    return [f"{name} has no effect: {advice}" for name, advice in told.items()]


def priority_slices_from_env(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``dist`` stores cut keys into small slices that overtake each other: ``KVDIST_PRIORITY_SLICES``.

    Where that is not set, ``DMLC_PS_VAN_TYPE=p3`` says so.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    env = os.environ if environ is None else environ
    setting = env.get("KVDIST_PRIORITY_SLICES") or ("1" if _is_p3(env) else "0")
    one_of("KVDIST_PRIORITY_SLICES", setting, ("0", "1"))
    return setting == "1"


def kernels_from_env(environ: Mapping[str, str] | None = None) -> str:
    """What does the arithmetic of this process (``KVDIST_KERNELS``): ``auto``, ``numpy`` or ``numba``.

    Raises:
        ConfigError: it is another word.
    """
    setting = ((os.environ if environ is None else environ).get("KVDIST_KERNELS") or "auto").lower()
    one_of("KVDIST_KERNELS", setting, ("auto", "numpy", "numba"))
    return setting


def gpu_from_env(environ: Mapping[str, str] | None = None) -> str:
    """What drives the GPUs on which values of this process lie (``KVDIST_GPU``).

    ``auto`` (CuPy, else numba), ``cupy``, ``numba``, or ``host``: they are brought to the host.

    Raises:
        ConfigError: it is another word.
    """
    setting = ((os.environ if environ is None else environ).get("KVDIST_GPU") or "auto").lower()
    one_of("KVDIST_GPU", setting, ("auto", "cupy", "numba", "host"))
    return setting


def optimizer_modules_from_env(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The modules with optimizers of the operator's own (``KVDIST_OPTIMIZER_MODULE``, names with commas between).

    Raises:
        ConfigError: one cannot be the name of a module.
    """
    return module_names((os.environ if environ is None else environ).get("KVDIST_OPTIMIZER_MODULE") or "")


def server_modules_from_env(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The modules with optimizers and commands of the operator's own (``KVDIST_SERVER_MODULE``).

    Raises:
        ConfigError: one cannot be the name of a module.
    """
    return module_names((os.environ if environ is None else environ).get("KVDIST_SERVER_MODULE") or "")


def profiler_autostart_from_env(environ: Mapping[str, str] | None = None) -> bool:
    """Whether workers and servers trace themselves from their start (``MXNET_PROFILER_AUTOSTART``): for ``1``.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    env = with_twins(os.environ if environ is None else environ)
    setting = env.get("KVDIST_PROFILER_AUTOSTART") or "0"
    one_of("MXNET_PROFILER_AUTOSTART", setting, ("0", "1"))
    return setting == "1"


def profile_dir_from_env(environ: Mapping[str, str] | None = None) -> Path:
    """Where traces lie whose names have no directory (``KVDIST_PROFILE_DIR``), else where the process started."""
    return Path((os.environ if environ is None else environ).get("KVDIST_PROFILE_DIR") or ".").absolute()


def checkpoint_root_from_env(environ: Mapping[str, str] | None = None) -> Path:
    """Below which folder this process writes and reads checkpoints that others name: by default its own.

    Raises:
        ConfigError: it is no absolute path.
    """
    text = (os.environ if environ is None else environ).get("KVDIST_CHECKPOINT_ROOT")
    root = Path(text) if text else Path.cwd()
    if not root.is_absolute():
        raise ConfigError(f"KVDIST_CHECKPOINT_ROOT is {text!r}, which is no absolute path of a folder")
    return root


def module_names(text: str) -> tuple[str, ...]:
    """The names of modules in a text like ``my_rules,team.rules``.

    Raises:
        ConfigError: one cannot be the name of a module.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"{name!r} is not the name of a module: --server-module, --optimizer-module and the variables for them"
                " take what Python imports, such as my_rules for the file my_rules.py"
            )
    return names


def _role(word: str) -> Role:
    try:
        return Role(word.strip().lower())
    except ValueError:
        raise ConfigError(f"DMLC_ROLE is {word!r}; it must be scheduler, server or worker") from None


def _is_p3(env: Mapping[str, str]) -> bool:
    return env.get("DMLC_PS_VAN_TYPE", "").lower() == "p3"


def _limits(env: Mapping[str, str]) -> Limits:
    refuse_replaced(env)
    changes: dict[str, int | float] = {}
    if env.get(SLICE_THRESHOLD):
        elements = integer(env, SLICE_THRESHOLD)
        if elements < 2:
            raise ConfigError(f"{SLICE_THRESHOLD} is {elements}; it counts elements of float32, at least 2")
        changes["priority_slice_bytes"] = 4 * elements
    for name, kind in Limits.__annotations__.items():
        text = env.get(f"KVDIST_{name.upper()}")
        if not text:
            continue
        try:
            value = int(text) if kind == "int" else float(text)
        except ValueError:
            raise ConfigError(f"KVDIST_{name.upper()} is {text!r}; it must be a number") from None
        if value == 0 and getattr(Limits, name) == 0:
            continue
        if not 0 < value < float("inf"):
            raise ConfigError(f"KVDIST_{name.upper()} is {text}; it must be positive and finite")
        changes[name] = value
    return checked_limits(replace(Limits(), **changes))  # type: ignore[arg-type]  # mypy cannot see the fields' names


def _server_devices(env: Mapping[str, str]) -> tuple[str, ...]:
    return device_names("KVDIST_SERVER_DEVICE", env.get("KVDIST_SERVER_DEVICE") or "cpu")


def _node_host(env: Mapping[str, str]) -> str | None:
    if env.get("KVDIST_NODE_HOST"):
        return env["KVDIST_NODE_HOST"]
    if env.get("KVDIST_INTERFACE"):
        return address_of_interface(env["KVDIST_INTERFACE"], prefers_ipv6=":" in env["KVDIST_ROOT_URI"])
    return None
