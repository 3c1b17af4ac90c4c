"""The cluster as its environment describes it, and every default and limit in one place.

This module alone reads the environment, so what a process was told can be found by reading one file. MXNet's
variables (``DMLC_*``) are honoured as they are; each has a ``KVDIST_*`` twin that wins over it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvdist.errors import ConfigError
from kvdist.nodes import Role

MIB = 1 << 20

TWINS = {
    "KVDIST_ROLE": "DMLC_ROLE",
    "KVDIST_ROOT_URI": "DMLC_PS_ROOT_URI",
    "KVDIST_ROOT_PORT": "DMLC_PS_ROOT_PORT",
    "KVDIST_NUM_WORKER": "DMLC_NUM_WORKER",
    "KVDIST_NUM_SERVER": "DMLC_NUM_SERVER",
    "KVDIST_NODE_HOST": "DMLC_NODE_HOST",
    "KVDIST_INTERFACE": "DMLC_INTERFACE",
    "KVDIST_BIGARRAY_BOUND": "MXNET_KVSTORE_BIGARRAY_BOUND",
    "KVDIST_UPDATE_ON_KVSTORE": "MXNET_UPDATE_ON_KVSTORE",
    "KVDIST_PROFILER_AUTOSTART": "MXNET_PROFILER_AUTOSTART",
}
"""Our name of a variable → the name in the mirrored system."""

WITHOUT_EFFECT = {
    "DMLC_PS_VAN_TYPE": "there is one transport, which honours priorities; KVDIST_TRANSPORT turns shared memory off",
    "DMLC_PS_WATER_MARK": "KVDIST_WINDOW_BYTES bounds what is on its way",
    "DMLC_LOCAL": "processes of one host share memory by themselves",
    "DMLC_USE_KUBERNETES": "DMLC_NODE_HOST is the address that a server announces",
    "PS_HEARTBEAT_INTERVAL": "heartbeats are always on; KVDIST_HEARTBEAT_S is their interval",
    "PS_HEARTBEAT_TIMEOUT": "KVDIST_SILENCE_S is how long a process may be silent",
    "PS_RESEND": "what is lost is always sent again",
    "MXNET_KVSTORE_SLICE_THRESHOLD": "KVDIST_SLICE_BYTES is the size of a slice",
    "MXNET_KVSTORE_USETREE": "sums over devices are made on the CPU",
    "MXNET_KVSTORE_REDUCTION_NTHREADS": "sums over devices are made on the thread that pushes",
    "MXNET_OPTIMIZER_AGGREGATION_SIZE": "all parameters of a step travel together",
}
"""Variables of the mirrored system that people set and that change nothing here → what there is instead."""

CLUSTER_VARIABLES = ("KVDIST_ROLE", "KVDIST_ROOT_URI", "KVDIST_ROOT_PORT", "KVDIST_NUM_WORKER", "KVDIST_NUM_SERVER")
"""What a process must be told to take part in a cluster."""

FOREIGN_LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpirun (PMI)": ("PMI_SIZE", "PMI_RANK"),
    "Slurm's srun": ("SLURM_NTASKS", "SLURM_PROCID"),
}
"""Launcher → the variables with which it says how many tasks there are and which one this is."""


@dataclass(frozen=True)
class Limits:
    """What bounds memory, messages and waits. Every process of a job should have the same."""

    slice_bytes: int = 4 * MIB
    """A key travels and is updated in pieces of at most this size, so that sending and summing overlap."""
    window_bytes: int = 64 * MIB
    """Bytes that may be on the way to one server without having been received."""
    shared_bytes_max: int = 1 << 40
    """The most shared memory that a process makes; what does not fit is sent."""
    frame_bytes_max: int = 64 * MIB
    """The largest frame a socket accepts."""
    connect_timeout_s: float = 30.0
    """How long a process tries to reach the scheduler."""
    form_timeout_s: float = 300.0
    """How long the cluster may take to be complete."""
    reconnect_grace_s: float = 0.4
    """A broken connection counts as a lost process after this time without a new one."""
    heartbeat_s: float = 1.0
    """How often a process tells the scheduler that it lives, and a socket probes its peer."""
    silence_s: float = 3.0
    """A connection without any sign of life for this long is broken."""
    explain_after_s: float = 10.0
    """A wait longer than this prints who is awaited, for what, since when; again at each multiple."""
    farewell_s: float = 5.0
    """How long a process that ends waits for its last messages to leave."""


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
    """``none`` allows unencrypted traffic beyond this host."""
    bigarray_bound: int = 1_000_000
    """Keys with at least this many elements are cut over all servers."""
    placement: str = "bytes"
    """``bytes`` balances bytes over the servers; ``hash`` places as the mirrored system does."""
    transport: str = "auto"
    """``auto`` leaves large values in shared memory between processes of one host; ``tcp`` sends every byte."""
    local_reduce: str = "auto"
    """What the workers of a host sum before it crosses the network, in shared memory: ``auto`` large slices that go to
    servers of other hosts, ``on`` whatever is pushed, ``off`` nothing."""
    supervised: bool = False
    """A launcher reports ended children on the scheduler's standard input."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"DMLC_NUM_WORKER is {self.num_workers}; a cluster needs at least 1 worker")
        if self.num_servers < 1:
            raise ConfigError(f"DMLC_NUM_SERVER is {self.num_servers}; a cluster needs at least 1 server")
        if not 1 <= self.root_port <= 65535:
            raise ConfigError(f"DMLC_PS_ROOT_PORT is {self.root_port}; a port is a number from 1 to 65535")
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"KVDIST_RANK is {self.rank}; ranks count from 0")
        count = {Role.WORKER: self.num_workers, Role.SERVER: self.num_servers, Role.SCHEDULER: 1}[self.role]
        if self.rank is not None and self.rank >= count:
            raise ConfigError(f"KVDIST_RANK is {self.rank}, but the cluster has only {count} {self.role}(s)")
        _one_of("KVDIST_SECURITY", self.security, (None, "none"))
        _one_of("KVDIST_PLACEMENT", self.placement, ("bytes", "hash"))
        _one_of("KVDIST_TRANSPORT", self.transport, ("auto", "tcp"))
        _one_of("KVDIST_LOCAL_REDUCE", self.local_reduce, ("auto", "on", "off"))
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
        return tcp_endpoint(self.root_host, self.root_port)

    @property
    def job_tag(self) -> int:
        """The job's name in 32 bits, as every message carries it."""
        return zlib.crc32(self.job.encode())

    def require_private(self, host: str) -> None:
        """Refuse to listen where others can reach us, unless that was asked for.

        Raises:
            ConfigError: `host` is not a loopback address and ``KVDIST_SECURITY`` is not ``none``.
        """
        if self.security == "none" or is_loopback(host):
            return
        raise ConfigError(
            f"{host} can be reached from other machines, and kvdist does not encrypt or authenticate yet: anybody who"
            " reaches the port could read or change the model. Set KVDIST_SECURITY=none if the network is trusted,"
            " or use a loopback address"
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
        env = _with_twins(os.environ if environ is None else environ)
        present = [name for name in CLUSTER_VARIABLES if env.get(name)]
        if not [name for name in present if name != "KVDIST_ROLE"] and env.get("KVDIST_ROLE") in (None, "", "worker"):
            _refuse_foreign_launcher(env)
            return None
        missing = [name for name in CLUSTER_VARIABLES if name not in present and name != "KVDIST_ROLE"]
        if "KVDIST_ROLE" not in present:
            missing.insert(0, "KVDIST_ROLE")
        if missing:
            raise ConfigError(
                f"the environment describes half a cluster: {_both(present)} set, {_both(missing)} missing."
                " Start with kvdist-launch, which sets them all, or set the missing ones"
            )
        return cls(
            role=_role(env["KVDIST_ROLE"]),
            root_host=env["KVDIST_ROOT_URI"],
            root_port=_integer(env, "KVDIST_ROOT_PORT"),
            num_workers=_integer(env, "KVDIST_NUM_WORKER"),
            num_servers=_integer(env, "KVDIST_NUM_SERVER"),
            rank=_integer(env, "KVDIST_RANK") if env.get("KVDIST_RANK") else None,
            node_host=_node_host(env),
            job=env.get("KVDIST_JOB") or "default",
            security=(env.get("KVDIST_SECURITY") or "").lower() or None,
            bigarray_bound=_integer(env, "KVDIST_BIGARRAY_BOUND", cls.bigarray_bound),
            placement=env.get("KVDIST_PLACEMENT") or "bytes",
            transport=(env.get("KVDIST_TRANSPORT") or "auto").lower(),
            local_reduce=(env.get("KVDIST_LOCAL_REDUCE") or "auto").lower(),
            supervised=env.get("KVDIST_SUPERVISED") == "1",
            limits=_limits(env),
        )

    @classmethod
    def alone(cls, environ: Mapping[str, str] | None = None) -> ClusterConfig:
        """A cluster of one worker and one server inside this process, with the limits that the environment sets."""
        env = _with_twins(os.environ if environ is None else environ)
        bound = _integer(env, "KVDIST_BIGARRAY_BOUND", cls.bigarray_bound)
        return cls(Role.WORKER, "this process", 1, 1, 1, bigarray_bound=bound, limits=_limits(env))

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
        if self.supervised:
            env["KVDIST_SUPERVISED"] = "1"
        env |= {f"KVDIST_{name.upper()}": repr(getattr(self.limits, name)) for name in _changed(self.limits)}
        return env


def update_on_kvstore_from_env(environ: Mapping[str, str] | None = None) -> bool:
    """Whether stores update weights for whoever does not say (``MXNET_UPDATE_ON_KVSTORE``): True but for ``0``.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    env = _with_twins(os.environ if environ is None else environ)
    setting = env.get("KVDIST_UPDATE_ON_KVSTORE") or "1"
    _one_of("MXNET_UPDATE_ON_KVSTORE", setting, ("0", "1"))
    return setting == "1"


def without_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable of the mirrored system that is set and changes nothing."""
    env = os.environ if environ is None else environ
    return [f"{name} has no effect: {advice}" for name, advice in WITHOUT_EFFECT.items() if env.get(name)]


def kernels_from_env(environ: Mapping[str, str] | None = None) -> str:
    """What does the arithmetic of this process (``KVDIST_KERNELS``): ``auto``, ``numpy`` or ``numba``.

    Raises:
        ConfigError: it is another word.
    """
    setting = ((os.environ if environ is None else environ).get("KVDIST_KERNELS") or "auto").lower()
    _one_of("KVDIST_KERNELS", setting, ("auto", "numpy", "numba"))
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
    env = _with_twins(os.environ if environ is None else environ)
    setting = env.get("KVDIST_PROFILER_AUTOSTART") or "0"
    _one_of("MXNET_PROFILER_AUTOSTART", setting, ("0", "1"))
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


def tcp_endpoint(host: str, port: int) -> str:
    """``tcp://host:port`` with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def stays_on_host(endpoint: str) -> bool:
    """Whether what is sent to an endpoint goes over this machine's loopback, whose speed is that of memory."""
    address = endpoint.removeprefix("tcp://")
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    return address != endpoint and is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (a name or an address)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name() -> str:
    """This machine's name, for people."""
    return socket.gethostname()


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine on the route to `host`: what a server there should announce.

    Raises:
        ConfigError: the name does not resolve or there is no route; the message says which.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only asks the kernel which card it would use.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"there is no way from this machine to the scheduler at {host}:{port} ({error});"
            " check DMLC_PS_ROOT_URI, or set DMLC_NODE_HOST to this machine's address"
        ) from error


def _with_twins(environ: Mapping[str, str]) -> dict[str, str]:
    env = dict(environ)
    for ours, theirs in TWINS.items():
        if not env.get(ours) and env.get(theirs):
            env[ours] = env[theirs]
    return env


def _both(names: list[str]) -> str:
    return ", ".join(TWINS.get(name, name) for name in names) + (" is" if len(names) == 1 else " are")


def _role(word: str) -> Role:
    try:
        return Role(word.strip().lower())
    except ValueError:
        raise ConfigError(f"DMLC_ROLE is {word!r}; it must be scheduler, server or worker") from None


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{TWINS.get(name, name)} is {text!r}; it must be a whole number") from None


def _one_of(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        known = ", ".join(word for word in allowed if word)
        raise ConfigError(f"{name} is {value!r}; it must be one of: {known}")


def _limits(env: Mapping[str, str]) -> Limits:
    changes: dict[str, int | float] = {}
    for name, kind in Limits.__annotations__.items():
        text = env.get(f"KVDIST_{name.upper()}")
        if not text:
            continue
        try:
            value = int(text) if kind == "int" else float(text)
        except ValueError:
            raise ConfigError(f"KVDIST_{name.upper()} is {text!r}; it must be a number") from None
        if not 0 < value < float("inf"):
            raise ConfigError(f"KVDIST_{name.upper()} is {text}; it must be positive and finite")
        changes[name] = value
    return _checked(replace(Limits(), **changes))  # type: ignore[arg-type]  # mypy cannot see the fields' names


def _checked(limits: Limits) -> Limits:
    if not 8 <= limits.slice_bytes <= limits.frame_bytes_max:
        raise ConfigError(
            f"KVDIST_SLICE_BYTES is {limits.slice_bytes}; a slice has at least 8 bytes (one element of the widest type)"
            f" and at most as many as a frame (KVDIST_FRAME_BYTES_MAX, {limits.frame_bytes_max})"
        )
    return limits


def _changed(limits: Limits) -> list[str]:
    return [name for name in Limits.__annotations__ if getattr(limits, name) != getattr(Limits(), name)]


def _node_host(env: Mapping[str, str]) -> str | None:
    if env.get("KVDIST_NODE_HOST"):
        return env["KVDIST_NODE_HOST"]
    if env.get("KVDIST_INTERFACE"):
        return _address_of_interface(env["KVDIST_INTERFACE"])
    return None


def _address_of_interface(name: str) -> str:
    import fcntl
    import struct

    siocgifaddr = 0x8915  # linux/sockios.h: the IPv4 address of an interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(label for _, label in socket.if_nameindex())
            raise ConfigError(
                f"DMLC_INTERFACE is {name!r}, which has no IPv4 address here; interfaces: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _refuse_foreign_launcher(env: Mapping[str, str]) -> None:
    for launcher, (size_name, rank_name) in FOREIGN_LAUNCHERS.items():
        size = env.get(size_name, "")
        if size.isdigit() and int(size) > 1 and rank_name in env:
            raise ConfigError(
                f"{launcher} started {size} tasks ({size_name}={size}), but no kvdist cluster is described: each task"
                " would train a model of its own. Start with kvdist-launch -n WORKERS -s SERVERS COMMAND instead"
            )
